"""Many schedules, one after another: how often which fault happened where, and of failures the faults that matter."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from swarm.sim.fuzz.run import Outcome, try_schedule
from swarm.sim.fuzz.schedule import POINTS, Kind, Schedule, draw

SHRINK_SECONDS = 60.0
"""Of real time, for one failure; what is found by then is shown."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a number of schedules have shown so far."""

    schedules: int = 0
    calls: int = 0
    virtual_seconds: float = 0.0
    happened: Counter[tuple[str, Kind]] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count one more."""
        self.schedules += 1
        self.calls += outcome.calls
        self.virtual_seconds += outcome.seconds
        self.happened += outcome.happened

    def merge(self, other: Tally) -> None:
        """Count those of another as well."""
        self.schedules += other.schedules
        self.calls += other.calls
        self.virtual_seconds += other.virtual_seconds
        self.happened += other.happened
        self.failures += other.failures

    @property
    def missing(self) -> list[tuple[str, Kind]]:
        """Faults that have not happened at a point."""
        return [(point, kind) for point in POINTS for kind in Kind if not self.happened[point, kind]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A schedule that showed something, and the faults of it that are needed for that."""

    seed: int
    needed: tuple[int, ...]
    schedule: Schedule
    what: str
    events: list[str]
    """The journal of the shrunk run."""

    @property
    def replay(self) -> str:
        """The command that shows it again."""
        numbers = ",".join(map(str, self.needed)) or "none"
        only = f" --only {numbers}" if len(self.needed) < len(self.schedule.faults) else ""
        return f"swarm simulate --fuzz 1 --seed {self.seed}{only}"


def campaign(seeds: Iterable[int], *, only: Sequence[int] | None = None) -> Tally:
    """Run the schedules of ``seeds`` (with the faults numbered ``only``); each failure is shrunk."""
    gc.collect()
    gc.freeze()  # each run ends with a full collection; what was there before need not be looked at
    tally = Tally()
    for seed in seeds:
        schedule = draw(seed)
        chosen = tuple(range(len(schedule.faults))) if only is None else tuple(only)
        outcome = try_schedule(schedule.only(chosen))
        tally.add(outcome)
        if outcome.error is not None:
            tally.failures.append(shrink(schedule, chosen))
    return tally


def shrink(schedule: Schedule, chosen: Sequence[int], seconds: float = SHRINK_SECONDS) -> Failure:
    """Leave out faults, in ever smaller portions, as long as the run still fails."""
    needed, deadline = list(chosen), time.monotonic() + seconds
    portion = max(1, len(needed) // 2)
    while time.monotonic() < deadline:
        smaller = _without_a_portion(schedule, needed, portion, deadline)
        if smaller is not None:
            needed = smaller
        elif portion == 1:
            break
        else:
            portion = max(1, portion // 2)
    outcome = try_schedule(schedule.only(needed))
    return Failure(
        seed=schedule.seed,
        needed=tuple(needed),
        schedule=schedule,
        what=outcome.what,
        events=[f"{at:9.3f} {kind} {_fields(fields)}" for at, kind, fields in outcome.events],
    )


def _without_a_portion(schedule: Schedule, needed: list[int], portion: int, deadline: float) -> list[int] | None:
    for start in range(0, len(needed), portion):
        rest = needed[:start] + needed[start + portion :]
        if time.monotonic() > deadline:
            return None
        if try_schedule(schedule.only(rest)).error is not None:
            return rest
    return None


def _fields(fields: dict[str, object]) -> str:
    return " ".join(f"{key}={value}" for key, value in fields.items() if value is not None)


def table(happened: Counter[tuple[str, Kind]]) -> str:
    """Points down, faults across, and how often each happened."""
    width = max(map(len, POINTS))
    kinds = list(Kind)
    cells = {(p, k): str(happened[p, k]) for p in POINTS for k in kinds}
    columns = [max(len(cells[p, k]) for p in POINTS) for k in kinds]
    lines = [f"{'':{width}}  " + "  ".join(f"{i + 1:>{max(2, c)}}" for i, c in enumerate(columns))]
    for point in POINTS:
        row = "  ".join(f"{cells[point, k]:>{max(2, c)}}" for k, c in zip(kinds, columns, strict=True))
        lines.append(f"{point:{width}}  {row}")
    lines.append("  ".join(f"{i + 1} {kind}" for i, kind in enumerate(kinds)))
    return "\n".join(lines)
