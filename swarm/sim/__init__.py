"""The roles of the real swarm in one process, on a virtual clock and a simulated network.  Imports no torch."""
