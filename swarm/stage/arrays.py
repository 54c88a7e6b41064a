"""torch tensors to raw bytes and back, without needless copies.

Bytes are row-major and little-endian, which is what every machine that torch supports has in memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarm.tensors import ITEM_BYTES, Buffer, TensorData, TensorSpec

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class _Shared:
    """Presents foreign memory to numpy as writable, and keeps it alive.

    torch warns of read-only memory although nobody here writes to what was received; silencing the warning
    would change the filters of the whole process, from a thread.
    """

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def spec_of(tensor: Tensor) -> TensorSpec:
    """Dtype and shape.  Raises ValueError for a dtype that may not travel."""
    if tensor.dtype not in _NAMES:
        raise ValueError(f"dtype {tensor.dtype} may not travel")
    return TensorSpec(dtype=_NAMES[tensor.dtype], shape=tuple(tensor.shape))


def to_buffer(tensor: Tensor) -> Buffer:
    """Raw bytes; shares the memory of a contiguous CPU tensor, which must not change while the bytes are in use."""
    if tensor.numel() == 0:
        return b""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def to_data(tensor: Tensor) -> TensorData:
    """The tensor as roles and wire see it; shares memory like :func:`to_buffer`."""
    return TensorData(spec=spec_of(tensor), data=to_buffer(tensor))


def from_buffer(data: Buffer, spec: TensorSpec) -> Tensor:
    """A CPU tensor that shares the memory of ``data`` and must not be written to.

    Raises ValueError if size or dtype do not fit, or a bool is neither 0 nor 1.
    """
    if spec.dtype not in DTYPES or any(size < 0 for size in spec.shape):
        raise ValueError(f"{spec} is not a tensor that may travel")
    view = memoryview(data)
    if view.nbytes != spec.nbytes:
        raise ValueError(f"{spec} needs {spec.nbytes} bytes, not {view.nbytes}")
    dtype = DTYPES[spec.dtype]
    if view.nbytes == 0:
        return torch.empty(spec.shape, dtype=dtype)
    raw = np.frombuffer(view, dtype=np.uint8)
    if raw.__array_interface__["data"][0] % ITEM_BYTES[spec.dtype]:
        raw = raw.copy()
    if dtype == torch.bool and raw.max() > 1:
        raise ValueError("a bool is neither 0 nor 1")
    return torch.from_numpy(np.asarray(_Shared(raw))).view(dtype).reshape(spec.shape)


def from_data(data: TensorData) -> Tensor:
    """Inverse of :func:`to_data`; shares memory like :func:`from_buffer`."""
    return from_buffer(data.data, data.spec)
