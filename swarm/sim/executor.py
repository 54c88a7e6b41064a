"""A compute thread on the virtual clock: one job at a time, and a job that computes leaves the event loop running.

A job is a greenlet: where it calls :meth:`swarm.sim.machine.Device.compute` it stands still for that long, in the
middle of its work, while messages come in, terms rise and callers give up, as around a real thread.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, TypeVar

import greenlet

from swarm.ports import Priority

T = TypeVar("T")


class SimulatedExecutor:
    """Implements :class:`swarm.ports.Executor`."""

    def __init__(self) -> None:
        self._queue: list[tuple[int, int, Callable[[], Any], asyncio.Future[Any]]] = []
        self._order = itertools.count()
        self._worker: asyncio.Task[None] | None = None
        self._running = False

    @property
    def waiting(self) -> int:
        return self._running + sum(not future.done() for _, _, _, future in self._queue)

    async def run(self, priority: Priority, job: Callable[[], T]) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (priority, next(self._order), job, future))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(), name="compute thread")
        return await future

    def die(self) -> None:
        """The machine died: what is queued or running never ends."""
        self._queue.clear()
        if self._worker is not None:
            self._worker.cancel()

    async def _work(self) -> None:
        try:
            while self._queue:
                _, _, job, future = heapq.heappop(self._queue)
                if future.cancelled():
                    continue
                self._running = True
                result, error = await _stand_for(job)
                if not future.done():
                    if error is not None:
                        future.set_exception(_for_a_future(error))
                    else:
                        future.set_result(result)
                self._running = False
        finally:
            self._running = False
            self._worker = None


def _for_a_future(error: BaseException) -> BaseException:
    """asyncio takes no StopIteration."""
    return RuntimeError("job raised StopIteration") if isinstance(error, StopIteration) else error


async def _stand_for(job: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """The job's result or error; the seconds that it asks for pass on the loop."""

    def body() -> tuple[Any, BaseException | None]:
        try:
            return job(), None
        except greenlet.GreenletExit:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is belongs to whoever waits for the job
            return None, error

    thread = greenlet.greenlet(body)
    thread.gr_context = copy_context()
    outcome = thread.switch()
    while not thread.dead:
        try:
            await asyncio.sleep(outcome)
        except asyncio.CancelledError:
            thread.throw()  # ends it with GreenletExit
            raise
        outcome = thread.switch()
    result: tuple[Any, BaseException | None] = outcome
    return result
