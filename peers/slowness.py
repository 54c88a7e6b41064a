"""An emulated machine: the compute thread really computes, and sleeps as well.

:class:`SlowExecutor` multiplies what a job took; :class:`PacedModule` fills it up to given seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from swarm.ports import Draw, Executor, Gradient, Priority, StageModule
from swarm.tensors import TensorData

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


class PacedModule:
    """Implements :class:`swarm.ports.StageModule`: a forward takes at least ``seconds``, a backward twice that.

    A backward that is sent its input, as all are at the last stage, runs the forward again: three times that.  What
    fails does so at once, and nothing else sleeps: a donation's jobs have the backward's priority, but are none.
    """

    def __init__(self, module: StageModule, seconds: float) -> None:
        self._module = module
        self._seconds = seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def probe(self) -> float:
        """Takes ``seconds`` as a forward does, and says so, unless the true forward takes longer."""
        return max(self._seconds, self._paced(1.0, self._module.probe))

    def forward(self, draw: Draw, inputs: TensorData, *, keep_graph: bool) -> TensorData:
        return self._paced(1.0, lambda: self._module.forward(draw, inputs, keep_graph=keep_graph))

    def backward(self, draw: Draw, inputs: TensorData | None, seed: TensorData) -> Gradient:
        units = 2.0 if inputs is None else 3.0
        return self._paced(units, lambda: self._module.backward(draw, inputs, seed))

    def _paced(self, units: float, job: Callable[[], T]) -> T:
        until = time.perf_counter() + units * self._seconds
        result = job()
        # The whole thread sleeps, as a slow device would keep it.
        time.sleep(max(0.0, until - time.perf_counter()))
        return result
