"""Ending: the status with which a peer really ended a call.

When a server answers before the client has sent everything ("busy" to a large tensor), grpc.aio often lets the failed
write replace the status that had already arrived by INTERNAL "Internal error from Core" (grpc/grpc#36066, seen in
1.85: half of the refusals of 4 MiB).  So the status is noted when it arrives.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc

T = TypeVar("T")

_REPLACED = "Internal error from Core"


class Ending:
    """The first status of ``call`` that is the peer's word."""

    def __init__(self, call: grpc.aio.Call) -> None:
        self._noted: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._note)

    def of(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """What ``error``, raised by the call, stands for; UNAVAILABLE if a write failed and nothing else is known."""
        if error.code() is not grpc.StatusCode.INTERNAL or error.details() != _REPLACED:
            return error
        if self._noted is not None:
            return self._noted
        return grpc.aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE, error.initial_metadata(), error.trailing_metadata(), "the stream broke"
        )

    def _note(self, call: grpc.aio.Call) -> None:
        code = _at_once(call.code())
        details = _at_once(call.details())
        trailing = _at_once(call.trailing_metadata())
        if code is None or (code is grpc.StatusCode.INTERNAL and details == _REPLACED):
            return
        self._noted = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing or grpc.aio.Metadata(), details)


def _at_once(coroutine: Coroutine[Any, Any, T]) -> T | None:
    """The result of a coroutine that has nothing to wait for, as those of a call that is done; else None."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    return None
