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
                try:
                    result = await _stand_for(job)
                except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the job
                    if not future.done():
                        future.set_exception(error)
                else:
                    if not future.done():
                        future.set_result(result)
                self._running = False
        finally:
            self._running = False
            self._worker = None


async def _stand_for(job: Callable[[], Any]) -> Any:
    """The job's result; the seconds that it asks for pass on the loop."""
    thread = greenlet.greenlet(job)
    thread.gr_context = copy_context()
    outcome = thread.switch()
    while not thread.dead:
        try:
            await asyncio.sleep(outcome)
        except asyncio.CancelledError:
            thread.throw()  # ends it with GreenletExit
            raise
        outcome = thread.switch()
    return outcome
