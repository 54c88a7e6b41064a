"""What to do at the close of a step, given what the peers of one stage say they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarm.ids import MicrobatchId, PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosePlan:
    """``drops`` throw their whole gradient of the step away; ``repairs`` are then held by nobody."""

    drops: tuple[PeerId, ...]
    repairs: tuple[MicrobatchId, ...]
    reason: str

    @property
    def clean(self) -> bool:
        """Every expected microbatch is held exactly once."""
        return not self.drops and not self.repairs


def plan_close(expected: frozenset[MicrobatchId], held: Mapping[PeerId, frozenset[MicrobatchId]]) -> ClosePlan:
    """Decide once.  A sum cannot be undone in part, so of two holders of one microbatch one drops its whole step.

    The one goes whose loss costs fewest repairs: microbatches that nobody else holds.  Whoever holds what is not
    expected (an excluded microbatch) must drop as well.
    """
    keep = {peer: ids for peer, ids in held.items() if ids <= expected}
    drops = [peer for peer in held if peer not in keep]
    while True:
        holders: dict[MicrobatchId, list[PeerId]] = {}
        for peer, ids in keep.items():
            for microbatch in ids:
                holders.setdefault(microbatch, []).append(peer)
        doubled = {peer for peers in holders.values() if len(peers) > 1 for peer in peers}
        if not doubled:
            break

        def cost(peer: PeerId, holders: Mapping[MicrobatchId, list[PeerId]] = holders) -> tuple[int, PeerId]:
            return (sum(len(holders[m]) == 1 for m in keep[peer]), peer)

        cheapest = min(doubled, key=cost)
        drops.append(cheapest)
        del keep[cheapest]
    missing = tuple(sorted(expected - frozenset(holders)))
    reason = f"{len(drops)} drop, {len(missing)} missing of {len(expected)}"
    return ClosePlan(drops=tuple(sorted(drops)), repairs=missing, reason=reason)
