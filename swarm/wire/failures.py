"""Failures: errors of the tree in swarm.errors as bytes in a call's trailing metadata, and back."""

from __future__ import annotations

import math
from collections.abc import Callable

from google.protobuf.message import DecodeError

from swarm.errors import (
    BadReply,
    BadRequest,
    Busy,
    Draining,
    Failure,
    Frozen,
    NeedsInput,
    NotFinite,
    PeerFailed,
    ReduceFailed,
    Stale,
    Superseded,
    TimedOut,
    Unreachable,
    Voided,
    WrongRun,
)
from swarm.wire.v1 import stage_pb2 as pb

MAX_MESSAGE = 300
"""Characters of a message that travel: all metadata of a call should stay within 8 KB."""
MAX_UNREACHABLE = 64
"""Peers that a failed all-reduce names in its failure (a ReduceReply names all)."""
MAX_RETRY_AFTER_SECONDS = 3600.0

_CODES: dict[type[Failure], pb.FailureCode] = {
    Unreachable: pb.FAILURE_CODE_UNREACHABLE,
    TimedOut: pb.FAILURE_CODE_TIMED_OUT,
    PeerFailed: pb.FAILURE_CODE_PEER_FAILED,
    BadReply: pb.FAILURE_CODE_BAD_REPLY,
    NotFinite: pb.FAILURE_CODE_NOT_FINITE,
    ReduceFailed: pb.FAILURE_CODE_REDUCE_FAILED,
    Busy: pb.FAILURE_CODE_BUSY,
    Draining: pb.FAILURE_CODE_DRAINING,
    Stale: pb.FAILURE_CODE_STALE,
    WrongRun: pb.FAILURE_CODE_WRONG_RUN,
    Superseded: pb.FAILURE_CODE_STALE_TERM,
    Frozen: pb.FAILURE_CODE_FROZEN,
    Voided: pb.FAILURE_CODE_VOIDED,
    NeedsInput: pb.FAILURE_CODE_NEEDS_INPUT,
    BadRequest: pb.FAILURE_CODE_BAD_REQUEST,
}
_SPECIAL: dict[int, Callable[[pb.Failure], Failure]] = {
    int(pb.FAILURE_CODE_BUSY): lambda failure: Busy(_retry_after(failure.retry_after_seconds)),
    int(pb.FAILURE_CODE_NOT_FINITE): lambda failure: NotFinite(_where(failure.where)),
    int(pb.FAILURE_CODE_REDUCE_FAILED): lambda failure: ReduceFailed(
        failure.message[:MAX_MESSAGE], tuple(failure.unreachable[:MAX_UNREACHABLE])
    ),
    int(pb.FAILURE_CODE_STALE_TERM): lambda failure: Superseded(failure.message[:MAX_MESSAGE], failure.followed_term),
}
_CLASSES: dict[int, type[Failure]] = {int(code): kind for kind, code in _CODES.items()}


def encode(error: Failure) -> bytes:
    """Serialise ``error``; a class outside the table travels as the nearest base that is in it."""
    kind = next((base for base in type(error).__mro__ if base in _CODES), PeerFailed)
    failure = pb.Failure(code=_CODES[kind], message=str(error)[:MAX_MESSAGE])
    if isinstance(error, Busy):
        failure.retry_after_seconds = error.retry_after_seconds
    elif isinstance(error, NotFinite):
        failure.where = error.where
    elif isinstance(error, ReduceFailed):
        failure.unreachable.extend(error.unreachable[:MAX_UNREACHABLE])
    elif isinstance(error, Superseded):
        failure.followed_term = error.followed
    return failure.SerializeToString()


def decode(data: bytes) -> Failure:
    """The error that ``data`` stands for; BadReply (returned) if it stands for none."""
    try:
        failure = pb.Failure.FromString(data)
        if failure.code in _SPECIAL:
            return _SPECIAL[failure.code](failure)
    except (DecodeError, ValueError) as error:
        return BadReply(f"malformed failure: {error}")
    if failure.code not in _CLASSES:
        return BadReply(f"unknown failure code {failure.code}")
    return _CLASSES[failure.code](failure.message[:MAX_MESSAGE])


def _retry_after(seconds: float) -> float:
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"retry after {seconds} s")
    return min(seconds, MAX_RETRY_AFTER_SECONDS)


def _where(where: str) -> str:
    if where not in ("input", "output", "gradient"):
        raise ValueError(f"not finite: {where[:40]!r}")
    return where
