"""The best that any assignment of peers to stages could do: an exact mixed-integer solution, independent of the roles.

Throughput is that of the slowest stage, and a stage's is the sum of its peers' rates: maximise t such that at every
stage the rates add up to at least t and every peer serves one stage at most.  Peers of one class are alike, so the
unknowns are how many of each class serve each stage.  Communication and the close of a step are left out: nothing can
beat this.
"""

from __future__ import annotations

from collections.abc import Sequence

Counts = tuple[tuple[int, ...], ...]
"""By class, then by stage."""

GAP = 1e-3
"""Relative distance from the optimum at which the solver may stop."""
SOLVER_SECONDS = 10.0


def best_assignment(counts: Sequence[int], rates: Sequence[Sequence[float]]) -> tuple[float, Counts]:
    """Microbatches per second and the assignment that reaches them.

    ``counts[c]`` are the peers of class c, ``rates[c][s]`` the microbatches per second of one of them at stage s (0: it
    cannot serve it).  Throughput is 0 if there are fewer peers than stages.
    """
    # Late: scipy takes a third of a second, and only scenarios need it.
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    classes, stages = len(counts), len(rates[0])
    unknowns = classes * stages + 1
    # At every stage: the sum of rates, less t, is at least 0.
    lift = np.zeros((stages, unknowns))
    for stage in range(stages):
        for index in range(classes):
            lift[stage, index * stages + stage] = rates[index][stage]
        lift[stage, -1] = -1.0
    # Of every class: no more than there are, and none where it cannot serve.
    there = np.zeros((classes, unknowns))
    most = np.full(unknowns, np.inf)
    for index in range(classes):
        there[index, index * stages : (index + 1) * stages] = 1.0
        for stage in range(stages):
            most[index * stages + stage] = counts[index] if rates[index][stage] > 0 else 0
    solution = milp(
        c=np.append(np.zeros(unknowns - 1), -1.0),
        constraints=[LinearConstraint(lift, 0.0, np.inf), LinearConstraint(there, 0.0, np.array(counts, dtype=float))],
        integrality=np.append(np.ones(unknowns - 1), 0.0),
        bounds=Bounds(0.0, most),
        options={"mip_rel_gap": GAP, "time_limit": SOLVER_SECONDS},
    )
    if solution.x is None:
        raise RuntimeError(f"no assignment was found: {solution.message}")
    values = [round(value) for value in solution.x[:-1]]
    placed = [values[index * stages : (index + 1) * stages] for index in range(classes)]
    for index, row in enumerate(placed):
        _place_the_rest(counts[index] - sum(row), index, placed, rates)
    assignment = tuple(tuple(row) for row in placed)
    return throughput(assignment, rates), assignment


def _place_the_rest(rest: int, index: int, placed: list[list[int]], rates: Sequence[Sequence[float]]) -> None:
    """Peers that the optimum does not need go where the least throughput is, of the stages they can serve."""
    for _ in range(rest):
        can = [stage for stage, rate in enumerate(rates[index]) if rate > 0]
        if not can:
            return
        at = min(can, key=lambda s: sum(row[s] * rate[s] for row, rate in zip(placed, rates, strict=True)))
        placed[index][at] += 1


def throughput(assignment: Sequence[Sequence[int]], rates: Sequence[Sequence[float]]) -> float:
    """Microbatches per second of an assignment: its slowest stage's, with work spread in proportion to speed."""
    stages = len(rates[0])
    return min(
        sum(count[stage] * rate[stage] for count, rate in zip(assignment, rates, strict=True))
        for stage in range(stages)
    )


class Optimum:
    """Solutions by how many peers of each class are alive, which come up again and again."""

    def __init__(self, rates: Sequence[Sequence[float]]) -> None:
        self.rates = [tuple(rate) for rate in rates]
        self._known: dict[tuple[int, ...], tuple[float, Counts]] = {}

    def of(self, counts: Sequence[int]) -> tuple[float, Counts]:
        """Throughput and assignment for so many peers of each class."""
        key = tuple(counts)
        if key not in self._known:
            self._known[key] = best_assignment(key, self.rates)
        return self._known[key]
