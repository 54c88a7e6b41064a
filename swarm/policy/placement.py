"""Which stage a newcomer takes: the one whose throughput is least, so that the swarm's minimum rises most."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from swarm.records import PeerRecord

UNKNOWN_RATE = 1.0
"""Microbatches per second assumed of a peer that says nothing of its speed."""


def choose_stage(stages: Sequence[Sequence[PeerRecord]], seed: str) -> tuple[int, str]:
    """The stage to join and why; ``stages[s]`` are the living records of stage s, those still joining included.

    An empty stage comes first; equals are broken by ``seed`` (the newcomer's id), so that many starting at once spread.
    """

    def throughput(records: Sequence[PeerRecord]) -> float:
        return sum(1.0 / r.forward_seconds if r.forward_seconds > 0 else UNKNOWN_RATE for r in records)

    def rank(stage: int) -> tuple[float, str]:
        tie = hashlib.sha256(f"{seed}/{stage}".encode()).hexdigest()
        return (round(throughput(stages[stage]), 6), tie)

    best = min(range(len(stages)), key=rank)
    count = len(stages[best])
    return best, f"stage {best} has {count} peer{'s' if count != 1 else ''}, the least throughput"
