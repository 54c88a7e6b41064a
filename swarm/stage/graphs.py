"""Autograd graphs kept from forward to backward, within a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.ports import Draw


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A forward that can be gone back through once."""

    inputs: Tensor
    """The leaf: activations that require a gradient, or token ids."""
    output: Tensor
    nbytes: int
    """Memory that it holds, parameters left out."""


class GraphCache:
    """Graphs by microbatch.  What would exceed the budget is not kept: the newest goes, and no work is refused."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._graphs: dict[Draw, Graph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def has_room(self, nbytes: int) -> bool:
        """Whether a graph of this size would be kept."""
        return self.used_bytes + nbytes <= self.budget_bytes

    def keep(self, draw: Draw, graph: Graph) -> None:
        """Keep ``graph`` in place of an older one of the same microbatch, if there is room."""
        self.take(draw)
        if self.has_room(graph.nbytes):
            self._graphs[draw] = graph
            self.used_bytes += graph.nbytes

    def take(self, draw: Draw) -> Graph | None:
        """Remove and return the graph of a microbatch."""
        graph = self._graphs.pop(draw, None)
        if graph is not None:
            self.used_bytes -= graph.nbytes
        return graph

    def clear(self) -> None:
        """Forget all graphs."""
        self._graphs.clear()
        self.used_bytes = 0


def measured(forward: Callable[[], Tensor], inputs: Tensor, parameters: Iterable[Tensor]) -> tuple[Tensor, int]:
    """Run ``forward``; returns its output and the bytes that its graph holds, ``parameters`` left out."""
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()

    def pack(tensor: Tensor) -> Tensor:
        note(tensor)
        # Detached, because an output packed as it is would hold its own graph: a cycle that is never freed.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    note(inputs)
    note(output)
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    return output, sum(nbytes for address, nbytes in storages.items() if address not in own)
