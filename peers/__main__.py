"""``python -m peers`` is ``swarm``."""

from peers.cli import main

main()
