"""Which replicas of a stage differ from the rest after a commit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from swarm.ids import Digest, PeerId
from swarm.messages import StateMark

SAME_CLASS_TOLERANCE = 1e-9
"""Within a numeric class bits agree, but a norm is summed in the order of however many threads a peer has."""
TOLERANCE = 1e-4
"""Relative difference of the parameters' squared norm that is accepted between numeric classes."""


def diverged(marks: Mapping[PeerId, StateMark]) -> dict[PeerId, str]:
    """Peers that must fetch state, and why.  Of one numeric class bits must agree; across classes norms must."""
    found: dict[PeerId, str] = {}
    for numeric_class in sorted({mark.numeric_class for mark in marks.values()}):
        group = {p: m for p, m in marks.items() if m.numeric_class == numeric_class}
        reason = f"parameters differ from {len(group) - 1} peers of class {numeric_class}"
        common = _majority([m.digest for m in group.values()])
        found.update({p: reason for p, m in group.items() if m.digest != common})
        norm = _median([m.squared_norm for p, m in group.items() if p not in found])
        found.update({p: reason for p, m in group.items() if _apart(m.squared_norm, norm) > SAME_CLASS_TOLERANCE})
    norm = _median([m.squared_norm for p, m in marks.items() if p not in found])
    for peer, mark in marks.items():
        if peer not in found and _apart(mark.squared_norm, norm) > TOLERANCE:
            found[peer] = f"norm of parameters {mark.squared_norm:.6g}, the others' is {norm:.6g}"
    return found


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


def _apart(value: float, norm: float) -> float:
    """Relative difference."""
    return abs(value - norm) / max(abs(norm), 1e-300)


def _majority(values: list[Digest | None]) -> Digest | None:
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], repr(value)))
