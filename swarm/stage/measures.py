"""Numbers that say something of many: finiteness, norm, digest."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from swarm.ids import Digest
from swarm.stage.arrays import to_buffer

_CHUNK = 1 << 20
"""Elements widened to float64 at a time."""


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether no element is NaN or infinity.

    A sum or norm that is finite proves it ten times faster than a look at every element; one that is not may
    have overflowed, and only then the elements are looked at.
    """
    full = [tensor for tensor in tensors if tensor.numel()]
    if not full:
        return True
    cheap = full[0].sum() if len(full) == 1 else torch.stack(torch._foreach_norm(full)).sum()
    if math.isfinite(cheap.item()):
        return True
    return all(bool(torch.isfinite(tensor).all()) for tensor in full)


def squared_norm(tensors: Iterable[Tensor]) -> float:
    """Sum of the squares of all elements, added up in float64."""
    total = 0.0
    for tensor in tensors:
        for chunk in torch.split(tensor.detach().reshape(-1), _CHUNK):
            wide = chunk.double()
            total += torch.dot(wide, wide).item()
    return total


def digest(tensors: Iterable[Tensor]) -> Digest:
    """SHA-256 of the raw bytes of all tensors in order."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(to_buffer(tensor))
    return Digest(hashed.hexdigest())
