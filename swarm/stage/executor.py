"""The peer's one compute thread."""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeVar

import torch

from swarm.errors import Draining
from swarm.ports import Priority

T = TypeVar("T")


class _State(Enum):
    QUEUED = auto()
    RUNNING = auto()
    DONE = auto()
    """Finished, or never to be run."""


@dataclass(slots=True, order=True)
class _Job:
    priority: int
    number: int
    """First come, first served within a priority."""
    work: Callable[[], Any] | None = field(compare=False)
    future: asyncio.Future[Any] = field(compare=False)
    state: _State = field(default=_State.QUEUED, compare=False)


class ThreadExecutor:
    """Implements ``ports.Executor`` by one daemon thread and a priority queue.

    ``threads`` is how many threads torch may use inside a job: more than one only where cores idle.
    """

    def __init__(self, threads: int = 1, name: str = "compute") -> None:
        self._threads = threads
        self._changed = threading.Condition()
        self._heap: list[_Job] = []
        self._count = 0
        self._queued = 0
        self._running_since: float | None = None
        self._busy_seconds = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Jobs that are queued or running."""
        with self._changed:
            return self._queued + (self._running_since is not None)

    @property
    def busy_seconds(self) -> float:
        """Seconds spent in jobs, the running one included."""
        with self._changed:
            running = 0.0 if self._running_since is None else time.perf_counter() - self._running_since
            return self._busy_seconds + running

    async def run(self, priority: Priority, job: Callable[[], T]) -> T:
        """Run ``job`` on the thread and return or raise what it does.

        Cancelled before the job starts: it is never run.  Later: it finishes, and its result is dropped.
        Raises Draining if the executor is closed before the job starts.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self._changed:
            if self._closed:
                raise Draining("the compute thread is closed")
            entry = _Job(int(priority), self._count, job, future)
            self._count += 1
            self._queued += 1
            heapq.heappush(self._heap, entry)
            self._changed.notify()
        try:
            return await future
        except asyncio.CancelledError:
            with self._changed:
                self._forget(entry)
            raise

    def close(self) -> None:
        """Refuse queued jobs, wait for the running one, and end the thread.  Called once or more, not from a job."""
        with self._changed:
            self._closed = True
            for entry in self._heap:
                if entry.state is _State.QUEUED:
                    self._forget(entry)
                    _deliver(entry.future, None, Draining("the compute thread is closed"))
            self._heap.clear()
            self._changed.notify()
        self._thread.join()

    def _forget(self, entry: _Job) -> None:
        """Never run a queued job; its place in the heap is emptied later.  Under the lock."""
        if entry.state is _State.QUEUED:
            entry.state = _State.DONE
            entry.work = None
            self._queued -= 1

    def _next(self) -> _Job | None:
        """Wait for a job and mark it as running; None when closed."""
        with self._changed:
            while True:
                while not self._heap and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return None
                entry = heapq.heappop(self._heap)
                if entry.future.cancelled():
                    self._forget(entry)
                if entry.state is _State.QUEUED:
                    entry.state = _State.RUNNING
                    self._queued -= 1
                    self._running_since = time.perf_counter()
                    return entry

    def _main(self) -> None:
        torch.set_num_threads(self._threads)
        while (entry := self._next()) is not None:
            self._work(entry)
            # Nothing of a job, its tensors least of all, may live on while the thread waits for the next.
            del entry

    def _work(self, entry: _Job) -> None:
        assert entry.work is not None
        result: Any = None
        error: BaseException | None = None
        try:
            result = entry.work()
        except BaseException as caught:  # noqa: BLE001 - the task's root: whatever it is belongs to the awaiter
            error = caught
        with self._changed:
            assert self._running_since is not None
            self._busy_seconds += time.perf_counter() - self._running_since
            self._running_since = None
            entry.state = _State.DONE
            entry.work = None
        _deliver(entry.future, result, error)


def _deliver(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Settle ``future`` in its own loop, from any thread."""
    loop = future.get_loop()
    try:
        loop.call_soon_threadsafe(_settle, future, result, error)
    except RuntimeError:
        # The loop is closed, and with it whoever waited.
        if not loop.is_closed():
            raise


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if isinstance(error, StopIteration):
        # asyncio forbids it in a future.
        future.set_exception(RuntimeError("job raised StopIteration"))
    elif error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
