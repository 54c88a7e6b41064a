"""What roles rely on of a clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from peers.clock import MonotonicClock
from swarm.ports import Clock
from swarm.sim.loop import VirtualClock
from tests.contract.worlds import FAST, REAL, Real, Simulated, SimulatedProcess, World, world_fixture

RESOLUTION_SECONDS = 1e-3
"""asyncio fires a timer that is due within its clock's resolution."""
SLACK_SECONDS = 1.0


@asynccontextmanager
async def virtual() -> AsyncIterator[Clock]:
    yield VirtualClock()


@asynccontextmanager
async def real() -> AsyncIterator[Clock]:
    yield MonotonicClock()


world = world_fixture(
    (Simulated, virtual, FAST),
    (SimulatedProcess, virtual, FAST),
    (Real, real, REAL),
)


def test_now_never_goes_back(world: World[Clock]) -> None:
    async def test(clock: Clock) -> None:
        seen = list[float]()
        for seconds in (0.0, 0.0, 0.001, 0.0, 0.003):
            seen.append(clock.now())
            seen.append(clock.now())
            await clock.sleep(seconds)
        assert seen == sorted(seen)

    world.run(test)


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.05])
def test_a_sleep_takes_at_least_so_long_and_not_much_longer(world: World[Clock], seconds: float) -> None:
    async def test(clock: Clock) -> None:
        before = clock.now()
        await clock.sleep(seconds)
        assert seconds - RESOLUTION_SECONDS <= clock.now() - before < seconds + SLACK_SECONDS

    world.run(test)


def test_sleeps_end_in_the_order_of_their_ends(world: World[Clock]) -> None:
    async def test(clock: Clock) -> None:
        ended = list[float]()

        async def sleep(seconds: float) -> None:
            await clock.sleep(seconds)
            ended.append(seconds)

        async with asyncio.TaskGroup() as group:
            for seconds in (0.12, 0.0, 0.06):
                group.create_task(sleep(seconds))
        assert ended == [0.0, 0.06, 0.12]

    world.run(test)


def test_a_time_out_of_asyncio_passes_by_the_same_clock(world: World[Clock]) -> None:
    """Roles compute deadlines from now(), and wait for them by asyncio.timeout()."""

    async def test(clock: Clock) -> None:
        before = clock.now()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await clock.sleep(30.0)
        assert 0.05 - RESOLUTION_SECONDS <= clock.now() - before < 0.05 + SLACK_SECONDS
        async with asyncio.timeout(30.0):
            await clock.sleep(0.05)

    world.run(test)


def test_a_sleep_can_be_cancelled(world: World[Clock]) -> None:
    async def test(clock: Clock) -> None:
        before = clock.now()
        task = asyncio.create_task(clock.sleep(30.0))
        await clock.sleep(0.0)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert clock.now() - before < SLACK_SECONDS

    world.run(test)
