"""Who moves to which stage: SWARM's rule (section 3.3, Algorithm 2), for comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swarm.ids import PeerId


def paper_move(queues: Sequence[Mapping[PeerId, float]]) -> tuple[PeerId, int, str] | None:
    """The peer that moves, its new stage, and why; ``queues[s]`` are the queue lengths of stage s's peers.

    The least loaded peer of the least loaded stage moves to the most loaded one.  What the paper leaves open: a stage
    is never emptied, loads that differ by less than one call a peer are the same, equals are broken by order of id.
    """
    loads = [sum(queue.values()) for queue in queues]
    may_give = [stage for stage, queue in enumerate(queues) if len(queue) > 1]
    if not may_give:
        return None
    least = min(may_give, key=lambda stage: (loads[stage], stage))
    most = max(range(len(queues)), key=lambda stage: (loads[stage], -stage))
    if loads[most] - loads[least] < max(1, len(queues[least])):
        return None
    peer = min(queues[least], key=lambda peer: (queues[least][peer], peer))
    return peer, most, f"stage {most} has {loads[most]:.0f} calls waiting, stage {least} {loads[least]:.0f}"
