"""Exact arithmetic for simulated stages: integers modulo a prime.

Sums do not depend on their order, so 'equal to the reference' means equal bits, and a microbatch that is missing,
doubled or wrongly weighted changes the result (but for a chance of 1 in the prime).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from swarm.errors import BadRequest
from swarm.ids import MicrobatchId
from swarm.tensors import TensorData, TensorSpec

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
