"""A tensor as roles and wire see it: dtype, shape and raw bytes, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

ITEM_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element of each dtype that may travel; names are torch's."""

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What a tensor looks like before its bytes are there."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the raw data in bytes."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorData:
    """Row-major, little-endian values of a tensor."""

    spec: TensorSpec
    data: Buffer

    def __post_init__(self) -> None:
        if len(self.data) != self.spec.nbytes:
            raise ValueError(f"{self.spec} needs {self.spec.nbytes} bytes, not {len(self.data)}")
