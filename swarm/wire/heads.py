"""Heads: what the first frame of a stream says before any data.  Reading raises BadRequest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from swarm.errors import BadRequest
from swarm.messages import BackwardReply, BackwardRequest, ForwardRequest, MicrobatchCall, StateHead
from swarm.tensors import TensorData, TensorSpec
from swarm.wire import convert, fields
from swarm.wire.frames import Frame
from swarm.wire.v1 import stage_pb2 as pb

T = TypeVar("T")

MAX_LAYOUT = 1 << 22
"""Characters of a state's layout (the message limit is about the same)."""
MAX_STATE_BYTES = 1 << 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """First frame of a request: the call, the tensors that follow, and how the request is made of them."""

    call: MicrobatchCall
    specs: dict[str, TensorSpec]
    """By name, in the order of their data: 'inputs', 'seed'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOpening(Opening):
    """Opening of a forward."""

    keep_graph: bool

    def request(self, tensors: tuple[TensorData, ...]) -> ForwardRequest:
        """The whole request."""
        return ForwardRequest(call=self.call, inputs=tensors[0], keep_graph=self.keep_graph)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardOpening(Opening):
    """Opening of a backward."""

    tokens: int
    accumulate: bool

    def request(self, tensors: tuple[TensorData, ...]) -> BackwardRequest:
        """The whole request."""
        return BackwardRequest(
            call=self.call,
            inputs=tensors[0] if len(tensors) > 1 else None,
            seed=tensors[-1],
            tokens=self.tokens,
            accumulate=self.accumulate,
        )


def to_forward(request: ForwardRequest) -> pb.Frame:
    """Head and declared tensors of a forward."""
    head = pb.ForwardHead(call=convert.to_call(request.call), keep_graph=request.keep_graph)
    return pb.Frame(forward=head, tensors=[convert.to_spec(request.inputs.spec)])


def from_forward(frame: Frame, most_bytes: int) -> ForwardOpening:
    """Read the first frame of a forward."""
    meta = _meta(frame, "forward")
    specs = _specs(meta, most_bytes, 1, 1)
    call = convert.from_call(meta.forward.call)
    return ForwardOpening(call=call, specs={"inputs": specs[0]}, keep_graph=meta.forward.keep_graph)


def to_backward(request: BackwardRequest) -> pb.Frame:
    """Head and declared tensors of a backward."""
    head = pb.BackwardHead(call=convert.to_call(request.call), tokens=request.tokens, accumulate=request.accumulate)
    tensors = [request.seed] if request.inputs is None else [request.inputs, request.seed]
    return pb.Frame(backward=head, tensors=[convert.to_spec(tensor.spec) for tensor in tensors])


def from_backward(frame: Frame, most_bytes: int) -> BackwardOpening:
    """Read the first frame of a backward."""
    meta = _meta(frame, "backward")
    specs = _specs(meta, most_bytes, 1, 2)
    names = ("inputs", "seed")[-len(specs) :]
    return BackwardOpening(
        call=convert.from_call(meta.backward.call),
        specs=dict(zip(names, specs, strict=True)),
        tokens=fields.count("tokens", meta.backward.tokens),
        accumulate=meta.backward.accumulate,
    )


def to_output(output: TensorData) -> pb.Frame:
    """Declaration of a forward's reply."""
    return pb.Frame(tensors=[convert.to_spec(output.spec)])


def from_output(frame: Frame, most_bytes: int) -> tuple[TensorSpec, ...]:
    """Read the first frame of a forward's reply: one tensor."""
    return _specs(_meta(frame, None), most_bytes, 1, 1)


def to_backward_reply(reply: BackwardReply) -> pb.Frame:
    """Head and declared tensors of a backward's reply."""
    gradient = reply.input_gradient
    return pb.Frame(
        backward_reply=pb.BackwardReplyHead(loss=reply.loss, accumulated=reply.accumulated),
        tensors=[] if gradient is None else [convert.to_spec(gradient.spec)],
    )


def from_backward_reply(
    frame: Frame, most_bytes: int
) -> tuple[tuple[TensorSpec, ...], Callable[[tuple[TensorData, ...]], BackwardReply]]:
    """Read the first frame of a backward's reply: its tensors (at most one), and how the reply is made of them."""
    meta = _meta(frame, "backward_reply")
    head = meta.backward_reply
    loss = fields.number("loss", head.loss) if head.HasField("loss") else None

    def reply(tensors: tuple[TensorData, ...]) -> BackwardReply:
        return BackwardReply(input_gradient=tensors[0] if tensors else None, loss=loss, accumulated=head.accumulated)

    return _specs(meta, most_bytes, 0, 1), reply


def to_state(head: StateHead) -> pb.Frame:
    """Head of a state."""
    return pb.Frame(
        state=pb.StateHead(
            lineage=convert.to_lineage(head.lineage),
            commits=[convert.to_commit(commit) for commit in head.commits],
            digest=head.digest,
            total_bytes=head.total_bytes,
            layout=head.layout,
        )
    )


def from_state(frame: Frame) -> StateHead:
    """Read the first frame of a state."""
    meta = _meta(frame, "state")
    _specs(meta, 0, 0, 0)
    if len(frame.data):
        raise BadRequest("state: data in the first frame")
    head = meta.state
    return StateHead(
        lineage=convert.from_lineage(head.lineage),
        commits=fields.many("commits", head.commits, fields.MAX_COMMITS, convert.from_commit),
        digest=fields.digest("digest", head.digest),
        total_bytes=fields.count("total_bytes", head.total_bytes, MAX_STATE_BYTES),
        layout=fields.text("layout", head.layout, MAX_LAYOUT),
    )


def _meta(frame: Frame, head: str | None) -> pb.Frame:
    found = frame.meta.WhichOneof("head") if frame.meta is not None else None
    if found != head or frame.meta is None:
        raise BadRequest(f"first frame: head is {found or 'absent'}, not {head or 'absent'}")
    return frame.meta


def _specs(meta: pb.Frame, most_bytes: int, least: int, most: int) -> tuple[TensorSpec, ...]:
    if not least <= len(meta.tensors) <= most:
        raise BadRequest(f"first frame: {len(meta.tensors)} tensors, not from {least} to {most}")
    return tuple(convert.from_spec(spec, most_bytes) for spec in meta.tensors)
