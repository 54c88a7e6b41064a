"""The form of a stage's state in transit: a JSON layout and the tensors' bytes one after the other.  No pickle."""

from __future__ import annotations

import json
from collections.abc import Sequence

from torch import Tensor

from swarm.stage.arrays import from_buffer
from swarm.tensors import Buffer, TensorSpec

Entries = Sequence[tuple[str, TensorSpec]]
"""Name, dtype and shape of each tensor, in order."""


def layout_of(entries: Entries) -> str:
    """Layout (JSON) of ``entries``."""
    return json.dumps(_raw(entries), separators=(",", ":"))


def match(layout: str, candidates: Sequence[Entries]) -> Entries:
    """The candidate that ``layout`` describes.  Raises ValueError if it is malformed or describes none of them."""
    try:
        raw = json.loads(layout)
    except RecursionError:
        raise ValueError("layout is nested too deeply") from None
    for entries in candidates:
        if raw == _raw(entries):
            return entries
    raise ValueError("layout does not fit the stage")


def split(data: Buffer, entries: Entries) -> list[Tensor]:
    """Tensors that share the memory of ``data``.  Raises ValueError on a wrong size."""
    view = memoryview(data).cast("B")
    total = sum(spec.nbytes for _, spec in entries)
    if len(view) != total:
        raise ValueError(f"the layout needs {total} bytes, not {len(view)}")
    tensors = []
    offset = 0
    for _, spec in entries:
        tensors.append(from_buffer(view[offset : offset + spec.nbytes], spec))
        offset += spec.nbytes
    return tensors


def _raw(entries: Entries) -> list[dict[str, object]]:
    return [{"name": name, "dtype": spec.dtype, "shape": list(spec.shape)} for name, spec in entries]
