"""An asyncio loop whose time is virtual: it jumps to the next timer whenever nothing is ready."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set: something waits without a deadline."""


class _Selector(selectors.SelectSelector):
    """Never waits: advances the loop's clock instead."""

    advance: Callable[[float], None]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise Deadlock("nothing is ready and no timer is set")
            self.advance(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Deterministic: the order of callbacks depends on the program alone."""

    def __init__(self) -> None:
        self._virtual_seconds = 0.0
        selector = _Selector()
        selector.advance = self._advance
        super().__init__(selector)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual_seconds

    def _advance(self, seconds: float) -> None:
        self._virtual_seconds += max(0.0, seconds)


class VirtualClock:
    """:class:`swarm.ports.Clock` on the running loop's time."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` on a new virtual loop; tasks left over are cancelled."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
