"""An asyncio loop whose time is virtual, and the processes that share it.

Time jumps to the next timer whenever nothing is ready.  Each task belongs to a :class:`Process` (by its context): one
that is paused runs nothing, not even its timers, as under SIGSTOP; and each has its own monotonic clock.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

T = TypeVar("T")

PURGE_AT_LEAST = 1000
"""Cancelled timers that are left lying about."""


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set: something waits without a deadline."""


class Process:
    """All that runs in one simulated operating-system process.  Made inside a running :class:`VirtualLoop`."""

    def __init__(self, name: str, *, clock_rate: float = 1.0, clock_offset_seconds: float = 0.0) -> None:
        self.name = name
        self.paused = False
        self._loop = _running()
        self._rate = clock_rate
        self._offset = clock_offset_seconds
        self._held: deque[asyncio.Handle] = deque()
        self._context = copy_context()
        self._context.run(PROCESS.set, self)

    def spawn(self, work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        """A task of this process."""
        return self._loop.create_task(work, name=name, context=self._context)

    def local(self, seconds: float) -> float:
        """What this process's clock shows at ``seconds`` of the loop's own."""
        return self._offset + self._rate * seconds

    def true(self, seconds: float) -> float:
        """Inverse of :meth:`local`."""
        return (seconds - self._offset) / self._rate

    def pause(self) -> None:
        """Run nothing until :meth:`resume`; its clock goes on, as under SIGSTOP."""
        self.paused = True

    def resume(self) -> None:
        """Run what should have run meanwhile, in order."""
        self.paused = False
        self._loop.take_back(self._held)

    def hold(self, handle: asyncio.Handle) -> None:
        """For the loop: keep what a paused process cannot run now."""
        self._held.append(handle)

    def jump(self, seconds: float) -> None:
        """The clock goes forward at once (a suspended machine wakes, a virtual one has moved); timers come due."""
        if seconds < 0:
            raise ValueError("a monotonic clock never goes back")
        self._offset += seconds
        self._loop.set_timers_again(self)


PROCESS: ContextVar[Process | None] = ContextVar("PROCESS", default=None)
"""Whose code is running; None: the world's own."""


class NumberedTask(asyncio.Task[Any]):
    """Sets of tasks, asyncio's own among them, are gone through in the same order in each run."""

    def __init__(self, work: Coroutine[Any, Any, Any], *, number: int, **settings: Any) -> None:
        self._number = number
        super().__init__(work, **settings)

    def __hash__(self) -> int:
        return self._number


def _numbered(loop: asyncio.AbstractEventLoop, work: Any, **settings: Any) -> asyncio.Task[Any]:
    assert isinstance(loop, VirtualLoop)
    return NumberedTask(work, loop=loop, number=loop.next_number(), **settings)


class VirtualLoop(asyncio.BaseEventLoop):
    """Deterministic: the order of callbacks depends on the program alone.  No sockets, no other threads."""

    # asyncio's own queue of callbacks.
    _ready: deque[asyncio.Handle]

    def __init__(self) -> None:
        super().__init__()
        self._seconds = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = 0
        self._cancelled = 0
        self.set_task_factory(_numbered)

    def next_number(self) -> int:
        """Another one each time."""
        self._numbers += 1
        return self._numbers

    def time(self) -> float:
        """Virtual seconds since the loop was made, by the clock of the process that asks."""
        process = PROCESS.get()
        return self._seconds if process is None else process.local(self._seconds)

    @property
    def seconds(self) -> float:
        """Virtual seconds since the loop was made, whoever asks."""
        return self._seconds

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As in asyncio; ``when`` is by the clock of the process that asks."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        process = PROCESS.get()
        self._set(when if process is None else process.true(when), handle)
        return handle

    def take_back(self, handles: deque[asyncio.Handle]) -> None:
        """Run these, after what is ready already."""
        self._ready.extend(handles)
        handles.clear()

    def set_timers_again(self, process: Process) -> None:
        """The clock of ``process`` has changed."""
        self._timers = [
            (process.true(handle.when()) if _process_of(handle) is process else when, number, handle)
            for when, number, handle in self._timers
        ]
        heapq.heapify(self._timers)

    def _set(self, when: float, handle: asyncio.TimerHandle) -> None:
        heapq.heappush(self._timers, (when, self.next_number(), handle))

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._cancelled += 1
        if self._cancelled > PURGE_AT_LEAST and 2 * self._cancelled > len(self._timers):
            self._timers = [timer for timer in self._timers if not timer[2].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def _run_once(self) -> None:
        """asyncio's hook: one round of what is ready; if nothing is, time goes on to the next timer."""
        timers, ready = self._timers, self._ready
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
            self._cancelled -= 1
        if not ready:
            if not timers:
                if self._stopping:  # type: ignore[attr-defined]
                    return
                raise Deadlock("nothing is ready and no timer is set")
            self._seconds = max(self._seconds, timers[0][0])
        while timers and timers[0][0] <= self._seconds:
            handle = heapq.heappop(timers)[2]
            if handle.cancelled():
                self._cancelled -= 1
            else:
                ready.append(handle)
        for _ in range(len(ready)):
            ready_handle = ready.popleft()
            process = _process_of(ready_handle)
            if process is not None and process.paused:
                process.hold(ready_handle)
            elif not ready_handle.cancelled():
                ready_handle._run()

    def _write_to_self(self) -> None:
        """asyncio's hook for other threads: there are none."""

    def _process_events(self, event_list: list[Any]) -> None:
        """asyncio's hook for sockets: there are none."""


def world_seconds() -> float:
    """Virtual seconds since the running loop was made, whatever the clock of the process that asks says."""
    return _running().seconds


def world_later(seconds: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
    """Call ``callback`` as the world's own code: no pause of a process holds it back, only the true clock counts."""
    return Context().run(_running().call_later, seconds, callback)


def _running() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualLoop):
        raise TypeError("the simulated world needs a virtual loop")
    return loop


def _process_of(handle: asyncio.Handle) -> Process | None:
    process: Process | None = handle._context.get(PROCESS)  # type: ignore[attr-defined]
    return process


class VirtualClock:
    """:class:`swarm.ports.Clock` on the running loop's time, which is that of the process that asks."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` on a new virtual loop; tasks left over are cancelled."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
