"""Who sits out the next attempt of an all-reduce that nobody completed."""

from __future__ import annotations

from collections.abc import Mapping

from swarm.ids import PeerId


def sits_out(
    missed: Mapping[PeerId, frozenset[PeerId]], silent: frozenset[PeerId], weights: Mapping[PeerId, int], attempt: int
) -> tuple[frozenset[PeerId], str]:
    """Members to leave out, and why.

    ``missed[p]`` are the members that p could not reach, ``silent`` those that did not answer the lead.  Whoever two
    others missed goes.  In a group of two that cannot reach each other the lighter one goes, from the second failure:
    the first may be a hiccup.
    """
    if silent:
        return silent, "did not answer the lead"
    votes: dict[PeerId, int] = {}
    for voter, targets in missed.items():
        for target in targets - {voter}:
            votes[target] = votes.get(target, 0) + 1
    twice = frozenset(peer for peer, count in votes.items() if count >= 2)
    if twice and len(twice) < len(missed):
        return twice, "two members could not reach it"
    if votes and attempt >= 1:
        worst = min(votes, key=lambda peer: (-votes[peer], weights.get(peer, 0), peer))
        return frozenset({worst}), "a member could not reach it, twice"
    return frozenset(), "tried again with all"
