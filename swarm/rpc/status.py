"""Status: errors of the tree in swarm.errors <-> how a gRPC call ends."""

from __future__ import annotations

import grpc

from swarm.errors import (
    BadReply,
    BadRequest,
    Busy,
    Failure,
    NotFinite,
    PeerFailed,
    Refused,
    Retryable,
    Superseded,
    TimedOut,
    Unreachable,
    Voided,
)
from swarm.rpc.options import FAILURE_KEY
from swarm.wire import failures

_CODES: tuple[tuple[type[Failure], grpc.StatusCode], ...] = (
    (BadRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (Busy, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Voided, grpc.StatusCode.ABORTED),
    (NotFinite, grpc.StatusCode.OUT_OF_RANGE),
    (TimedOut, grpc.StatusCode.DEADLINE_EXCEEDED),
    (Superseded, grpc.StatusCode.FAILED_PRECONDITION),
    (Refused, grpc.StatusCode.FAILED_PRECONDITION),
    (PeerFailed, grpc.StatusCode.INTERNAL),
    (Retryable, grpc.StatusCode.ABORTED),
)


def code_of(error: Failure) -> grpc.StatusCode:
    """The status for clients that know nothing of Failure."""
    return next(code for kind, code in _CODES if isinstance(error, kind))


def error_of(error: grpc.aio.AioRpcError, peer: str) -> Failure:
    """What ``error``, from a call to ``peer``, means to the caller."""
    for key, value in error.trailing_metadata() or ():
        if key == FAILURE_KEY and isinstance(value, bytes):
            return failures.decode(value)
    detail = f"{peer}: {(error.details() or error.code().name)[: failures.MAX_MESSAGE]}"
    match error.code():
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            # CANCELLED without our doing: the server stopped, or reset the stream.
            return Unreachable(f"{peer}: {_lost(error.details() or error.code().name)}")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return TimedOut(detail)
        case grpc.StatusCode.UNIMPLEMENTED | grpc.StatusCode.RESOURCE_EXHAUSTED | grpc.StatusCode.OK:
            # Another service at this address, or a message over the limit.
            return BadReply(detail)
        case _:
            return PeerFailed(detail)


def _lost(detail: str) -> str:
    """Why there is no connection, the plain words first: gRPC's tell of its own inside."""
    if "failed to connect" in detail.lower():
        return f"no connection ({detail.rpartition(': ')[2][: failures.MAX_MESSAGE]})"
    return f"the connection broke ({detail[: failures.MAX_MESSAGE]})"
