"""What messages weigh on the wire: the simulated ones carry a few numbers and stand for a real model's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swarm.messages import BackwardReply, BackwardRequest, ForwardRequest, FreezeReply, ReduceRequest
from swarm.tensors import TensorData

CONTROL_BYTES = 400
"""A message without tensors: head, keys, gRPC frame."""
RECORD_BYTES = 600
"""A signed record of a peer on the DHT."""
ITEM_BYTES = 40
"""One entry of a list in a message: a held microbatch, a member of a group, a stage of a commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Time that is neither a link's nor a device's; constants to be fitted to a real swarm."""

    call_seconds: float = 0.0
    """Of each call, for packing, unpacking and waking up."""
    reduce_seconds: float = 0.04
    """Of each all-reduce."""
    reduce_over_links: bool = True
    """False: the all-reduce takes another way than the calls, one without latency or limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Bytes of one microbatch and one stage of the model that is stood for.  By default nothing but control."""

    ids_bytes: int = 0
    """Token ids or targets (B, T)."""
    boundary_bytes: int = 0
    """Activations or their gradients (B, T, D)."""
    gradient_bytes: tuple[int, ...] = ()
    """Of each stage, as it is averaged."""
    state_bytes: tuple[int, ...] = ()
    """Of each stage: parameters and optimizer."""

    def request(self, request: Any) -> int:
        """Of a request's message."""
        if isinstance(request, ForwardRequest):
            return CONTROL_BYTES + self._inputs(request.call.key.stage)
        if isinstance(request, BackwardRequest):
            inputs = self._inputs(request.call.key.stage) if request.inputs is not None else 0
            last = request.call.key.stage == self._stages - 1
            return CONTROL_BYTES + inputs + (self.ids_bytes if last else self.boundary_bytes)
        return CONTROL_BYTES + (ITEM_BYTES * len(request.members) if isinstance(request, ReduceRequest) else 0)

    def answer(self, answer: Any) -> int:
        """Of an answer's message; streams are apart."""
        if isinstance(answer, TensorData):
            return CONTROL_BYTES + self.boundary_bytes
        if isinstance(answer, BackwardReply):
            return CONTROL_BYTES + (self.boundary_bytes if answer.input_gradient is not None else 0)
        return CONTROL_BYTES + (ITEM_BYTES * len(answer.held) if isinstance(answer, FreezeReply) else 0)

    def stream(self, kind: str, stage: int) -> int:
        """Of the state or gradient that a donor of the stage sends."""
        sizes = self.state_bytes if kind == "fetch_state" else self.gradient_bytes
        return sizes[stage] if sizes else 0

    def gradient(self, stage: int) -> int:
        """Of the stage's averaged gradient."""
        return self.gradient_bytes[stage] if self.gradient_bytes else 0

    @property
    def _stages(self) -> int:
        return len(self.gradient_bytes)

    def _inputs(self, stage: int) -> int:
        return self.ids_bytes if stage == 0 else self.boundary_bytes
