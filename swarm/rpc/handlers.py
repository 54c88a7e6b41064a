"""Handlers: what the server does with each call, from its first byte to its status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from swarm import PROTOCOL_VERSION
from swarm.errors import FAILURES, BadRequest, Busy, Failure, PeerFailed, TimedOut, WrongRun
from swarm.ids import PeerId, SessionId
from swarm.messages import BackwardRequest, ForwardRequest, GradientRequest, StateRequest
from swarm.ports import StageService
from swarm.rpc import payload, status
from swarm.rpc.complaints import Complaints
from swarm.rpc.options import FAILURE_KEY, PEER_KEY, PROTOCOL_KEY, SERVICE, SESSION_KEY
from swarm.tensors import Buffer, TensorSpec
from swarm.wire import control, failures, fields, frames, heads
from swarm.wire.control import Codec

Q = TypeVar("Q")
A = TypeVar("A")
T = TypeVar("T")

Context = grpc.aio.ServicerContext[bytes, bytes]

SpecCheck = Callable[[str, Mapping[str, TensorSpec]], None]
"""(kind, specs by name): 'forward' has 'inputs', 'backward' has 'seed' and perhaps 'inputs'.  Raises BadRequest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one server takes on."""

    max_receiving: int = 16
    """Forwards and backwards whose tensors may be on their way in at one time."""
    max_tensor_bytes: int = 1 << 30
    """Greatest tensor of any stage; the check of specs is narrower."""
    silence_seconds: float = 10.0
    """Longest wait for the next frame of a caller.  It sends them back to back, so this is the time of one frame
    (1 MiB) where ``max_receiving`` calls share a link of 1.7 MB/s."""
    stall_seconds: float = 30.0
    """Longest wait until a caller has taken a frame of ours."""
    busy_retry_seconds: float = 0.25
    """What a caller over ``max_receiving`` is told: about the time of one transfer."""


class StageHandlers:
    """Reads calls, lets the service answer, writes replies.  A failure ends the call that caused it and no other."""

    def __init__(
        self, service: StageService, *, peer: PeerId, session: SessionId, check: SpecCheck, limits: Limits
    ) -> None:
        self._service = service
        self._identity = {PEER_KEY: str(peer), SESSION_KEY: str(session)}
        self._check = check
        self._limits = limits
        self._receiving = 0
        self._complaints = Complaints()

    def generic(self) -> grpc.GenericRpcHandler:
        """All methods of the service for a server.  Bytes in, bytes out: what is malformed is judged here."""
        service = self._service
        stream = grpc.stream_stream_rpc_method_handler
        fetch = grpc.unary_stream_rpc_method_handler
        table: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Forward": stream(self._heavy("Forward", self._forward)),
            "Backward": stream(self._heavy("Backward", self._backward)),
            "Void": self._unary("Void", control.VOID, service.void, control.VOID_REPLY),
            "Greet": self._unary("Greet", control.GREETING, service.greet, control.REPORT),
            "Freeze": self._unary("Freeze", control.FREEZE, service.freeze, control.FREEZE_REPLY),
            "Drop": self._unary("Drop", control.DROP, service.drop, control.DROP_REPLY),
            "Reduce": self._unary("Reduce", control.REDUCE, service.reduce, control.REDUCE_REPLY),
            "Adopt": self._unary("Adopt", control.ADOPT, service.adopt, control.MARK),
            "Apply": self._unary("Apply", control.APPLY, service.apply, control.STATE_MARK),
            "FetchState": fetch(self._fetch("FetchState", control.STATE, self._fetch_state)),
            "FetchGradient": fetch(self._fetch("FetchGradient", control.GRADIENT, self._fetch_gradient)),
        }
        return grpc.method_handlers_generic_handler(SERVICE, table)

    # --- the root of every call ---------------------------------------------------

    async def _root(self, method: str, context: Context, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run ``work`` within the caller's deadline; turn every error into the call's status."""
        try:
            self._check_caller(context)
            async with asyncio.timeout(_remaining(context)):
                return await work()
        except FAILURES as error:
            failure: Failure = error
        except TimeoutError:
            failure = TimedOut(f"{method}: deadline passed at the peer")
        except Exception as error:  # noqa: BLE001 - the root of the call's task
            self._complaints.note(method, error)
            failure = PeerFailed(f"{method}: internal error")
        await context.abort(
            status.code_of(failure),
            str(failure)[: failures.MAX_MESSAGE],
            ((FAILURE_KEY, failures.encode(failure)),),
        )

    def _check_caller(self, context: Context) -> None:
        metadata = {key: value for key, value in context.invocation_metadata() or ()}
        protocol = str(metadata.get(PROTOCOL_KEY, "none"))
        if protocol != str(PROTOCOL_VERSION):
            raise WrongRun(f"protocol version {protocol[:16]} at the caller, {PROTOCOL_VERSION} at the peer")
        for key, own in self._identity.items():
            if metadata.get(key) != own:
                raise WrongRun(f"{key}: {str(metadata.get(key))[:80]} was called, this is {own}")

    # --- unary --------------------------------------------------------------------

    def _unary(
        self, method: str, request: Codec[Q], answer: Callable[[Q], Awaitable[A]], reply: Codec[A]
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        async def handle(message: bytes, context: Context) -> bytes:
            async def work() -> bytes:
                return reply.encode(await answer(request.decode(message)))

            return await self._root(method, context, work)

        return grpc.unary_unary_rpc_method_handler(handle)

    # --- tensors ------------------------------------------------------------------

    def _heavy(
        self, method: str, work: Callable[[Context], Coroutine[Any, Any, None]]
    ) -> Callable[[object, Context], Coroutine[Any, Any, None]]:
        async def handle(_: object, context: Context) -> None:
            await self._root(method, context, lambda: work(context))

        return handle

    async def _forward(self, context: Context) -> None:
        request: ForwardRequest
        async with asyncio.timeout(None) as limit:
            first = await self._first(context)
            with self._receipt():
                opening = heads.from_forward(first, self._limits.max_tensor_bytes)
                self._admit("forward", opening, limit)
                tensors = await payload.collect(first, opening.specs.values(), self._reader(context))
                request = opening.request(tensors)
            output = await self._service.forward(request)
            await self._write(context, payload.outgoing(heads.to_output(output), (output,)))

    async def _backward(self, context: Context) -> None:
        request: BackwardRequest
        async with asyncio.timeout(None) as limit:
            first = await self._first(context)
            with self._receipt():
                opening = heads.from_backward(first, self._limits.max_tensor_bytes)
                self._admit("backward", opening, limit)
                tensors = await payload.collect(first, opening.specs.values(), self._reader(context))
                request = opening.request(tensors)
            reply = await self._service.backward(request)
            gradient = () if reply.input_gradient is None else (reply.input_gradient,)
            await self._write(context, payload.outgoing(heads.to_backward_reply(reply), gradient))

    @contextmanager
    def _receipt(self) -> Iterator[None]:
        """Hold one of the places of calls that are being received.  Raises Busy if all are taken.

        Only for a call whose first frame is here, so that silence takes no place.  There is no share per connection:
        a trainer makes all of its calls over one, and a hostile client opens as many as it likes.
        """
        if self._receiving >= self._limits.max_receiving:
            raise Busy(self._limits.busy_retry_seconds)
        self._receiving += 1
        try:
            yield
        finally:
            self._receiving -= 1

    def _admit(self, kind: str, opening: heads.Opening, limit: asyncio.Timeout) -> None:
        """Refuse before the tensor is taken; let the rest of the call end with its deadline."""
        seconds = opening.call.deadline_seconds
        limit.reschedule(asyncio.get_running_loop().time() + seconds)
        self._service.admit(kind, seconds)
        self._check(kind, opening.specs)

    async def _first(self, context: Context) -> frames.Frame:
        message = await self._reader(context)()
        if message is None:
            raise BadRequest("no frames")
        return frames.decode(message)

    def _reader(self, context: Context) -> payload.Reader:
        async def read() -> bytes | None:
            try:
                async with asyncio.timeout(self._limits.silence_seconds):
                    message: object = await context.read()
            except TimeoutError:
                raise TimedOut(f"no frame came within {self._limits.silence_seconds:g} s") from None
            return message if isinstance(message, bytes) else None

        return read

    async def _write(self, context: Context, messages: Iterator[bytes]) -> None:
        for message in messages:
            try:
                async with asyncio.timeout(self._limits.stall_seconds):
                    await context.write(message)
            except TimeoutError:
                raise TimedOut(f"a frame was not taken within {self._limits.stall_seconds:g} s") from None

    # --- state and gradients ------------------------------------------------------

    def _fetch(
        self, method: str, request: Codec[Q], work: Callable[[Q, Context], Coroutine[Any, Any, None]]
    ) -> Callable[[bytes, Context], Coroutine[Any, Any, None]]:
        async def handle(message: bytes, context: Context) -> None:
            async def decoded() -> None:
                await work(request.decode(message), context)

            await self._root(method, context, decoded)

        return handle

    async def _fetch_state(self, request: StateRequest, context: Context) -> None:
        head, data = await self._service.fetch_state(request)
        try:
            await self._write(context, iter((frames.encode(heads.to_state(head), b""),)))
            await self._pour(data, context)
        finally:
            await _close(data)

    async def _fetch_gradient(self, request: GradientRequest, context: Context) -> None:
        data = await self._service.fetch_gradient(request)
        try:
            await self._pour(data, context)
        finally:
            await _close(data)

    async def _pour(self, data: AsyncIterator[Buffer], context: Context) -> None:
        async for buffer in data:
            await self._write(context, payload.stream(buffer))


async def _close(data: AsyncIterator[Buffer]) -> None:
    """End a generator now, not when it is collected: it may hold a snapshot."""
    close = getattr(data, "aclose", None)
    if close is not None:
        await close()


def _remaining(context: Context) -> float | None:
    """Seconds that the caller still waits; None if it waits forever."""
    seconds: float | None = context.time_remaining()
    return None if seconds is None else min(seconds, fields.MAX_DEADLINE_SECONDS)
