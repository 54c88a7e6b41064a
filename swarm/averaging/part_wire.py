"""Parts of a gradient in hivemind's messages: float32 as raw bytes, every field checked before it is used."""

from __future__ import annotations

import numpy as np
from hivemind.averaging.partition import AllreduceException
from hivemind.proto import averaging_pb2, runtime_pb2

from swarm.averaging.part_sums import MeanPart, Values

_DTYPE = "float32"


def encode_part(values: Values | None) -> runtime_pb2.Tensor:
    """A part of a member's sum; nothing at all from a member of weight 0."""
    if values is None:
        return runtime_pb2.Tensor(compression=runtime_pb2.NONE, dtype=_DTYPE, size=[0])
    return runtime_pb2.Tensor(
        compression=runtime_pb2.NONE,
        dtype=_DTYPE,
        size=[values.size],
        buffer=values.astype("<f4", copy=False).tobytes(),
    )


def decode_part(message: averaging_pb2.AveragingData, size: int, tokens: int) -> Values | None:
    """A sender's part of ``size`` numbers.  Raises AllreduceException unless it is exactly what was agreed."""
    if message.weight != tokens:
        raise AllreduceException(f"a part of weight {message.weight}, not {tokens}")
    if tokens == 0:
        _values(message.tensor_part, 0)
        return None
    values = _values(message.tensor_part, size)
    if not np.isfinite(values).all():
        # One such part would make the whole group's mean worthless, and nobody could tell whose it was.
        raise AllreduceException("a part that is not finite")
    return values


def encode_mean(mean: MeanPart) -> averaging_pb2.AveragingData:
    """A part of the mean with the weight that it contains."""
    return averaging_pb2.AveragingData(
        code=averaging_pb2.AVERAGED_PART, tensor_part=encode_part(mean.values), weight=mean.weight
    )


def decode_mean(message: averaging_pb2.AveragingData, size: int) -> MeanPart:
    """Inverse of :func:`encode_mean`.  Raises AllreduceException."""
    if message.code != averaging_pb2.AVERAGED_PART:
        known = message.code in averaging_pb2.MessageCode.values()
        raise AllreduceException(averaging_pb2.MessageCode.Name(message.code) if known else "an unknown code")
    return MeanPart(values=_values(message.tensor_part, size), weight=message.weight)


def _values(tensor: runtime_pb2.Tensor, size: int) -> Values:
    if tensor.compression != runtime_pb2.NONE or tensor.dtype != _DTYPE:
        raise AllreduceException(f"a part of dtype {tensor.dtype[:20]!r}, compression {tensor.compression}")
    raw = tensor.buffer  # each look at it is a copy
    if list(tensor.size) != [size] or len(raw) != 4 * size:
        raise AllreduceException(f"a part of {len(raw)} bytes, not {4 * size}")
    return np.frombuffer(raw, dtype="<f4").astype(np.float32, copy=False)
