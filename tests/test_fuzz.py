"""The guarantees under random faults at every point of the protocol: real roles, simulated world, one seed a run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from swarm.errors import Voided
from swarm.messages import MicrobatchCall
from swarm.roles.stepbook import StepBook
from swarm.sim.fuzz.campaign import campaign, shrink, table
from swarm.sim.fuzz.run import try_schedule
from swarm.sim.fuzz.schedule import POINTS, Fault, Kind, Schedule, draw

SEEDS = range(20_000, 20_300)
"""Others than those of the seeded bugs."""


@pytest.mark.simulated
def test_the_swarm_computes_what_one_process_would() -> None:
    tally = campaign(SEEDS)
    assert not tally.failures, [(failure.replay, failure.what) for failure in tally.failures]
    assert len(tally.missing) < len(POINTS) * len(Kind) / 3


@pytest.mark.fast
def test_a_seed_fixes_everything() -> None:
    first, second = try_schedule(draw(7)), try_schedule(draw(7))
    assert first.events == second.events
    assert len(first.events) > 20


@pytest.mark.fast
@pytest.mark.parametrize("kind", Kind)
def test_each_kind_of_fault_happens_and_is_survived(kind: Kind) -> None:
    point = "lookup" if kind is Kind.JOIN else "backward answered"
    faults = tuple(Fault(point=point, nth=nth, kind=kind, seconds=2.0, amount=nth % 4 + 1) for nth in (3, 5, 9, 14))
    outcome = try_schedule(Schedule(seed=1, peers=(2, 3), faults=faults))
    assert outcome.error is None, outcome.what
    assert outcome.happened[point, kind]
    assert any(event == "fault" for _, event, _ in outcome.events)


@pytest.mark.fast
def test_a_run_without_faults_is_quiet() -> None:
    outcome = try_schedule(Schedule(seed=1, peers=(2, 2)))
    assert outcome.error is None
    assert not outcome.happened
    noisy = {"peer_suspected", "retried", "fenced", "attempt_failed", "voided", "fault"}
    assert not noisy & {kind for _, kind, _ in outcome.events}


@pytest.mark.fast
def test_a_failure_is_shrunk_to_the_faults_that_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without deduplication a backward that arrives twice is enough; all else is left out."""

    def holds(self: StepBook, call: MicrobatchCall) -> bool:
        if call.try_number < self._least_try.get(call.microbatch, 0):
            raise Voided("voided")
        return False

    monkeypatch.setattr(StepBook, "holds", holds)
    twice = Fault(point="backward asked", nth=4, kind=Kind.DUPLICATE, seconds=0.1, amount=1)
    others = [
        Fault(point="forward asked", nth=n, kind=Kind.DELAY, seconds=0.1, amount=1) for n in range(1, 12)
    ]  # harmless
    schedule = Schedule(seed=3, peers=(1, 1), faults=(*others[:5], twice, *others[5:]))
    failure = shrink(schedule, range(len(schedule.faults)))
    assert failure.needed == (5,)
    assert "its sum contains" in failure.what
    assert failure.replay == "swarm simulate --fuzz 1 --seed 3 --only 5"
    assert any("duplicate at backward asked 4" in event for event in failure.events)


@pytest.mark.fast
def test_a_shrunk_schedule_is_the_same_run() -> None:
    schedule = draw(11)
    everything = tuple(range(len(schedule.faults)))
    assert schedule.only(everything) == schedule
    assert try_schedule(schedule.only(everything)).events == try_schedule(schedule).events


@pytest.mark.fast
def test_a_bound_that_is_too_short_is_said() -> None:
    outcome = try_schedule(replace(draw(7), steps=4), bound_seconds=0.5)
    assert "no end within 0.5 s" in outcome.what


@pytest.mark.fast
def test_the_table_shows_every_point_and_every_fault() -> None:
    happened: Counter[tuple[str, Kind]] = Counter({("apply asked", Kind.KILL): 12})
    lines = table(happened).splitlines()
    assert len(lines) == len(POINTS) + 2
    assert "12" in next(line for line in lines if line.startswith("apply asked"))
    assert all(kind in lines[-1] for kind in Kind)


@pytest.mark.simulated
def test_a_seed_is_the_same_run_in_another_process() -> None:
    """Whatever order sets of names have there: or a failure could not be replayed."""
    program = (
        "import hashlib\n"
        "from swarm.sim.fuzz.run import try_schedule\n"
        "from swarm.sim.fuzz.schedule import draw\n"
        "print([hashlib.sha256(repr(try_schedule(draw(seed)).events).encode()).hexdigest() for seed in range(40)])"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
