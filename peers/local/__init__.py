"""``swarm local``: a whole swarm as child processes on loopback."""

from peers.local.command import main

__all__ = ["main"]
