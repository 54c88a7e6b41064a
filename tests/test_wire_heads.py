"""Heads, states, commits and failures on the wire."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
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
from swarm.ids import PeerId
from swarm.messages import (
    BackwardRequest,
    StateHead,
)
from swarm.records import CommitRecord
from swarm.tensors import TensorSpec
from swarm.wire import control, convert, failures, frames, generate, heads
from swarm.wire.control import Codec
from swarm.wire.v1 import stage_pb2 as pb
from tests import stage_double as double
from tests.wire_case import CONTACT, specs

pytestmark = pytest.mark.fast


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
