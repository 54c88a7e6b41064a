"""Client: calls to peers over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc

from swarm.errors import BadReply, BadRequest, NotFinite, TimedOut, Unreachable
from swarm.messages import (
    AdoptRequest,
    ApplyRequest,
    BackwardReply,
    BackwardRequest,
    Contact,
    DropRequest,
    ForwardRequest,
    FreezeReply,
    FreezeRequest,
    GradientRequest,
    Greeting,
    PeerReport,
    ReducedMark,
    ReduceReply,
    ReduceRequest,
    StateHead,
    StateMark,
    StateRequest,
    VoidReply,
    VoidRequest,
)
from swarm.rpc import payload, status
from swarm.rpc.channels import Channels
from swarm.rpc.ending import Ending
from swarm.rpc.finite import all_finite
from swarm.rpc.options import CHANNEL_OPTIONS, Options, call_metadata, path
from swarm.tensors import Buffer, TensorData, TensorSpec
from swarm.wire import control, frames, heads
from swarm.wire.control import Codec

Q = TypeVar("Q")
A = TypeVar("A")

Tensors = tuple[TensorData, ...]
Opening = tuple[tuple[TensorSpec, ...], Callable[[Tensors], A]]
StreamCall = grpc.aio.UnaryStreamCall[bytes, bytes] | grpc.aio.StreamStreamCall[bytes, bytes]


class GrpcStageCalls:
    """:class:`swarm.ports.StageCalls` over gRPC.  Replies larger than ``max_tensor_bytes`` are not believed.

    With ``check_finite`` an output or gradient that is not finite raises NotFinite, as if its sender had seen it.
    """

    def __init__(
        self, *, max_tensor_bytes: int = 1 << 30, check_finite: bool = False, options: Options = CHANNEL_OPTIONS
    ) -> None:
        self._channels = Channels(options)
        self._max_tensor_bytes = max_tensor_bytes
        self._check_finite = check_finite

    async def close(self) -> None:
        """Close all connections; calls in flight raise Unreachable."""
        await self._channels.close()

    async def forward(self, to: Contact, request: ForwardRequest) -> TensorData:
        """Run the stage forward."""

        def opening(first: frames.Frame) -> Opening[TensorData]:
            return heads.from_output(first, self._max_tensor_bytes), lambda tensors: tensors[0]

        messages = payload.outgoing(heads.to_forward(request), (request.inputs,))
        output = await self._exchange("Forward", to, request.call.deadline_seconds, messages, opening)
        if self._check_finite and not all_finite(output):
            raise NotFinite("output")
        return output

    async def backward(self, to: Contact, request: BackwardRequest) -> BackwardReply:
        """Run the stage backward."""

        def opening(first: frames.Frame) -> Opening[BackwardReply]:
            return heads.from_backward_reply(first, self._max_tensor_bytes)

        tensors = (request.seed,) if request.inputs is None else (request.inputs, request.seed)
        messages = payload.outgoing(heads.to_backward(request), tensors)
        reply = await self._exchange("Backward", to, request.call.deadline_seconds, messages, opening)
        if self._check_finite and reply.input_gradient is not None and not all_finite(reply.input_gradient):
            raise NotFinite("gradient")
        return reply

    async def void(self, to: Contact, request: VoidRequest, timeout_seconds: float) -> VoidReply:
        """Tell a peer that lower tries must not be added."""
        return await self._ask("Void", to, control.VOID, request, control.VOID_REPLY, timeout_seconds)

    async def greet(self, to: Contact, request: Greeting, timeout_seconds: float) -> PeerReport:
        """Raise the term at a peer and read what it holds."""
        return await self._ask("Greet", to, control.GREETING, request, control.REPORT, timeout_seconds)

    async def freeze(self, to: Contact, request: FreezeRequest, timeout_seconds: float) -> FreezeReply:
        """Close the step at a peer."""
        return await self._ask("Freeze", to, control.FREEZE, request, control.FREEZE_REPLY, timeout_seconds)

    async def drop(self, to: Contact, request: DropRequest, timeout_seconds: float) -> None:
        """Make a peer throw its gradient of the step away."""
        await self._ask("Drop", to, control.DROP, request, control.DROP_REPLY, timeout_seconds)

    async def reduce(self, to: Contact, request: ReduceRequest, timeout_seconds: float) -> ReduceReply:
        """Have a peer take part in an all-reduce."""
        return await self._ask("Reduce", to, control.REDUCE, request, control.REDUCE_REPLY, timeout_seconds)

    async def adopt(self, to: Contact, request: AdoptRequest, timeout_seconds: float) -> ReducedMark:
        """Have a peer fetch a complete reduced gradient from another."""
        return await self._ask("Adopt", to, control.ADOPT, request, control.MARK, timeout_seconds)

    async def apply(self, to: Contact, request: ApplyRequest, timeout_seconds: float) -> StateMark:
        """Have a peer apply a commit."""
        return await self._ask("Apply", to, control.APPLY, request, control.STATE_MARK, timeout_seconds)

    async def fetch_state(self, to: Contact, request: StateRequest, timeout_seconds: float) -> tuple[StateHead, Chunks]:
        """Ask a donor for its state.  The iterator ends only after exactly ``total_bytes``."""
        call = await self._stream("FetchState", to, control.STATE.encode(request))
        with _errors(to, call, keep=True):
            message = await _read(call, timeout_seconds)
            if message is None:
                raise BadRequest("no state")
            head = heads.from_state(frames.decode(message))
        return head, Chunks(to, call, timeout_seconds, total_bytes=head.total_bytes)

    async def fetch_gradient(self, to: Contact, request: GradientRequest, timeout_seconds: float) -> Chunks:
        """Ask a donor for a reduced gradient.  Refusals are raised here, not by the iterator."""
        call = await self._stream("FetchGradient", to, control.GRADIENT.encode(request))
        chunks = Chunks(to, call, timeout_seconds, total_bytes=None)
        await chunks.peek()
        return chunks

    async def _ask(
        self, method: str, to: Contact, request: Codec[Q], value: Q, reply: Codec[A], timeout_seconds: float
    ) -> A:
        channel = await self._channels.get(to.endpoint)
        method_call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path(method))
        call = method_call(request.encode(value), timeout=timeout_seconds, metadata=call_metadata(to))
        self._channels.watch(to.endpoint, call)
        with _errors(to, call):
            return reply.decode(await call)

    async def _exchange(
        self,
        method: str,
        to: Contact,
        timeout_seconds: float,
        messages: Iterator[bytes],
        opening: Callable[[frames.Frame], Opening[A]],
    ) -> A:
        channel = await self._channels.get(to.endpoint)
        method_call: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path(method))
        call = method_call(messages, timeout=timeout_seconds, metadata=call_metadata(to))
        ending = Ending(call)
        self._channels.watch(to.endpoint, call)
        with _errors(to, call, ending):
            message = await _read(call, None)
            if message is None:
                raise BadRequest("no reply")
            first = frames.decode(message)
            specs, build = opening(first)
            return build(await payload.collect(first, specs, lambda: _read(call, None)))

    async def _stream(self, method: str, to: Contact, request: bytes) -> grpc.aio.UnaryStreamCall[bytes, bytes]:
        channel = await self._channels.get(to.endpoint)
        method_call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(path(method))
        call = method_call(request, metadata=call_metadata(to))
        self._channels.watch(to.endpoint, call)
        return call


class Chunks(AsyncIterator[Buffer]):
    """Data of a stream, chunk by chunk.  Ends its call on errors, at the end, or on aclose()."""

    def __init__(self, to: Contact, call: StreamCall, timeout_seconds: float, *, total_bytes: int | None) -> None:
        self._to = to
        self._call = call
        self._timeout_seconds = timeout_seconds
        self._total_bytes = total_bytes
        self._received_bytes = 0
        self._peeked: Buffer | None = None

    async def peek(self) -> None:
        """Wait for the first chunk and keep it.  Raises what the first step of the iteration would."""
        try:
            self._peeked = await anext(self)
        except StopAsyncIteration:
            return

    async def __anext__(self) -> Buffer:
        if self._peeked is not None:
            chunk, self._peeked = self._peeked, None
            return chunk
        with _errors(self._to, self._call, keep=True):
            message = await _read(self._call, self._timeout_seconds)
            if message is not None:
                chunk = payload.data_of(message)
                self._received_bytes += len(chunk)
            if self._total_bytes is not None and (
                self._received_bytes > self._total_bytes
                or (message is None and self._received_bytes != self._total_bytes)
            ):
                raise BadRequest(f"{self._received_bytes} bytes of the declared {self._total_bytes}")
        if message is None:
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        """End the call."""
        self._call.cancel()


async def _read(call: StreamCall, timeout_seconds: float | None) -> bytes | None:
    async with asyncio.timeout(timeout_seconds):
        message = await call.read()
    return message if isinstance(message, bytes) else None


@contextmanager
def _errors(to: Contact, call: grpc.aio.Call, ending: Ending | None = None, *, keep: bool = False) -> Iterator[None]:
    """Turn what a call raises into errors of the tree.  Leaves no call behind, unless ``keep`` and all went well."""
    done = False
    try:
        yield
        done = True
    except grpc.aio.AioRpcError as error:
        raise status.error_of(error if ending is None else ending.of(error), to.endpoint) from None
    except BadRequest as error:
        # Raised by our own reading: what a peer refuses comes as an AioRpcError.
        raise BadReply(f"{to.endpoint}: {error}") from None
    except TimeoutError:
        raise TimedOut(f"{to.endpoint}: no data in time") from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # The call was ended by close(), nobody cancelled us.
        raise Unreachable(f"{to.endpoint}: the client is closed") from None
    finally:
        if not (keep and done):
            call.cancel()
