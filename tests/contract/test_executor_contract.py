"""What roles rely on of the compute thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import pytest

from swarm.errors import NotFinite
from swarm.ports import Executor, Priority
from swarm.sim.executor import SimulatedExecutor
from swarm.sim.machine import Device
from swarm.stage.executor import ThreadExecutor
from tests.contract.worlds import FAST, REAL, Real, Simulated, World, world_fixture


class Gate(Protocol):
    """A job that says when it runs and waits until it may end."""

    def __call__(self) -> str:
        """The job; its result is 'gate'."""

    async def entered(self) -> None:
        """Return once the job runs."""

    def open(self) -> None:
        """Let it end."""


class ThreadGate:
    def __init__(self) -> None:
        self._entered, self._open = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self._entered.set()
        assert self._open.wait(10)
        return "gate"

    async def entered(self) -> None:
        assert await asyncio.to_thread(self._entered.wait, 10)

    def open(self) -> None:
        self._open.set()


class SimulatedGate:
    def __init__(self) -> None:
        self._entered, self._opened = asyncio.Event(), False
        self._device = Device(seconds_per_unit=0.01)

    def __call__(self) -> str:
        self._entered.set()
        while not self._opened:
            self._device.compute(1.0)
        return "gate"

    async def entered(self) -> None:
        await self._entered.wait()

    def open(self) -> None:
        self._opened = True


@dataclass(frozen=True)
class Bench:
    executor: Executor
    gate: Callable[[], Gate]


@asynccontextmanager
async def simulated() -> AsyncIterator[Bench]:
    yield Bench(SimulatedExecutor(), SimulatedGate)


@asynccontextmanager
async def real() -> AsyncIterator[Bench]:
    executor = ThreadExecutor()
    yield Bench(executor, ThreadGate)
    executor.close()


world = world_fixture((Simulated, simulated, FAST), (Real, real, REAL))


async def ticks(count: int = 5) -> None:
    """Let tasks that are ready run."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_job_gives_its_result(world: World[Bench]) -> None:
    async def test(bench: Bench) -> None:
        assert await bench.executor.run(Priority.FORWARD, lambda: 7) == 7
        assert bench.executor.waiting == 0

    world.run(test)


def test_jobs_run_one_at_a_time_while_the_loop_goes_on(world: World[Bench]) -> None:
    async def test(bench: Bench) -> None:
        gates = [bench.gate() for _ in range(3)]
        running, most = 0, 0

        def job(gate: Gate) -> str:
            nonlocal running, most
            running += 1
            most = max(most, running)
            result = gate()
            running -= 1
            return result

        tasks = []
        for gate in gates:
            tasks.append(asyncio.create_task(bench.executor.run(Priority.FORWARD, partial(job, gate))))
            await ticks()
        for gate in gates:
            await gate.entered()
            await asyncio.sleep(0.02)
            gate.open()
        assert await asyncio.gather(*tasks) == ["gate"] * 3
        assert most == 1

    world.run(test)


def test_jobs_run_by_priority_and_in_order_within_one(world: World[Bench]) -> None:
    async def test(bench: Bench) -> None:
        gate, ran = bench.gate(), list[str]()
        order = [Priority.BACKGROUND, Priority.FORWARD, Priority.BACKWARD, Priority.FORWARD, Priority.CONTROL]
        async with asyncio.TaskGroup() as group:
            group.create_task(bench.executor.run(Priority.BACKGROUND, gate))
            await gate.entered()
            for index, priority in enumerate(order):
                group.create_task(bench.executor.run(priority, partial(ran.append, f"{priority.name}{index}")))
            await ticks()
            gate.open()
        assert ran == ["CONTROL4", "BACKWARD2", "FORWARD1", "FORWARD3", "BACKGROUND0"]

    world.run(test)


def test_a_job_cancelled_before_it_starts_never_runs(world: World[Bench]) -> None:
    async def test(bench: Bench) -> None:
        gate, ran = bench.gate(), list[str]()
        running = asyncio.create_task(bench.executor.run(Priority.FORWARD, gate))
        await gate.entered()
        queued = asyncio.create_task(bench.executor.run(Priority.CONTROL, partial(ran.append, "queued")))
        await ticks()
        queued.cancel()
        gate.open()  # in the same turn of the loop
        with pytest.raises(asyncio.CancelledError):
            await queued
        assert await running == "gate"
        assert await bench.executor.run(Priority.BACKGROUND, lambda: "after") == "after"
        assert ran == []

    world.run(test)


def test_a_job_cancelled_while_it_runs_finishes_and_its_result_is_dropped(world: World[Bench]) -> None:
    async def test(bench: Bench) -> None:
        gate, ran = bench.gate(), list[str]()

        def job() -> None:
            gate()
            ran.append("finished")

        task = asyncio.create_task(bench.executor.run(Priority.FORWARD, job))
        await gate.entered()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (ran, bench.executor.waiting) == ([], 1)
        gate.open()
        assert await bench.executor.run(Priority.CONTROL, lambda: list(ran)) == ["finished"]

    world.run(test)


def test_waiting_counts_queued_and_running_jobs_and_no_cancelled_ones(world: World[Bench]) -> None:
    async def test(bench: Bench) -> None:
        gate = bench.gate()
        assert bench.executor.waiting == 0
        tasks = [asyncio.create_task(bench.executor.run(Priority.FORWARD, gate))]
        await gate.entered()
        assert bench.executor.waiting == 1
        tasks += [asyncio.create_task(bench.executor.run(Priority.FORWARD, lambda: "")) for _ in range(3)]
        await ticks()
        assert bench.executor.waiting == 4
        tasks[2].cancel()
        await asyncio.wait({tasks[2]})
        assert bench.executor.waiting == 3
        gate.open()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert bench.executor.waiting == 0

    world.run(test)


class Odd(BaseException):
    """Not an Exception."""


@pytest.mark.parametrize("error", [ValueError("x"), NotFinite("input"), StopIteration(), TimeoutError(), Odd()])
def test_exceptions_reach_the_awaiter_and_the_next_job_runs(world: World[Bench], error: BaseException) -> None:
    def fail() -> None:
        raise error

    async def test(bench: Bench) -> None:
        # asyncio takes no StopIteration.
        with pytest.raises(RuntimeError if isinstance(error, StopIteration) else type(error)) as caught:
            await bench.executor.run(Priority.FORWARD, fail)
        assert caught.value is error or isinstance(error, StopIteration)
        assert await bench.executor.run(Priority.FORWARD, lambda: 3) == 3
        assert bench.executor.waiting == 0

    world.run(test)


def test_an_exception_of_a_job_that_nobody_waits_for_is_dropped(world: World[Bench]) -> None:
    async def test(bench: Bench) -> None:
        gate = bench.gate()

        def fail() -> None:
            gate()
            raise ValueError("nobody listens")

        task = asyncio.create_task(bench.executor.run(Priority.FORWARD, fail))
        await gate.entered()
        task.cancel()
        await asyncio.wait({task})
        gate.open()
        assert await bench.executor.run(Priority.FORWARD, lambda: 3) == 3

    world.run(test)


def test_a_job_that_was_queued_by_another_jobs_awaiter_runs(world: World[Bench]) -> None:
    async def test(bench: Bench) -> None:
        async def chain(count: int) -> int:
            total = 0
            for index in range(count):
                total += await bench.executor.run(Priority.FORWARD, partial(int, index))
            return total

        assert await asyncio.gather(*(chain(5) for _ in range(4))) == [10] * 4

    world.run(test)
