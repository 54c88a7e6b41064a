"""The guarantees under random faults: real roles, simulated world, schedules drawn by hypothesis."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_driver import RESTARTS, Schedule, run_schedule

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
    restarts=st.lists(st.sampled_from(RESTARTS), max_size=3).map(tuple),
)


@settings(max_examples=150)
@given(schedule=SCHEDULES)
def test_the_swarm_computes_what_one_process_would(schedule: Schedule) -> None:
    run_schedule(schedule)


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_the_schedules_of_the_seeded_bugs_pass(first: int) -> None:
    for seed in range(first, first + 50):
        run_schedule(Schedule.draw(seed))


# Each of these seeds showed a bug of the protocol once.
@pytest.mark.parametrize("seed", [12, 14, 24, 25, 29, 54, 75, 499, 3093, 3780, 3794])
def test_what_failed_once(seed: int) -> None:
    run_schedule(Schedule.draw(seed))


def test_the_same_schedule_is_the_same_run() -> None:
    schedule = Schedule.draw(7)
    assert run_schedule(schedule).journal.events == run_schedule(schedule).journal.events
