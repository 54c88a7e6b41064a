"""A stage whose arithmetic is exact: integers modulo a prime.

Sums do not depend on their order, so 'equal to the reference' means equal bits, and a microbatch that is missing,
doubled or wrongly weighted changes the result (but for a chance of 1 in the prime).
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swarm.errors import BadRequest, NeedsInput, NotFinite
from swarm.ids import Digest, MicrobatchId
from swarm.messages import BackwardRequest, ForwardRequest
from swarm.ports import Draw, Gradient
from swarm.tensors import Buffer, TensorData, TensorSpec

PRIME = 2_147_483_647
WIDTH = 3

Vector = tuple[int, ...]


def pack(values: Sequence[int]) -> TensorData:
    """Integers as an int64 tensor of one dimension."""
    data = struct.pack(f"<{len(values)}q", *values)
    return TensorData(spec=TensorSpec(dtype="int64", shape=(len(values),)), data=data)


def unpack(tensor: TensorData) -> Vector:
    """Inverse of :func:`pack`.  Raises BadRequest on another dtype or length."""
    if tensor.spec != TensorSpec(dtype="int64", shape=(WIDTH,)):
        raise BadRequest(f"{tensor.spec} is not what this stage takes")
    return struct.unpack(f"<{WIDTH}q", bytes(tensor.data))


def initial(stage: int) -> Vector:
    """Parameters of version 0."""
    return tuple((7919 * (stage + 1) + 104_729 * i) % PRIME for i in range(WIDTH))


def forward(parameters: Vector, inputs: Vector) -> Vector:
    """The stage's function."""
    return tuple((p * x + x + 1) % PRIME for p, x in zip(parameters, inputs, strict=True))


def backward(parameters: Vector, inputs: Vector, seed: Vector) -> tuple[Vector, Vector]:
    """Gradients of the input and of the parameters."""
    gradient_in = tuple(g * (p + 1) % PRIME for g, p in zip(seed, parameters, strict=True))
    gradient = tuple(g * x % PRIME for g, x in zip(seed, inputs, strict=True))
    return gradient_in, gradient


def loss_seed(output: Vector, targets: Vector) -> tuple[Vector, float]:
    """Gradient of the loss at the last stage's output, and the loss."""
    difference = tuple((o - t) % PRIME for o, t in zip(output, targets, strict=True))
    return difference, float(sum(difference) % 1009)


def mean(total: Vector, tokens: int) -> Vector:
    """Division modulo the prime."""
    inverse = pow(tokens, -1, PRIME)
    return tuple(t * inverse % PRIME for t in total)


def update(parameters: Vector, gradient: Vector) -> Vector:
    """One optimizer step."""
    return tuple((p - 3 * g) % PRIME for p, g in zip(parameters, gradient, strict=True))


def add(left: Vector, right: Vector) -> Vector:
    """Sum."""
    return tuple((a + b) % PRIME for a, b in zip(left, right, strict=True))


