"""The guarantees under random faults: real roles, simulated world, schedules drawn by hypothesis."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.protocol_driver import FAULTY, RESTARTS, Schedule, run_schedule

pytestmark = pytest.mark.fast

CHANCES = st.sampled_from([0.0, 0.02, 0.1, 0.2])

SCHEDULES = st.builds(
    Schedule,
    seed=st.integers(0, 2**32),
    peers=st.lists(st.integers(1, 3), min_size=2, max_size=3).map(tuple),
    steps=st.integers(3, 5),
    microbatches=st.integers(4, 8),
    lost=CHANCES,
    late=CHANCES,
    deaths=st.sampled_from([0.0, 0.01, 0.05]),
    poisoned=st.integers(0, 2),
    sick=st.integers(0, 1),
    lost_results=st.sampled_from([0.0, 0.2, 0.5]),
    joiners=st.integers(0, 2),
    focus=st.lists(st.sampled_from(FAULTY), max_size=3).map(tuple),
    broken=st.sampled_from([0.0, 0.3]),
    restarts=st.lists(st.sampled_from(RESTARTS), max_size=3).map(tuple),
)


@settings(max_examples=50)
@given(schedule=SCHEDULES)
def test_the_swarm_computes_what_one_process_would(schedule: Schedule) -> None:
    run_schedule(schedule)


def test_the_schedules_of_the_seeded_bugs_pass() -> None:
    for seed in range(60):
        run_schedule(Schedule.draw(seed))


def test_the_same_schedule_is_the_same_run() -> None:
    schedule = Schedule.draw(7)
    assert run_schedule(schedule).journal.events == run_schedule(schedule).journal.events
