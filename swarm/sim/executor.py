"""A compute thread on the virtual clock: one job at a time, each takes its priority's seconds."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from swarm.ports import Priority

T = TypeVar("T")

COSTS: Mapping[Priority, float] = {
    Priority.CONTROL: 0.001,
    Priority.BACKWARD: 0.2,
    Priority.FORWARD: 0.1,
    Priority.BACKGROUND: 0.05,
}


class SimulatedExecutor:
    """Implements :class:`swarm.ports.Executor`.  ``slowness`` multiplies every job's time."""

    def __init__(self, slowness: float = 1.0) -> None:
        self.slowness = slowness
        self._queue: list[tuple[int, int, Callable[[], Any], asyncio.Future[Any]]] = []
        self._order = itertools.count()
        self._worker: asyncio.Task[None] | None = None
        self.closed = False

    @property
    def waiting(self) -> int:
        return len(self._queue) + (self._worker is not None)

    async def run(self, priority: Priority, job: Callable[[], T]) -> T:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (priority, next(self._order), job, future))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        result: T = await future
        return result

    async def _work(self) -> None:
        while self._queue:
            priority, _, job, future = heapq.heappop(self._queue)
            if future.cancelled():
                continue
            await asyncio.sleep(COSTS[Priority(priority)] * self.slowness)
            if self.closed:
                return
            try:
                result = job()
            except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the job
                if not future.cancelled():
                    future.set_exception(error)
            else:
                if not future.cancelled():
                    future.set_result(result)
        self._worker = None

    def close(self) -> None:
        """The machine died: what is queued or running never ends."""
        self.closed = True
