"""An emulated machine: its stage really computes, and the compute thread sleeps as well."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from swarm.ports import Draw, Gradient, StageModule
from swarm.tensors import TensorData

T = TypeVar("T")


class PacedModule:
    """Implements :class:`swarm.ports.StageModule`: a forward takes at least ``seconds``, a backward twice that.

    And each takes at least ``factor`` times as long as it computes.  A backward that is sent its input, as all are at
    the last stage, runs the forward again: three times ``seconds``.  What fails does so at once; nothing else sleeps.
    """

    def __init__(self, module: StageModule, *, seconds: float = 0.0, factor: float = 1.0) -> None:
        self._module = module
        self._seconds = seconds
        self._factor = factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def probe(self) -> float:
        """Takes as long as a forward does, and says so."""
        return max(self._seconds, self._factor * self._paced(1.0, self._module.probe))

    def forward(self, draw: Draw, inputs: TensorData, *, keep_graph: bool) -> TensorData:
        return self._paced(1.0, lambda: self._module.forward(draw, inputs, keep_graph=keep_graph))

    def backward(self, draw: Draw, inputs: TensorData | None, seed: TensorData) -> Gradient:
        units = 2.0 if inputs is None else 3.0
        return self._paced(units, lambda: self._module.backward(draw, inputs, seed))

    def _paced(self, units: float, job: Callable[[], T]) -> T:
        started = time.perf_counter()
        result = job()
        took = time.perf_counter() - started
        # The whole thread sleeps, as a slow device would keep it.
        time.sleep(max(0.0, max(units * self._seconds, self._factor * took) - took))
        return result
