"""Which replicas of a stage differ from the rest after a commit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from swarm.ids import PeerId
from swarm.messages import StateMark

TOLERANCE = 1e-4
"""Relative difference of the parameters' squared norm that is accepted between numeric classes."""


def diverged(marks: Mapping[PeerId, StateMark]) -> dict[PeerId, str]:
    """Peers that must fetch state, and why.  Of one numeric class bits must agree; across classes norms must."""
    found: dict[PeerId, str] = {}
    for numeric_class in {mark.numeric_class for mark in marks.values()}:
        group = {p: (m.squared_norm, m.digest) for p, m in marks.items() if m.numeric_class == numeric_class}
        common = _majority(list(group.values()))
        for peer, value in group.items():
            if value != common:
                found[peer] = f"parameters differ from {len(group) - 1} peers of class {numeric_class}"
    norms = sorted(m.squared_norm for p, m in marks.items() if p not in found)
    if norms:
        median = norms[len(norms) // 2]
        for peer, mark in marks.items():
            if peer not in found and abs(mark.squared_norm - median) > TOLERANCE * abs(median):
                found[peer] = f"norm of parameters {mark.squared_norm:.6g}, the others' is {median:.6g}"
    return found


def _majority(values: list[tuple[float, str | None]]) -> tuple[float, str | None]:
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], repr(value)))