ZERO: Vector = (0,) * WIDTH


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

    def __init__(self, stage: int, stages: int, poisons: frozenset[Poison] = frozenset()) -> None:
        self.stage = stage
        self.last = stage == stages - 1
        self.poisons = poisons
        """What is not finite here."""
        self.parameters = initial(stage)
        self.added: Counter[MicrobatchId] = Counter()
        """What was really added to the sum, for the invariants."""
        self._sum = list(ZERO)
        self._reduced: Vector | None = None
        self._graphs: dict[tuple[int, MicrobatchId], Vector] = {}
        self.breaks: set[MicrobatchId] = set()
        """Microbatches whose addition breaks half-way, once each."""

    @property
    def gradient_bytes(self) -> int:
        return 8 * WIDTH

    def check_forward(self, request: ForwardRequest) -> None:
        unpack(request.inputs)

    def check_backward(self, request: BackwardRequest) -> None:
        unpack(request.seed)

    def probe(self) -> float:
        return 0.1

    def forward(self, draw: Draw, inputs: TensorData, *, keep_graph: bool) -> TensorData:
        values = unpack(inputs)
        if self._poisoned(draw, "output"):
            raise NotFinite("output")
        if keep_graph:
            self._graphs[(draw.step, draw.microbatch)] = values
        return pack(forward(self.parameters, values))

    def backward(self, draw: Draw, inputs: TensorData | None, seed: TensorData) -> Gradient:
        values = self._graphs.pop((draw.step, draw.microbatch), None)
        if inputs is not None:
            values = unpack(inputs)
        if values is None:
            raise NeedsInput("the graph is gone")
        seeds, loss = unpack(seed), None
        if self.last:
            seeds, loss = loss_seed(forward(self.parameters, values), seeds)
        gradient_in, gradient = backward(self.parameters, values, seeds)
        return Gradient(
            input_gradient=pack(gradient_in) if self.stage else None,
            loss=loss,
            finite=not self._poisoned(draw, "gradient") and not self._poisoned(draw, "output"),
            samples=1,
            handle=(draw.microbatch, gradient),
        )

    def accumulate(self, gradient: Gradient) -> None:
        microbatch, values = gradient.handle
        if microbatch in self.breaks:
            self.breaks.remove(microbatch)
            self._sum[0] = (self._sum[0] + values[0]) % PRIME
            raise Broken(f"microbatch {microbatch} was added half")
        self._sum[:] = add(tuple(self._sum), values)
        self.added[microbatch] += 1

    def drop_gradient(self) -> None:
        self._sum[:] = ZERO
        self.added.clear()

    def gradient_sum(self) -> Any:
        """Not a copy: whatever is added while it is being averaged spoils the average, as it would on a device."""
        return self._sum

    def _poisoned(self, draw: Draw, where: str) -> bool:
        poison = Poison(stage=self.stage, step=draw.step, microbatch=draw.microbatch, where=where)
        return poison in self.poisons

    def set_reduced(self, mean: Any) -> tuple[Digest, float]:
        self._reduced = mean
        return Digest(hashlib.sha256(pack(mean).data).hexdigest()), float(sum(mean) % 1009)

    def reduced_bytes(self) -> Buffer:
        return pack(self._reduced or ZERO).data

    def load_reduced(self, data: Buffer) -> tuple[Digest, float]:
        if len(data) != self.gradient_bytes:
            raise ValueError(f"{len(data)} bytes")
        return self.set_reduced(struct.unpack(f"<{WIDTH}q", bytes(data)))

    def apply(self, step: int, clip_factor: float) -> float:
        self.parameters = update(self.parameters, self._reduced or ZERO)
        self.drop_gradient()
        self._graphs.clear()
        return self.squared_norm()

    def squared_norm(self) -> float:
        return float(sum(self.parameters))

    def digest(self) -> Digest:
        return Digest(hashlib.sha256(pack(self.parameters).data).hexdigest())

    def snapshot(self) -> tuple[str, Sequence[Buffer]]:
        return json.dumps({"stage": self.stage}), [pack(self.parameters).data]

    def load(self, layout: str, data: Buffer) -> None:
        if json.loads(layout) != {"stage": self.stage} or len(data) != self.gradient_bytes:
            raise ValueError("another stage's state")
        self.parameters = struct.unpack(f"<{WIDTH}q", bytes(data))
        self.drop_gradient()
        self._graphs.clear()

    def reset(self) -> None:
        self.parameters = initial(self.stage)
        self.drop_gradient()


class NumericBatches:
    """Implements :class:`swarm.ports.Batches`."""

    def microbatch(self, step: int, microbatch: MicrobatchId) -> tuple[TensorData, TensorData, int]:
        def draw(name: str) -> TensorData:
            digest = hashlib.sha256(f"{name}/{step}/{microbatch}".encode()).digest()
            return pack([v % PRIME for v in struct.unpack(f"<{WIDTH}Q", digest[: 8 * WIDTH])])

        return draw("inputs"), draw("targets"), 1 + (step + microbatch) % 3


def train_step(
    parameters: Sequence[Vector], step: int, microbatches: Sequence[MicrobatchId]
) -> tuple[list[Vector], list[float]]:
    """What a single process does in one step: parameters of all stages after it, and the loss of each microbatch."""
    batches = NumericBatches()
    sums, tokens, losses = [ZERO] * len(parameters), 0, []
    for microbatch in microbatches:
        inputs, targets, weight = batches.microbatch(step, microbatch)
        tokens += weight
        values = [unpack(inputs)]
        for stage_parameters in parameters:
            values.append(forward(stage_parameters, values[-1]))
        seed, loss = loss_seed(values[-1], unpack(targets))
        losses.append(loss)
        for stage in reversed(range(len(parameters))):
            seed, gradient = backward(parameters[stage], values[stage], seed)
            sums[stage] = add(sums[stage], gradient)
    return [update(p, mean(total, tokens)) for p, total in zip(parameters, sums, strict=True)], losses
