"""The wire: frames agree with protobuf, values survive, and what is out of range does not get in."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import (
    BadReply,
    BadRequest,
    Busy,
    Failure,
    NotFinite,
    PeerFailed,
    ReduceFailed,
    Refused,
    Retryable,
    Superseded,
)
from swarm.ids import MicrobatchId, PeerId
from swarm.messages import (
    AdoptRequest,
    ApplyRequest,
    BackwardRequest,
    Contact,
    DropRequest,
    FreezeReply,
    FreezeRequest,
    GradientRequest,
    Greeting,
    GroupMember,
    HeldMicrobatch,
    ReduceReply,
    ReduceRequest,
    StateHead,
    StateMark,
    StateRequest,
    VoidReply,
    VoidRequest,
)
from swarm.records import NO_TERM, CommitRecord
from swarm.tensors import ITEM_BYTES, TensorSpec
from swarm.wire import control, convert, failures, frames, generate, heads
from swarm.wire.control import Codec
from swarm.wire.v1 import stage_pb2 as pb
from tests import stage_double as double

pytestmark = pytest.mark.fast

CONTACT = Contact(peer=double.PEER, session=double.SESSION, endpoint="[::1]:4000")
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

specs = st.builds(
    TensorSpec,
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
    shape=st.lists(st.integers(0, 100), max_size=4).map(tuple),
)


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


def test_backward_names_its_tensors() -> None:
    seed, inputs = double.tensor(b"12345678", "int64", (1,)), double.tensor(b"ab", "bfloat16", (1, 1))
    for request in (
        BackwardRequest(call=double.call(), inputs=None, seed=seed, tokens=3),
        BackwardRequest(call=double.call(), inputs=inputs, seed=seed, tokens=3, accumulate=False),
    ):
        frame = frames.decode(frames.encode(heads.to_backward(request), b""))
        opening = heads.from_backward(frame, 100)
        tensors = (seed,) if request.inputs is None else (inputs, seed)
        assert list(opening.specs) == ["inputs", "seed"][-len(tensors) :]
        assert opening.request(tensors) == request


@given(specs)
def test_specs_survive(spec: TensorSpec) -> None:
    assert convert.from_spec(convert.to_spec(spec), spec.nbytes) == spec
    if spec.nbytes:
        with pytest.raises(BadRequest, match="more than"):
            convert.from_spec(convert.to_spec(spec), spec.nbytes - 1)


def _call(**changes: Any) -> Callable[[], object]:
    message = convert.to_call(double.call())
    for name, value in changes.items():
        setattr(message, name, value)
    return lambda: convert.from_call(message)


def _key(**changes: Any) -> Callable[[], object]:
    message = convert.to_key(double.KEY)
    for name, value in changes.items():
        setattr(message, name, value)
    return lambda: convert.from_key(message)


def _contact(**changes: str) -> Callable[[], object]:
    return lambda: convert.from_contact("donor", convert.to_contact(replace(CONTACT, **changes)))  # type: ignore[arg-type]


def _commit(**changes: Any) -> Callable[[], object]:
    return lambda: convert.from_commit("commit", replace(double.COMMIT, **changes).to_json())


def _text(text: str) -> Callable[[], object]:
    return lambda: convert.from_commit("commit", text)


def _decoded(codec: Codec[Any], message: Any) -> Callable[[], object]:
    return lambda: codec.decode(message.SerializeToString())


COMMIT_TEXT = double.COMMIT.to_json()

OUT_OF_RANGE: dict[str, Callable[[], object]] = {
    "deadline nan": _call(deadline_seconds=float("nan")),
    "deadline negative": _call(deadline_seconds=-1.0),
    "deadline zero": _call(deadline_seconds=0.0),
    "deadline infinite": _call(deadline_seconds=float("inf")),
    "microbatch": _call(microbatch=1 << 31),
    "run is no hash": _key(run="zz" * 32),
    "run is short": _key(run="ab"),
    "run in capitals": _key(run="AB" * 32),
    "run with a newline": _key(run="ab" * 32 + "\n"),
    "stage": _key(stage=1 << 20),
    "empty key": lambda: convert.from_key(pb.StepKey()),
    "term without trainer": lambda: convert.from_term(pb.Term(number=1)),
    "term number": lambda: convert.from_term(pb.Term(number=1 << 60, trainer="a")),
    "trainer with blanks": lambda: convert.from_term(pb.Term(number=1, trainer="a b")),
    "lineage length": lambda: convert.from_lineage(pb.Lineage(length=1 << 63, chain=double.DIGEST)),
    "session": _contact(session="0123"),
    "endpoint is a socket": _contact(endpoint="unix:/80"),
    "endpoint is a path": _contact(endpoint="unix:///run/x.sock"),
    "endpoint without port": _contact(endpoint="localhost"),
    "endpoint port": _contact(endpoint="localhost:65536"),
    "endpoint port 0": _contact(endpoint="localhost:0"),
    "endpoint with a second address": _contact(endpoint="a:1,b:2"),
    "peer too long": _contact(peer="x" * 129),
    "dtype unset": lambda: convert.from_spec(pb.TensorSpec(shape=[1]), 100),
    "dtype unknown": lambda: convert.from_spec(pb.TensorSpec.FromString(b"\x08\x63"), 100),
    "shape negative": lambda: convert.from_spec(pb.TensorSpec(dtype=pb.DTYPE_INT8, shape=[-1]), 100),
    "shape negative twice": lambda: convert.from_spec(pb.TensorSpec(dtype=pb.DTYPE_INT8, shape=[-2, -2]), 100),
    "shape huge": lambda: convert.from_spec(pb.TensorSpec(dtype=pb.DTYPE_INT8, shape=[1 << 62, 0]), 100),
    "shape product": lambda: convert.from_spec(pb.TensorSpec(dtype=pb.DTYPE_INT8, shape=[1 << 33] * 4), 1 << 40),
    "dimensions": lambda: convert.from_spec(pb.TensorSpec(dtype=pb.DTYPE_INT8, shape=[1] * 5), 100),
    "commit norm": _commit(stages=(replace(double.STAGE_COMMIT, squared_norm=float("inf")),)),
    "commit samples": _commit(stages=(replace(double.STAGE_COMMIT, samples=-1),)),
    "commit loss": _commit(losses=(float("nan"),)),
    "commit clip": _commit(clip_factor=-0.5),
    "commit step": _commit(step=-1),
    "commit tokens": _commit(tokens=(-1,)),
    "commit parent": _commit(parent="nothing"),
    "commit members": _commit(stages=(replace(double.STAGE_COMMIT, members=(PeerId("a"),) * 4097),)),
    "commit trainer": _text(COMMIT_TEXT.replace(double.TERM.trainer, "\\ud800")),
    "commit with blanks": _text(COMMIT_TEXT.replace(":", ": ", 1)),
    "commit with another field": _text(COMMIT_TEXT[:-1] + ',"z":1}'),
    "commit with a number as text": _text(COMMIT_TEXT.replace('"step":0', '"step":"0"')),
    "commit infinite step": _text(COMMIT_TEXT.replace('"step":0', '"step":Infinity')),
    "commit nested": _text("[" * 100_000),
    "commit no object": _text("7"),
    "commit empty": _text(""),
    "commit missing field": _text(json.dumps({"step": 1})),
    "state unknown": _decoded(control.REPORT, pb.PeerReport(peer="a", session=double.SESSION)),
    "held too long": _decoded(
        control.FREEZE_REPLY, pb.FreezeReply(session=double.SESSION, held=[pb.HeldMicrobatch()] * 65537)
    ),
    "members too long": _decoded(
        control.REDUCE,
        pb.ReduceRequest(key=convert.to_key(double.KEY), members=[pb.GroupMember()] * 4097, deadline_seconds=1),
    ),
    "reason too long": _decoded(control.REDUCE_REPLY, pb.ReduceReply(reason="x" * 5000)),
    "mark norm": _decoded(control.MARK, pb.ReducedMark(digest=double.DIGEST, squared_norm=-1.0)),
    "not protobuf": lambda: control.GREETING.decode(b"\xff\xff\xff"),
    "not utf-8": lambda: control.GREETING.decode(b"\x0a\x02\xff\xfe"),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_out_of_range_is_refused(name: str) -> None:
    with pytest.raises(BadRequest):
        OUT_OF_RANGE[name]()


def test_the_base_of_the_table_above_is_in_range() -> None:
    """Else the rows above would pass for another reason than theirs."""
    assert _call()() == double.call()
    assert _key()() == double.KEY
    assert _contact()() == CONTACT
    assert _commit()() == double.COMMIT
    assert _text(COMMIT_TEXT)() == double.COMMIT


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=20),
    st.lists(st.integers(0, 2**53 - 1), max_size=20),
)
def test_a_commit_keeps_its_lineage(losses: list[float], tokens: list[int]) -> None:
    commit = replace(double.COMMIT, losses=tuple(losses), tokens=tuple(tokens))
    received = convert.from_commit("commit", convert.to_commit(commit))
    assert isinstance(received, CommitRecord)
    assert double.LINEAGE.after(received) == double.LINEAGE.after(commit)


def test_state_heads_survive() -> None:
    head = StateHead(
        lineage=double.LINEAGE, commits=(double.COMMIT,), digest=double.DIGEST, total_bytes=1 << 40, layout="[]"
    )
    message = frames.encode(heads.to_state(head), b"")
    assert heads.from_state(frames.decode(message)) == head
    with pytest.raises(BadRequest, match="data in the first frame"):
        heads.from_state(frames.decode(frames.encode(heads.to_state(head), b"x")))


ERRORS: list[Failure] = [
    Busy(1.25),
    NotFinite("gradient"),
    ReduceFailed("part 3 lacks weight", ("a", "b")),
    Superseded("term 3 is over", 7),
    *(kind("why") for kind in failures._CODES if kind not in (Busy, NotFinite, ReduceFailed, Superseded)),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_survive(error: Failure) -> None:
    received = failures.decode(failures.encode(error))
    assert type(received) is type(error)
    assert str(received) == str(error)
    assert vars(received) == vars(error)
    assert vars(received) == vars(error)


def test_every_error_of_the_tree_has_a_code() -> None:
    tree = {kind for base in (Retryable, Refused) for kind in base.__subclasses__()}
    assert tree | {Superseded} == set(failures._CODES)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",
        b"",
        pb.Failure(code=pb.FAILURE_CODE_BUSY, retry_after_seconds=float("nan")).SerializeToString(),
        pb.Failure(code=pb.FAILURE_CODE_BUSY, retry_after_seconds=-1).SerializeToString(),
        pb.Failure(code=pb.FAILURE_CODE_NOT_FINITE, where="elsewhere").SerializeToString(),
        b"\x08\x63",
    ],
)
def test_a_malformed_failure_is_a_bad_reply(data: bytes) -> None:
    assert type(failures.decode(data)) is BadReply


def test_messages_of_failures_are_cut() -> None:
    assert len(failures.encode(PeerFailed("x" * 100_000))) < 400
    busy = failures.decode(failures.encode(Busy(1e9)))
    assert isinstance(busy, Busy)
    assert busy.retry_after_seconds == failures.MAX_RETRY_AFTER_SECONDS


def test_generated_code_is_current() -> None:
    assert generate.drift() == []
