"""An emulated slow machine: each job of the compute thread sleeps as well."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from swarm.ports import Executor, Priority

T = TypeVar("T")


class SlowExecutor:
    """Implements :class:`swarm.ports.Executor`: forwards and backwards take ``factor`` times as long."""

    def __init__(self, executor: Executor, factor: float) -> None:
        self._executor = executor
        self._factor = factor

    @property
    def waiting(self) -> int:
        return self._executor.waiting

    async def run(self, priority: Priority, job: Callable[[], T]) -> T:
        if priority not in (Priority.FORWARD, Priority.BACKWARD):
            return await self._executor.run(priority, job)

        def slow() -> T:
            started = time.perf_counter()
            result = job()
            # The whole thread sleeps, as a slow device would keep it.
            time.sleep((self._factor - 1) * (time.perf_counter() - started))
            return result

        return await self._executor.run(priority, slow)
