"""A stage whose arithmetic is exact (:mod:`swarm.sim.arithmetic`) and whose work takes a device's time."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from swarm.errors import NeedsInput, NotFinite
from swarm.ids import Digest, MicrobatchId
from swarm.messages import BackwardRequest, ForwardRequest
from swarm.policy.routing import BACKWARD_UNITS, FORWARD_UNITS
from swarm.ports import Draw, Gradient
from swarm.sim.arithmetic import PRIME, WIDTH, ZERO, Vector, backward, forward, initial, loss_seed, pack, unpack
from swarm.sim.arithmetic import update as updated
from swarm.sim.machine import Device
from swarm.tensors import Buffer, TensorData

UPDATE_UNITS = 0.5
"""Of an optimizer step, in forwards of a microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Poison:
    """A microbatch that is not finite at one stage: its ``output`` (and what follows), or only its ``gradient``."""

    stage: int
    step: int
    microbatch: MicrobatchId
    where: str


class Broken(RuntimeError):
    """An injected failure of a stage's arithmetic."""


class NumericStage:
    """Implements :class:`swarm.ports.StageModule`."""

    def __init__(
        self,
        stage: int,
        stages: int,
        poisons: frozenset[Poison] = frozenset(),
        *,
        device: Device | None = None,
        work: float = 1.0,
        gradient_bytes: int = 8 * WIDTH,
        graph_bytes: int = 0,
    ) -> None:
        """``work`` is what a forward takes, in units of the device.

        ``gradient_bytes`` and ``graph_bytes`` (of one microbatch) are those of the model that is stood for.
        """
        self.stage = stage
        self.last = stage == stages - 1
        self.poisons = poisons
        """What is not finite here."""
        self.device = device or Device(seconds_per_unit=0.0)
        self.gradient_bytes = gradient_bytes
        self.parameters = initial(stage)
        self.added: Counter[MicrobatchId] = Counter()
        """What was really added to the sum, for the invariants."""
        self.breaks: set[MicrobatchId] = set()
        """Microbatches whose addition breaks half-way, once each."""
        self.breaks_next = 0
        """So many of the next additions break half-way as well."""
        self.sick_next = 0
        """So many of the next results of forwards and backwards are not finite."""
        self.on_sick: Callable[[Draw], None] = lambda draw: None
        """Told of each of them."""
        self.recomputed = 0
        """Backwards whose forward had to be run again."""
        self._sum: list[float] = list(ZERO)
        self._reduced: Vector | None = None
        self._graphs: dict[tuple[int, MicrobatchId], Vector] = {}
        self._graph_bytes = graph_bytes
        self._work = work

    # --- microbatches ---------------------------------------------------------------

    def check_forward(self, request: ForwardRequest) -> None:
        unpack(request.inputs)

    def check_backward(self, request: BackwardRequest) -> None:
        unpack(request.seed)
        if request.inputs is not None:
            unpack(request.inputs)

    def probe(self) -> float:
        before = self.device.busy_seconds
        self.device.compute(self._work * FORWARD_UNITS)
        return self.device.busy_seconds - before

    def forward(self, draw: Draw, inputs: TensorData, *, keep_graph: bool) -> TensorData:
        values = unpack(inputs)
        self.device.compute(self._work * FORWARD_UNITS)
        if self._poisoned(draw, "output") or self._is_sick(draw):
            raise NotFinite("output")
        if keep_graph and self._has_room():
            self._graphs[(draw.step, draw.microbatch)] = values
        return pack(forward(self.parameters, values))

    def backward(self, draw: Draw, inputs: TensorData | None, seed: TensorData) -> Gradient:
        seeds = unpack(seed)
        kept = self._graphs.pop((draw.step, draw.microbatch), None)
        values = kept if inputs is None else unpack(inputs)
        if values is None:
            raise NeedsInput("the graph is gone")
        recomputes = values != kept or self.last
        self.recomputed += recomputes and not self.last
        self.device.compute(self._work * (BACKWARD_UNITS + (FORWARD_UNITS if recomputes else 0.0)))
        loss = None
        if self.last:
            seeds, loss = loss_seed(forward(self.parameters, values), seeds)
        gradient_in, gradient = backward(self.parameters, values, seeds)
        finite = not self._poisoned(draw, "gradient") and not self._poisoned(draw, "output")
        return Gradient(
            input_gradient=pack(gradient_in) if self.stage else None,
            loss=loss,
            finite=not self._is_sick(draw) and finite,
            samples=1,
            handle=(draw.microbatch, gradient),
        )

    def accumulate(self, gradient: Gradient) -> None:
        microbatch, values = gradient.handle
        if microbatch in self.breaks or self.breaks_next:
            self.breaks_next -= microbatch not in self.breaks
            self.breaks.discard(microbatch)
            self._sum[0] = (self._sum[0] + values[0]) % PRIME
            raise Broken(f"microbatch {microbatch} was added half")
        self._sum[:] = [(a + b) % PRIME for a, b in zip(self._sum, values, strict=True)]
        self.added[microbatch] += 1

    def drop_gradient(self) -> None:
        self._sum[:] = ZERO
        self.added.clear()

    def gradient_sum(self) -> Any:
        """Not a copy: whatever is added while it is being averaged spoils the average, as it would on a device."""
        return self._sum

    def spoil(self) -> None:
        """Make the sum not finite, as a faulty memory would."""
        self._sum[0] = math.nan

    def _has_room(self) -> bool:
        limit = self.device.memory_bytes
        return limit is None or (len(self._graphs) + 1) * self._graph_bytes <= limit

    def _poisoned(self, draw: Draw, where: str) -> bool:
        if not self.poisons:
            return False
        poison = Poison(stage=self.stage, step=draw.step, microbatch=draw.microbatch, where=where)
        return poison in self.poisons

    def _is_sick(self, draw: Draw) -> bool:
        if not self.sick_next:
            return False
        self.sick_next -= 1
        self.on_sick(draw)
        return True

    # --- the averaged gradient --------------------------------------------------------

    def set_reduced(self, mean: Any) -> tuple[Digest, float]:
        if len(mean) != WIDTH:
            raise ValueError(f"{len(mean)} numbers")
        self._reduced = tuple(mean)
        if any(math.isnan(value) for value in mean):  # spoiled while it was being averaged
            return Digest(hashlib.sha256(b"not finite").hexdigest()), math.nan
        return Digest(hashlib.sha256(pack(mean).data).hexdigest()), float(sum(mean) % 1009)

    def reduced_bytes(self) -> Buffer:
        return pack(self._kept()).data

    def load_reduced(self, data: Buffer) -> tuple[Digest, float]:
        if len(data) != 8 * WIDTH:
            raise ValueError(f"{len(data)} bytes")
        return self.set_reduced(struct.unpack(f"<{WIDTH}q", bytes(data)))

    def apply(self, step: int, clip_factor: float) -> float:
        reduced = self._kept()
        self.device.compute(self._work * UPDATE_UNITS)
        self.parameters = updated(self.parameters, reduced)
        self.drop_gradient()
        self._graphs.clear()
        return self.squared_norm()

    def _kept(self) -> Vector:
        if self._reduced is None:
            raise ValueError("no reduced gradient is set")
        return self._reduced

    # --- parameters -------------------------------------------------------------------

    def squared_norm(self) -> float:
        return float(sum(self.parameters))

    def digest(self) -> Digest:
        return Digest(hashlib.sha256(pack(self.parameters).data).hexdigest())

    def snapshot(self) -> tuple[str, Sequence[Buffer]]:
        return json.dumps({"stage": self.stage}), [pack(self.parameters).data]

    def load(self, layout: str, data: Buffer) -> None:
        if json.loads(layout) != {"stage": self.stage} or len(data) != 8 * WIDTH:
            raise ValueError("another stage's state")
        self._take(struct.unpack(f"<{WIDTH}q", bytes(data)))

    def reset(self) -> None:
        self._take(initial(self.stage))

    def _take(self, parameters: Vector) -> None:
        """What belongs to other parameters is dropped."""
        self.parameters = parameters
        self._reduced = None
        self.drop_gradient()
        self._graphs.clear()
