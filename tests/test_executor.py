"""The compute thread runs what is still wanted, in order, and hands back whatever came of it."""

from __future__ import annotations

import asyncio
import threading
import weakref
from functools import partial

import pytest
import torch

from swarm.errors import Draining, NotFinite
from swarm.ports import Priority
from swarm.stage.executor import ThreadExecutor

pytestmark = pytest.mark.fast


class Gate:
    """A job that says when it runs and waits until it may end."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.leave = threading.Event()

    def __call__(self) -> str:
        self.entered.set()
        assert self.leave.wait(10)
        return "gate"

    async def wait_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, 10)


async def ticks(count: int = 5) -> None:
    """Let tasks that are ready run."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_jobs_run_by_priority_and_in_order_within_one() -> None:
    async def main() -> list[str]:
        executor, gate = ThreadExecutor(), Gate()
        ran: list[str] = []
        order = [Priority.BACKGROUND, Priority.FORWARD, Priority.BACKWARD, Priority.FORWARD, Priority.CONTROL]
        async with asyncio.TaskGroup() as group:
            first = group.create_task(executor.run(Priority.BACKGROUND, gate))
            await gate.wait_entered()
            for i, priority in enumerate(order):
                group.create_task(executor.run(priority, partial(ran.append, f"{priority.name}{i}")))
            await ticks()
            assert executor.waiting == len(order) + 1
            gate.leave.set()
        assert first.result() == "gate"
        assert executor.waiting == 0
        assert executor.busy_seconds > 0
        executor.close()
        return ran

    assert asyncio.run(main()) == ["CONTROL4", "BACKWARD2", "FORWARD1", "FORWARD3", "BACKGROUND0"]


def test_a_job_cancelled_before_it_starts_is_never_run() -> None:
    async def main() -> None:
        executor, gate = ThreadExecutor(), Gate()
        ran: list[str] = []
        running = asyncio.create_task(executor.run(Priority.FORWARD, gate))
        await gate.wait_entered()
        queued = asyncio.create_task(executor.run(Priority.FORWARD, lambda: ran.append("queued")))
        await ticks()
        queued.cancel()
        with pytest.raises(asyncio.CancelledError):
            await queued
        assert executor.waiting == 1
        gate.leave.set()
        assert await running == "gate"
        assert await executor.run(Priority.BACKGROUND, lambda: "after") == "after"
        assert ran == []
        executor.close()

    asyncio.run(main())


def test_a_job_cancelled_while_the_loop_is_busy_is_never_run() -> None:
    async def main() -> None:
        executor, gate, passed = ThreadExecutor(), Gate(), threading.Event()
        ran: list[str] = []
        running = asyncio.create_task(executor.run(Priority.FORWARD, gate))
        await gate.wait_entered()
        queued = asyncio.create_task(executor.run(Priority.FORWARD, lambda: ran.append("queued")))
        last = asyncio.create_task(executor.run(Priority.BACKGROUND, passed.set))
        await ticks()
        queued.cancel()
        gate.leave.set()
        # The loop is held here on purpose: the cancelled task has not been told yet when the thread goes on.
        passed.wait(10)
        assert ran == []
        await asyncio.gather(running, last)
        assert executor.waiting == 0
        executor.close()

    asyncio.run(main())


def test_a_running_job_whose_awaiter_is_cancelled_finishes() -> None:
    async def main() -> None:
        executor, gate = ThreadExecutor(), Gate()
        ran: list[str] = []

        def job() -> None:
            gate()
            ran.append("finished")

        task = asyncio.create_task(executor.run(Priority.FORWARD, job))
        await gate.wait_entered()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert executor.waiting == 1
        gate.leave.set()
        assert await executor.run(Priority.BACKGROUND, lambda: list(ran)) == ["finished"]
        executor.close()

    asyncio.run(main())


@pytest.mark.parametrize("error", [ValueError("x"), NotFinite("input"), StopIteration()])
def test_exceptions_travel_to_the_awaiter(error: Exception) -> None:
    def fail() -> None:
        raise error

    async def main() -> None:
        executor = ThreadExecutor()
        # asyncio takes no StopIteration.
        with pytest.raises(RuntimeError if isinstance(error, StopIteration) else type(error)) as caught:
            await executor.run(Priority.FORWARD, fail)
        assert caught.value is error or isinstance(error, StopIteration)
        # The thread lives on.
        assert await executor.run(Priority.FORWARD, lambda: 3) == 3
        executor.close()

    asyncio.run(main())


def test_close_refuses_what_waits_and_joins() -> None:
    async def main() -> None:
        executor, gate = ThreadExecutor(), Gate()
        running = asyncio.create_task(executor.run(Priority.FORWARD, gate))
        await gate.wait_entered()
        queued = asyncio.create_task(executor.run(Priority.FORWARD, lambda: "never"))
        await ticks()
        closing = asyncio.create_task(asyncio.to_thread(executor.close))
        with pytest.raises(Draining):
            await queued
        with pytest.raises(Draining):
            await executor.run(Priority.FORWARD, lambda: "late")
        assert not closing.done()
        gate.leave.set()
        assert await running == "gate"
        await closing
        executor.close()
        assert not executor._thread.is_alive()

    asyncio.run(main())


def test_the_idle_thread_holds_nothing_of_a_finished_job() -> None:
    async def main() -> None:
        executor = ThreadExecutor()
        taken, given = threading.Event(), threading.Event()
        tensor = torch.zeros(10)
        weakref.finalize(tensor, taken.set)
        result = await executor.run(Priority.FORWARD, partial(torch.add, tensor, 1))
        weakref.finalize(result, given.set)
        del tensor, result
        assert await asyncio.to_thread(taken.wait, 5)
        assert await asyncio.to_thread(given.wait, 5)
        executor.close()

    asyncio.run(main())


def test_torch_threads_are_those_asked_for() -> None:
    async def main() -> int:
        executor = ThreadExecutor(threads=1)
        try:
            return await executor.run(Priority.CONTROL, torch.get_num_threads)
        finally:
            executor.close()

    assert asyncio.run(main()) == 1
