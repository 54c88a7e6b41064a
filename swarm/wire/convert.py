"""Conversion of what messages are made of.  ``to_*`` writes protobuf; ``from_*`` reads it and raises BadRequest."""

from __future__ import annotations

import math

from swarm.errors import BadRequest
from swarm.ids import PeerId
from swarm.messages import Contact, MicrobatchCall, ReducedMark, StepKey
from swarm.records import CommitRecord, Lineage, StageCommit, Term
from swarm.tensors import ITEM_BYTES, TensorSpec
from swarm.wire import fields
from swarm.wire.v1 import stage_pb2 as pb

MAX_DIMENSIONS = 4
MAX_EXTENT = 1 << 40
"""Greatest extent of one dimension; the product is bounded by bytes."""

_DTYPE_OF = {
    "float64": pb.DTYPE_FLOAT64,
    "float32": pb.DTYPE_FLOAT32,
    "float16": pb.DTYPE_FLOAT16,
    "bfloat16": pb.DTYPE_BFLOAT16,
    "int64": pb.DTYPE_INT64,
    "int32": pb.DTYPE_INT32,
    "int16": pb.DTYPE_INT16,
    "int8": pb.DTYPE_INT8,
    "uint8": pb.DTYPE_UINT8,
    "bool": pb.DTYPE_BOOL,
}
_NAME_OF = {int(value): name for name, value in _DTYPE_OF.items()}


def to_spec(spec: TensorSpec) -> pb.TensorSpec:
    """Declare a tensor."""
    return pb.TensorSpec(dtype=_DTYPE_OF[spec.dtype], shape=spec.shape)


def from_spec(message: pb.TensorSpec, most_bytes: int) -> TensorSpec:
    """A declared tensor of at most ``most_bytes``."""
    dtype = fields.choice("dtype", message.dtype, _NAME_OF)
    if len(message.shape) > MAX_DIMENSIONS:
        raise BadRequest(f"shape: {len(message.shape)} dimensions, more than {MAX_DIMENSIONS}")
    shape = fields.many("shape", message.shape, MAX_DIMENSIONS, lambda name, n: fields.count(name, n, MAX_EXTENT))
    nbytes = ITEM_BYTES[dtype] * math.prod(shape)
    if nbytes > most_bytes:
        raise BadRequest(f"shape: {list(shape)} of {dtype} takes {nbytes} bytes, more than {most_bytes}")
    return TensorSpec(dtype=dtype, shape=shape)


def to_term(term: Term) -> pb.Term:
    """Write a term."""
    return pb.Term(number=term.number, trainer=term.trainer)


def from_term(message: pb.Term) -> Term:
    """Read a term.  The trainer is empty in term 0 only."""
    return checked_term(Term(message.number, PeerId(message.trainer)))


def checked_term(term: Term) -> Term:
    """The same value.  Raises BadRequest if anything in it is out of range."""
    fields.count("term.number", term.number)
    if term.number or term.trainer:
        fields.peer("term.trainer", term.trainer)
    return term


def to_lineage(lineage: Lineage) -> pb.Lineage:
    """Write a lineage."""
    return pb.Lineage(generation=lineage.generation, length=lineage.length, chain=lineage.chain)


def from_lineage(message: pb.Lineage) -> Lineage:
    """Read a lineage."""
    return Lineage(
        generation=fields.count("lineage.generation", message.generation),
        length=fields.count("lineage.length", message.length),
        chain=fields.digest("lineage.chain", message.chain),
    )


def to_key(key: StepKey) -> pb.StepKey:
    """Write a step key."""
    return pb.StepKey(run=key.run, stage=key.stage, term=to_term(key.term), lineage=to_lineage(key.lineage))


def from_key(message: pb.StepKey) -> StepKey:
    """Read a step key."""
    return StepKey(
        run=fields.run("key.run", message.run),
        stage=fields.count("key.stage", message.stage, 1 << 16),
        term=from_term(message.term),
        lineage=from_lineage(message.lineage),
    )


def to_call(call: MicrobatchCall) -> pb.MicrobatchCall:
    """Write the head of a forward or backward."""
    return pb.MicrobatchCall(
        key=to_key(call.key),
        microbatch=call.microbatch,
        try_number=call.try_number,
        attempt=call.attempt,
        deadline_seconds=call.deadline_seconds,
    )


def from_call(message: pb.MicrobatchCall) -> MicrobatchCall:
    """Read the head of a forward or backward."""
    return MicrobatchCall(
        key=from_key(message.key),
        microbatch=fields.microbatch("microbatch", message.microbatch),
        try_number=message.try_number,
        attempt=message.attempt,
        deadline_seconds=fields.deadline("deadline_seconds", message.deadline_seconds),
    )


def to_contact(contact: Contact) -> pb.Contact:
    """Write a contact."""
    return pb.Contact(peer=contact.peer, session=contact.session, endpoint=contact.endpoint)


def from_contact(name: str, message: pb.Contact) -> Contact:
    """Read a contact."""
    return Contact(
        peer=fields.peer(f"{name}.peer", message.peer),
        session=fields.session(f"{name}.session", message.session),
        endpoint=fields.endpoint(f"{name}.endpoint", message.endpoint),
    )


def to_mark(mark: ReducedMark) -> pb.ReducedMark:
    """Write a mark of a reduced gradient."""
    return pb.ReducedMark(attempt=mark.attempt, digest=mark.digest, squared_norm=mark.squared_norm)


def from_mark(message: pb.ReducedMark) -> ReducedMark:
    """Read a mark of a reduced gradient."""
    return ReducedMark(
        attempt=message.attempt,
        digest=fields.digest("reduced.digest", message.digest),
        squared_norm=fields.amount("reduced.squared_norm", message.squared_norm),
    )


def checked_stage_commit(commit: StageCommit) -> StageCommit:
    """The same value.  Raises BadRequest if anything in it is out of range."""
    fields.many("stage_commit.members", commit.members, fields.MAX_MEMBERS, fields.peer)
    fields.count("stage_commit.attempt", commit.attempt, 1 << 32)
    fields.digest("stage_commit.digest", commit.digest)
    fields.amount("stage_commit.squared_norm", commit.squared_norm)
    fields.count("stage_commit.samples", commit.samples)
    return commit


def to_commit(commit: CommitRecord) -> str:
    """Write a commit: its canonical JSON, because the lineage is hashed over exactly that."""
    return commit.to_json()


def from_commit(name: str, text: str) -> CommitRecord:
    """Read a commit.  Raises BadRequest if it is malformed, out of range or not in canonical form."""
    try:
        commit = CommitRecord.from_json(text)
        canonical = commit.to_json() == text
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise BadRequest(f"{name}: malformed commit ({type(error).__name__})") from None
    if not canonical:
        raise BadRequest(f"{name}: commit is not in canonical form")
    fields.count("commit.step", commit.step)
    checked_term(commit.term)
    fields.digest("commit.parent", commit.parent)
    fields.many("commit.stages", commit.stages, fields.MAX_MEMBERS, lambda _, part: checked_stage_commit(part))
    fields.many("commit.microbatches", commit.microbatches, fields.MAX_MICROBATCHES, fields.microbatch)
    fields.many("commit.excluded", commit.excluded, fields.MAX_MICROBATCHES, fields.microbatch)
    fields.many("commit.tokens", commit.tokens, fields.MAX_MICROBATCHES, fields.count)
    fields.many("commit.losses", commit.losses, fields.MAX_MICROBATCHES, fields.number)
    fields.amount("commit.clip_factor", commit.clip_factor)
    return commit
