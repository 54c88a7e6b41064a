"""The wire: frames agree with protobuf, values survive, and what is out of range does not get in."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import (
    BadRequest,
)
from swarm.ids import MicrobatchId
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
    ReduceReply,
    ReduceRequest,
    StateMark,
    StateRequest,
    VoidReply,
    VoidRequest,
)
from swarm.records import NO_TERM
from swarm.tensors import TensorSpec
from swarm.wire import control, convert, frames
from swarm.wire.control import Codec
from swarm.wire.v1 import stage_pb2 as pb
from tests import stage_double as double
from tests.wire_case import CONTACT, specs

pytestmark = pytest.mark.fast

MEMBER = GroupMember(contact=CONTACT, microbatches=(MicrobatchId(1), MicrobatchId(9)), tokens=77)


HELD = HeldMicrobatch(microbatch=MicrobatchId(5), try_number=1, tokens=128, samples=2)


VALUES: list[tuple[Codec[Any], Any]] = [
    (control.VOID, VoidRequest(key=double.KEY, microbatch=MicrobatchId(3), below_try=2)),
    (control.VOID_REPLY, VoidReply(held=True)),
    (control.GREETING, Greeting(run=double.RUN, term=double.TERM)),
    (control.GREETING, Greeting(run=double.RUN, term=NO_TERM)),
    (control.GREETING, Greeting(run=double.RUN, term=double.TERM, lineage=double.LINEAGE, distrust=True)),
    (control.REPORT, double.report()),
    (control.REPORT, replace(double.report(), reduced=None, commits=())),
    (control.FREEZE, FreezeRequest(key=double.KEY, attempt=4)),
    (control.FREEZE_REPLY, FreezeReply(session=double.SESSION, held=(HELD, HELD))),
    (control.DROP, DropRequest(key=double.KEY, attempt=4)),
    (control.DROP_REPLY, None),
    (
        control.REDUCE,
        ReduceRequest(key=double.KEY, attempt=1, members=(MEMBER, MEMBER), total_tokens=154, deadline_seconds=9.5),
    ),
    (control.REDUCE_REPLY, ReduceReply(reduced=double.MARK, samples=2, unreachable=(), reason="")),
    (control.REDUCE_REPLY, ReduceReply(reduced=None, samples=0, unreachable=(double.PEER,), reason="why")),
    (control.ADOPT, AdoptRequest(key=double.KEY, attempt=2, digest=double.DIGEST, donors=(CONTACT,))),
    (control.MARK, double.MARK),
    (control.APPLY, ApplyRequest(key=double.KEY, commit=double.COMMIT, donors=(CONTACT,))),
    (control.APPLY, ApplyRequest(key=double.KEY, commit=double.COMMIT, donors=(), digest=True)),
    (control.STATE_MARK, StateMark(lineage=double.LINEAGE, squared_norm=2.0, digest=None, numeric_class="cpu")),
    (
        control.STATE_MARK,
        StateMark(lineage=double.LINEAGE, squared_norm=0.0, digest=double.DIGEST, numeric_class="cuda"),
    ),
    (control.STATE, StateRequest(run=double.RUN, stage=7)),
    (control.GRADIENT, GradientRequest(run=double.RUN, stage=7, parent=double.LINEAGE, digest=double.DIGEST)),
]


@pytest.mark.parametrize(("codec", "value"), VALUES, ids=lambda item: type(item).__name__)
def test_values_survive(codec: Codec[Any], value: Any) -> None:
    assert codec.decode(codec.encode(value)) == value


def test_no_field_survives_only_because_it_is_at_its_default() -> None:
    """A codec that forgets a field is not seen by a value that leaves the field at its default."""
    optional = {
        (type(v), f.name, f.default) for _, v in VALUES if v is not None for f in fields(v) if f.default is not MISSING
    }
    shown = {
        (type(v), name)
        for _, v in VALUES
        for kind, name, default in optional
        if type(v) is kind and getattr(v, name) != default
    }
    assert {(kind, name) for kind, name, _ in optional} - shown == set()


@given(st.lists(specs, max_size=3), st.binary(max_size=300), st.booleans())
def test_frames_are_protobuf(tensors: list[TensorSpec], data: bytes, keep: bool) -> None:
    head = pb.ForwardHead(call=convert.to_call(double.call()), keep_graph=keep)
    meta = pb.Frame(forward=head, tensors=[convert.to_spec(spec) for spec in tensors])
    message = frames.encode(meta, data)
    whole = pb.Frame(forward=head, tensors=meta.tensors, data=data)
    assert message == whole.SerializeToString(deterministic=True)
    assert pb.Frame.FromString(message) == whole
    frame = frames.decode(whole.SerializeToString())
    assert frame.meta == meta
    assert frame.data == data


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=20),
            st.binary(max_size=200).map(lambda data: frames.encode(None, data)),
            specs.map(lambda spec: pb.Frame(tensors=[convert.to_spec(spec)]).SerializeToString()),
            # Unknown fields of each wire type, a group, data with an overlong tag and length.
            st.sampled_from([b"\x78\x05", b"\x79" + bytes(8), b"\x7a\x01x", b"\x7d" + bytes(4), b"\x7b\x7c"]),
            st.sampled_from([b"\xb2\x00\x81\x00z", b"\x32\x00", b"\x32\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"]),
        ),
        max_size=5,
    ).map(b"".join)
)
def test_any_bytes_mean_what_protobuf_takes_them_for(message: bytes) -> None:
    """Or they are refused: groups and data that comes twice always are."""
    try:
        expected = pb.Frame.FromString(message)
    except DecodeError:
        with pytest.raises(BadRequest):
            frames.decode(message)
        return
    try:
        frame = frames.decode(message)
    except BadRequest as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert refusal in ("malformed protobuf, or a group", "frame: data twice")
        return
    found = pb.Frame() if frame.meta is None else frame.meta
    assert frame.data == expected.data
    expected.ClearField("data")
    found.ClearField("data")
    assert found == expected


def test_a_frame_of_too_many_fields_is_not_parsed() -> None:
    assert len(frames.decode(b"\x2a\x00" * frames.MAX_FIELDS).meta.tensors) == frames.MAX_FIELDS  # type: ignore[union-attr]
    with pytest.raises(BadRequest, match="more than"):
        frames.decode(b"\x2a\x00" * (frames.MAX_FIELDS + 1))


@pytest.mark.parametrize("rare", [b"\x7b\x7c", b"\x32\x01x\x32\x01x", b"\x32\x00\x32\x00", b"\x7e"])
def test_nothing_rare_hides_the_fields_behind_it(rare: bytes) -> None:
    """An empty group, data twice, an unknown wire type: each once made the count of fields end early."""
    with pytest.raises(BadRequest):
        frames.decode(rare)
    with pytest.raises(BadRequest):
        frames.decode(rare + b"\x2a\x00" * (frames.MAX_FIELDS + 1))
    members = rare[:2] + b"\x1a\x00" * 100_000
    if rare[0] != 0x32:
        with pytest.raises(BadRequest, match="malformed protobuf"):
            control.REDUCE.decode(members)


def test_lists_are_as_long_as_allowed_and_no_longer() -> None:
    held = FreezeReply(session=double.SESSION, held=(HELD,) * 65536)
    assert control.FREEZE_REPLY.decode(control.FREEZE_REPLY.encode(held)) == held
    reduced = ReduceReply(reduced=None, samples=0, unreachable=(double.PEER,) * 4096, reason="")
    message = control.REDUCE_REPLY.encode(reduced)
    assert control.REDUCE_REPLY.decode(message) == reduced
    with pytest.raises(BadRequest, match="4097 entries"):
        control.REDUCE_REPLY.decode(message + b"\x1a\x01x")


def test_the_data_of_a_frame_is_not_copied() -> None:
    message = frames.encode(None, bytes(1000))
    assert frames.decode(message).data.obj is message


def test_chunks_cover_the_data_in_order() -> None:
    data = bytes(range(256)) * (frames.CHUNK_BYTES // 256) * 2 + b"tail"
    parts = list(frames.chunks(memoryview(data)))
    assert [len(part) for part in parts] == [frames.CHUNK_BYTES, frames.CHUNK_BYTES, 4]
    assert b"".join(parts) == data
    assert list(frames.chunks(b"")) == []
