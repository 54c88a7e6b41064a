"""Control messages: the requests and replies of unary calls, as bytes.  Decoding raises BadRequest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from swarm.errors import BadRequest
from swarm.messages import (
    AdoptRequest,
    ApplyRequest,
    DropRequest,
    FreezeReply,
    FreezeRequest,
    GradientRequest,
    Greeting,
    GroupMember,
    HeldMicrobatch,
    PeerReport,
    ReducedMark,
    ReduceReply,
    ReduceRequest,
    StateMark,
    StateRequest,
    VoidReply,
    VoidRequest,
)
from swarm.records import PeerState
from swarm.wire import convert, fields
from swarm.wire.scan import more_fields_than
from swarm.wire.v1 import stage_pb2 as pb

V = TypeVar("V")
M = TypeVar("M", bound=Message)

MAX_STAGES = 1 << 16

_OTHER_FIELDS = 64
"""Fields of a message beside its list."""

_TO_STATE = {
    PeerState.JOINING: pb.PEER_STATE_JOINING,
    PeerState.READY: pb.PEER_STATE_READY,
    PeerState.DRAINING: pb.PEER_STATE_DRAINING,
}
_FROM_STATE = {int(value): state for state, value in _TO_STATE.items()}


@dataclass(frozen=True, slots=True)
class Codec(Generic[V]):
    """How values of one type become bytes and come back."""

    encode: Callable[[V], bytes]
    decode: Callable[[bytes], V]


def codec(
    message: type[M], to_wire: Callable[[V], M], from_wire: Callable[[M], V], most_entries: int = fields.MAX_MEMBERS
) -> Codec[V]:
    """A codec by way of a protobuf message whose longest list has ``most_entries``."""

    def decode(data: bytes) -> V:
        if more_fields_than(data, most_entries + _OTHER_FIELDS):
            raise BadRequest(f"{message.DESCRIPTOR.name}: more than {most_entries} entries")
        try:
            parsed = message.FromString(data)
        except DecodeError:
            raise BadRequest(f"{message.DESCRIPTOR.name}: malformed protobuf") from None
        return from_wire(parsed)

    return Codec(lambda value: to_wire(value).SerializeToString(), decode)


def _to_void(value: VoidRequest) -> pb.VoidRequest:
    return pb.VoidRequest(key=convert.to_key(value.key), microbatch=value.microbatch, below_try=value.below_try)


def _from_void(message: pb.VoidRequest) -> VoidRequest:
    return VoidRequest(
        key=convert.from_key(message.key),
        microbatch=fields.microbatch("microbatch", message.microbatch),
        below_try=message.below_try,
    )


def _to_greeting(value: Greeting) -> pb.Greeting:
    return pb.Greeting(
        run=value.run,
        term=convert.to_term(value.term),
        lineage=None if value.lineage is None else convert.to_lineage(value.lineage),
        distrust=value.distrust,
    )


def _from_greeting(message: pb.Greeting) -> Greeting:
    return Greeting(
        run=fields.run("run", message.run),
        term=convert.from_term(message.term),
        lineage=convert.from_lineage(message.lineage) if message.HasField("lineage") else None,
        distrust=message.distrust,
    )


def _to_report(value: PeerReport) -> pb.PeerReport:
    return pb.PeerReport(
        peer=value.peer,
        session=value.session,
        stage=value.stage,
        state=_TO_STATE[value.state],
        term=convert.to_term(value.term),
        lineage=convert.to_lineage(value.lineage),
        reduced=None if value.reduced is None else convert.to_mark(value.reduced),
        commits=[convert.to_commit(commit) for commit in value.commits],
        queue=value.queue,
        forward_seconds=value.forward_seconds,
    )


def _from_report(message: pb.PeerReport) -> PeerReport:
    return PeerReport(
        peer=fields.peer("peer", message.peer),
        session=fields.session("session", message.session),
        stage=fields.count("stage", message.stage, MAX_STAGES),
        state=fields.choice("state", message.state, _FROM_STATE),
        term=convert.from_term(message.term),
        lineage=convert.from_lineage(message.lineage),
        reduced=convert.from_mark(message.reduced) if message.HasField("reduced") else None,
        commits=fields.many("commits", message.commits, fields.MAX_COMMITS, convert.from_commit),
        queue=message.queue,
        forward_seconds=fields.amount("forward_seconds", message.forward_seconds),
    )


def _to_freeze(value: FreezeRequest) -> pb.FreezeRequest:
    return pb.FreezeRequest(key=convert.to_key(value.key), attempt=value.attempt)


def _from_freeze(message: pb.FreezeRequest) -> FreezeRequest:
    return FreezeRequest(key=convert.from_key(message.key), attempt=message.attempt)


def _to_frozen(value: FreezeReply) -> pb.FreezeReply:
    held = [
        pb.HeldMicrobatch(microbatch=h.microbatch, try_number=h.try_number, tokens=h.tokens, samples=h.samples)
        for h in value.held
    ]
    return pb.FreezeReply(session=value.session, held=held)


def _from_frozen(message: pb.FreezeReply) -> FreezeReply:
    return FreezeReply(
        session=fields.session("session", message.session),
        held=fields.many("held", message.held, fields.MAX_MICROBATCHES, _from_held),
    )


def _from_held(name: str, message: pb.HeldMicrobatch) -> HeldMicrobatch:
    return HeldMicrobatch(
        microbatch=fields.microbatch(f"{name}.microbatch", message.microbatch),
        try_number=message.try_number,
        tokens=fields.count(f"{name}.tokens", message.tokens),
        samples=fields.count(f"{name}.samples", message.samples),
    )


def _to_drop(value: DropRequest) -> pb.DropRequest:
    return pb.DropRequest(key=convert.to_key(value.key), attempt=value.attempt)


def _from_drop(message: pb.DropRequest) -> DropRequest:
    return DropRequest(key=convert.from_key(message.key), attempt=message.attempt)


def _to_reduce(value: ReduceRequest) -> pb.ReduceRequest:
    members = [
        pb.GroupMember(contact=convert.to_contact(m.contact), microbatches=m.microbatches, tokens=m.tokens)
        for m in value.members
    ]
    return pb.ReduceRequest(
        key=convert.to_key(value.key),
        attempt=value.attempt,
        members=members,
        total_tokens=value.total_tokens,
        deadline_seconds=value.deadline_seconds,
    )


def _from_reduce(message: pb.ReduceRequest) -> ReduceRequest:
    return ReduceRequest(
        key=convert.from_key(message.key),
        attempt=message.attempt,
        members=fields.many("members", message.members, fields.MAX_MEMBERS, _from_member),
        total_tokens=fields.count("total_tokens", message.total_tokens),
        deadline_seconds=fields.deadline("deadline_seconds", message.deadline_seconds),
    )


def _from_member(name: str, message: pb.GroupMember) -> GroupMember:
    return GroupMember(
        contact=convert.from_contact(f"{name}.contact", message.contact),
        microbatches=fields.many(
            f"{name}.microbatches", message.microbatches, fields.MAX_MICROBATCHES, fields.microbatch
        ),
        tokens=fields.count(f"{name}.tokens", message.tokens),
    )


def _to_reduced(value: ReduceReply) -> pb.ReduceReply:
    return pb.ReduceReply(
        reduced=None if value.reduced is None else convert.to_mark(value.reduced),
        samples=value.samples,
        unreachable=value.unreachable,
        reason=value.reason[: fields.MAX_REASON],
    )


def _from_reduced(message: pb.ReduceReply) -> ReduceReply:
    return ReduceReply(
        reduced=convert.from_mark(message.reduced) if message.HasField("reduced") else None,
        samples=fields.count("samples", message.samples),
        unreachable=fields.many("unreachable", message.unreachable, fields.MAX_MEMBERS, fields.peer),
        reason=fields.text("reason", message.reason),
    )


def _to_adopt(value: AdoptRequest) -> pb.AdoptRequest:
    return pb.AdoptRequest(
        key=convert.to_key(value.key),
        attempt=value.attempt,
        digest=value.digest,
        donors=[convert.to_contact(donor) for donor in value.donors],
    )


def _from_adopt(message: pb.AdoptRequest) -> AdoptRequest:
    return AdoptRequest(
        key=convert.from_key(message.key),
        attempt=message.attempt,
        digest=fields.digest("digest", message.digest),
        donors=fields.many("donors", message.donors, fields.MAX_MEMBERS, convert.from_contact),
    )


def _to_apply(value: ApplyRequest) -> pb.ApplyRequest:
    return pb.ApplyRequest(
        key=convert.to_key(value.key),
        commit=convert.to_commit(value.commit),
        donors=[convert.to_contact(donor) for donor in value.donors],
        digest=value.digest,
    )


def _from_apply(message: pb.ApplyRequest) -> ApplyRequest:
    return ApplyRequest(
        key=convert.from_key(message.key),
        commit=convert.from_commit("commit", message.commit),
        donors=fields.many("donors", message.donors, fields.MAX_MEMBERS, convert.from_contact),
        digest=message.digest,
    )


def _to_state_mark(value: StateMark) -> pb.StateMark:
    return pb.StateMark(
        lineage=convert.to_lineage(value.lineage),
        squared_norm=value.squared_norm,
        digest=value.digest,
        numeric_class=value.numeric_class,
    )


def _from_state_mark(message: pb.StateMark) -> StateMark:
    return StateMark(
        lineage=convert.from_lineage(message.lineage),
        squared_norm=fields.amount("squared_norm", message.squared_norm),
        digest=fields.digest("digest", message.digest) if message.HasField("digest") else None,
        numeric_class=fields.numeric_class("numeric_class", message.numeric_class),
    )


def _from_state_request(message: pb.StateRequest) -> StateRequest:
    return StateRequest(run=fields.run("run", message.run), stage=fields.count("stage", message.stage, MAX_STAGES))


def _to_gradient(value: GradientRequest) -> pb.GradientRequest:
    return pb.GradientRequest(
        run=value.run, stage=value.stage, parent=convert.to_lineage(value.parent), digest=value.digest
    )


def _from_gradient(message: pb.GradientRequest) -> GradientRequest:
    return GradientRequest(
        run=fields.run("run", message.run),
        stage=fields.count("stage", message.stage, MAX_STAGES),
        parent=convert.from_lineage(message.parent),
        digest=fields.digest("digest", message.digest),
    )


VOID = codec(pb.VoidRequest, _to_void, _from_void)
VOID_REPLY = codec(pb.VoidReply, lambda v: pb.VoidReply(held=v.held), lambda m: VoidReply(held=m.held))
GREETING = codec(pb.Greeting, _to_greeting, _from_greeting)
REPORT = codec(pb.PeerReport, _to_report, _from_report)
FREEZE = codec(pb.FreezeRequest, _to_freeze, _from_freeze)
FREEZE_REPLY = codec(pb.FreezeReply, _to_frozen, _from_frozen, fields.MAX_MICROBATCHES)
DROP = codec(pb.DropRequest, _to_drop, _from_drop)
DROP_REPLY: Codec[None] = codec(pb.DropReply, lambda _: pb.DropReply(), lambda _: None)
REDUCE = codec(pb.ReduceRequest, _to_reduce, _from_reduce)
REDUCE_REPLY = codec(pb.ReduceReply, _to_reduced, _from_reduced)
ADOPT = codec(pb.AdoptRequest, _to_adopt, _from_adopt)
MARK: Codec[ReducedMark] = codec(pb.ReducedMark, convert.to_mark, convert.from_mark)
APPLY = codec(pb.ApplyRequest, _to_apply, _from_apply)
STATE_MARK = codec(pb.StateMark, _to_state_mark, _from_state_mark)
STATE = codec(pb.StateRequest, lambda v: pb.StateRequest(run=v.run, stage=v.stage), _from_state_request)
GRADIENT = codec(pb.GradientRequest, _to_gradient, _from_gradient)
