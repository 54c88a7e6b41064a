"""Worlds: where a contract is tested.  A test is a coroutine that gets adapters; a world makes them and runs it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Generic, TypeVar

import pytest

from swarm.sim.loop import Process
from swarm.sim.loop import run as run_virtual

A = TypeVar("A")
T = TypeVar("T")

Making = Callable[[], AbstractAsyncContextManager[A]]
"""Makes adapters inside of a running loop."""
Test = Callable[[A], Coroutine[Any, Any, T]]

FAST = pytest.mark.fast
"""Of the simulated cases."""
REAL = pytest.mark.swarm
"""Of the real ones: all together they take more than 10 s, and some start processes."""

SIMULATED_SECONDS = 3600.0
REAL_SECONDS = 60.0
"""Longest that one test may take."""


class World(ABC, Generic[A]):
    """One way to run tests of adapters ``A``."""

    def __init__(self, making: Making[A]) -> None:
        self._making = making

    @abstractmethod
    def run(self, test: Test[A, T]) -> T:
        """Run the test with adapters of its own, or with those that this world keeps."""

    def close(self) -> None:
        """After the last test."""


class Simulated(World[A]):
    """Virtual time; new adapters for each test."""

    def run(self, test: Test[A, T]) -> T:
        return run_virtual(_with(self._making, test, SIMULATED_SECONDS))


class SimulatedProcess(World[A]):
    """Virtual time, in a process whose clock is fast and did not begin at 0."""

    def run(self, test: Test[A, T]) -> T:
        async def main() -> T:
            process = Process("p", clock_rate=1.5, clock_offset_seconds=1000.0)
            return await process.spawn(_with(self._making, test, SIMULATED_SECONDS))

        return run_virtual(main())


class Real(World[A]):
    """Real time; new adapters for each test."""

    def run(self, test: Test[A, T]) -> T:
        return asyncio.run(_with(self._making, test, REAL_SECONDS))


class RealKept(World[A]):
    """Real time; all tests share one loop and adapters that take long to start."""

    def __init__(self, making: Making[A]) -> None:
        super().__init__(making)
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._adapters: A | None = None

    def run(self, test: Test[A, T]) -> T:
        async def main() -> T:
            async with asyncio.timeout(REAL_SECONDS):
                if self._adapters is None:
                    self._adapters = await self._stack.enter_async_context(self._making())
                return await test(self._adapters)

        return self._runner.run(main())

    def close(self) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()


async def _with(making: Making[A], test: Test[A, T], seconds: float) -> T:
    async with asyncio.timeout(seconds), making() as adapters:
        return await test(adapters)


def world_fixture(*worlds: tuple[type[World[A]], Making[A], pytest.MarkDecorator]) -> Any:
    """A fixture that has each test of its module run in all of these worlds."""

    @pytest.fixture(
        scope="module",
        params=[pytest.param((kind, making), marks=mark, id=_name(kind)) for kind, making, mark in worlds],
    )
    def world(request: pytest.FixtureRequest) -> Iterator[World[A]]:
        kind, making = request.param
        made: World[A] = kind(making)
        yield made
        made.close()

    return world


def _name(kind: type[World[Any]]) -> str:
    return {Simulated: "simulated", SimulatedProcess: "simulated-process"}.get(kind, "real")
