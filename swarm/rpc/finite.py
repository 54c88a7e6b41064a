"""Whether what a peer sent is finite: seen where it enters, the peer to blame is known."""

from __future__ import annotations

import math

import numpy as np

from swarm.tensors import TensorData

_KINDS = {"float64": "<f8", "float32": "<f4", "float16": "<f2"}
_BFLOAT16_EXPONENT = 0x7F80


def all_finite(tensor: TensorData) -> bool:
    """No element is NaN or infinity; integers always are finite."""
    if tensor.spec.dtype == "bfloat16":
        bits = np.frombuffer(tensor.data, dtype="<u2")
        return not bool(((bits & _BFLOAT16_EXPONENT) == _BFLOAT16_EXPONENT).any())
    kind = _KINDS.get(tensor.spec.dtype)
    if kind is None:
        return True
    values = np.frombuffer(tensor.data, dtype=kind)
    with np.errstate(all="ignore"):
        # A finite sum proves it several times faster; one that is not may have overflowed.
        return math.isfinite(float(values.sum())) or bool(np.isfinite(values).all())
