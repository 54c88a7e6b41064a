"""Other ways to choose a peer for a microbatch, to compare ours with."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.ids import PeerId
from swarm.policy.routing import Lane, Routing, choose, tie
from swarm.sim.scenario.config import Wiring


def uniform(lanes: Sequence[tuple[PeerId, Lane]], units: float, seed: str, waiting_units: float = 0.0) -> PeerId | None:
    """Any peer, whatever its speed and load."""
    return min((peer for peer, _ in lanes), key=lambda peer: tie(seed, peer), default=None)


def static(lanes: Sequence[tuple[PeerId, Lane]], units: float, seed: str, waiting_units: float = 0.0) -> PeerId | None:
    """Fixed pipelines: the n-th peer of each stage belongs to the n-th, and microbatches go to them in turn."""
    peers = sorted(peer for peer, _ in lanes)
    return peers[int(seed.split("/")[1]) % len(peers)] if peers else None


WIRINGS: dict[Wiring, Routing] = {"stochastic": choose, "uniform": uniform, "static": static}
