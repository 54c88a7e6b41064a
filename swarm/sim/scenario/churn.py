"""Who dies and who comes, and when: drawn by rates, or read from a trace of how many instances were alive."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from swarm.errors import UsageError
from swarm.sim.scenario.config import ChurnSection

UNIT_SECONDS = {"milliseconds": 1e-3, "seconds": 1.0, "hours": 3600.0}


@dataclass(frozen=True, slots=True)
class Change:
    """So many peers of a class come (positive) or die (negative), at a virtual time."""

    seconds: float
    peer_class: int
    count: int


def changes(churn: ChurnSection, counts: Sequence[int], seconds: float, rng: Random) -> list[Change]:
    """All of a run of ``seconds`` that begins with ``counts`` peers of each class."""
    if churn.trace is not None:
        return list(_of_trace(churn, counts[0], seconds))
    return _of_rates(churn, counts, seconds, rng)


def _of_rates(churn: ChurnSection, counts: Sequence[int], seconds: float, rng: Random) -> list[Change]:
    """Each machine lives and stays away for exponential times, again and again."""
    assert churn.mean_life_hours is not None
    found = []
    for index, count in enumerate(counts):
        for _ in range(count):
            at = 0.0
            while True:
                at += rng.expovariate(1 / (3600.0 * churn.mean_life_hours))
                found.append(Change(at, index, -1))
                at += rng.expovariate(1 / (60.0 * churn.mean_away_minutes))
                found.append(Change(at, index, 1))
                if at >= seconds:
                    break
    return sorted((change for change in found if change.seconds < seconds), key=lambda change: change.seconds)


def _of_trace(churn: ChurnSection, count: int, seconds: float) -> Iterator[Change]:
    assert churn.trace is not None
    alive = count
    for at, instances in read_trace(churn.trace, churn.trace_unit):
        wanted = instances * churn.trace_times
        if at * churn.slowdown >= seconds:
            return
        if wanted != alive:
            yield Change(at * churn.slowdown, 0, wanted - alive)
            alive = wanted


def read_trace(path: Path, unit: str) -> list[tuple[float, int]]:
    """Seconds since the first line with instances, and how many are alive from then on.  Raises UsageError.

    A step of the curve is two lines at one time: the last one counts.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    points: dict[float, int] = {}
    for number, line in enumerate(lines, 1):
        try:
            time, instances = line.split(",")
            seconds, alive = float(time) * UNIT_SECONDS[unit], int(instances)
        except ValueError:
            raise UsageError(f"{path}, line {number}: {line!r} is not TIME,INSTANCES") from None
        if not math.isfinite(seconds) or alive < 0:
            raise UsageError(f"{path}, line {number}: {line!r} is no time with a number of instances")
        points[seconds] = alive
    curve = sorted(points.items())
    start = next((seconds for seconds, alive in curve if alive > 0), None)
    if start is None:
        raise UsageError(f"{path}: no instance is ever alive")
    return [(seconds - start, alive) for seconds, alive in curve if seconds >= start]
