"""Calls between simulated nodes: latency, loss of requests and replies, repeats, deaths.

A call runs as a task of the callee's node, so a node's death cancels what it computes and its callers see a broken
connection; a caller's time-out cancels the callee's task as gRPC does.  An error that is not the protocol's reaches
the caller as PeerFailed, as over gRPC, and is kept in :attr:`Network.failures`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from swarm.errors import PeerFailed, SwarmError, TimedOut, Unreachable, WrongRun
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
from swarm.ports import StageService
from swarm.tensors import Buffer, TensorData

T = TypeVar("T")
H = TypeVar("H")


STREAM_GAP_SECONDS = 0.01
"""Between two pieces of a state or gradient that is being sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call, as the weather sees it."""

    kind: str
    """Name of the method of :class:`swarm.ports.StageCalls`."""
    caller: str
    to: Contact
    request: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What happens to one call.  Seconds are virtual."""

    request_seconds: float = 0.005
    reply_seconds: float = 0.005
    lose_request: bool = False
    lose_reply: bool = False
    repeat: bool = False
    """The request arrives twice at once; the first answer counts."""
    late_copy_seconds: float | None = None
    """Another copy arrives this much later, whatever has become of the caller; nobody hears its answer."""
    kill_before: bool = False
    """The callee dies when the request arrives."""
    kill_after: bool = False
    """The callee dies once it has computed the answer, before the answer leaves."""
    kill_amid_stream: bool = False
    """The callee dies when half of what it streams (state, gradient) has been sent."""


class Weather(Protocol):
    """Decides the fate of each call; a test's source of faults."""

    def fate(self, call: Call) -> Fate:
        """Called once for each call, when it is made."""


class FairWeather:
    """Nothing is lost."""

    def fate(self, call: Call) -> Fate:
        return Fate()


@dataclass(slots=True)
class Node:
    """One life of a process on the network."""

    contact: Contact
    service: StageService
    kill: Callable[[], None]
    alive: bool = True
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)


class Network:
    """All nodes by endpoint, and the weather."""

    def __init__(self, weather: Weather | None = None) -> None:
        self.weather: Weather = weather or FairWeather()
        self.nodes: dict[str, Node] = {}
        self.calls: dict[str, int] = {}
        self.before_call: list[Callable[[Call], None]] = []
        """Called when a call is made, before anything of it arrives."""
        self.after_call: list[Callable[[Call, Any], None]] = []
        """Called after each answered call with its answer."""
        self.failures: list[Exception] = []
        """Errors inside of nodes that are none of the protocol's."""
        self._late: set[asyncio.Task[None]] = set()

    def join(self, contact: Contact, service: StageService, kill: Callable[[], None]) -> Node:
        """A node starts to listen."""
        node = Node(contact, service, kill)
        self.nodes[contact.endpoint] = node
        return node

    def leave(self, node: Node) -> None:
        """A node is gone, with all that it was computing."""
        node.alive = False
        for task in node.tasks:
            task.cancel()
        if self.nodes.get(node.contact.endpoint) is node:
            del self.nodes[node.contact.endpoint]

    async def call(self, call: Call, seconds: float, run: Callable[[StageService], Awaitable[T]]) -> T:
        """One call with a time-out."""
        return await self._call(call, self._begin(call), seconds, run)

    async def stream(
        self, call: Call, seconds: float, run: Callable[[StageService], Awaitable[tuple[H, AsyncIterator[Buffer]]]]
    ) -> tuple[H, AsyncIterator[Buffer]]:
        """One call whose answer is a head and then bytes; the stream breaks when the callee dies."""
        fate = self._begin(call)
        head, chunks = await self._call(call, fate, seconds, run)
        return head, self._pieces(self.nodes.get(call.to.endpoint), call.to, fate, chunks)

    # --- one call -------------------------------------------------------------------

    def _begin(self, call: Call) -> Fate:
        self.calls[call.kind] = self.calls.get(call.kind, 0) + 1
        for observer in self.before_call:
            observer(call)
        return self.weather.fate(call)

    async def _call(self, call: Call, fate: Fate, seconds: float, run: Callable[[StageService], Awaitable[T]]) -> T:
        if fate.late_copy_seconds is not None:
            task = asyncio.create_task(self._arrive_late(fate.late_copy_seconds, call.to, run))
            self._late.add(task)
            task.add_done_callback(self._late.discard)
        try:
            async with asyncio.timeout(seconds):
                answer = await self._deliver(fate, call.to, run)
        except TimeoutError:
            raise TimedOut(f"{call.kind}: no answer in {seconds:.1f} s") from None
        for observer in self.after_call:
            observer(call, answer)
        return answer

    async def _deliver(self, fate: Fate, to: Contact, run: Callable[[StageService], Awaitable[T]]) -> T:
        await asyncio.sleep(fate.request_seconds)
        node = self._node(to)
        if fate.lose_request:
            await asyncio.get_running_loop().create_future()
        if fate.kill_before:
            node.kill()
            raise Unreachable("connection reset")
        task = self._start(node, run)
        if fate.repeat:
            self._start(node, run)
        try:
            # Shielded: a repeat goes on even when its twin has answered, as on a real network.
            answer = await asyncio.shield(task)
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if task.cancelled() and (this is None or not this.cancelling()):
                raise Unreachable("connection reset") from None
            task.cancel()
            raise
        if fate.kill_after:
            node.kill()
            raise Unreachable("connection reset")
        if fate.lose_reply:
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(fate.reply_seconds)
        return answer

    async def _arrive_late(self, seconds: float, to: Contact, run: Callable[[StageService], Awaitable[Any]]) -> None:
        await asyncio.sleep(seconds)
        try:
            self._start(self._node(to), run)
        except (Unreachable, WrongRun):
            return  # the callee is gone, and so is its caller

    async def _pieces(
        self, node: Node | None, to: Contact, fate: Fate, chunks: AsyncIterator[Buffer]
    ) -> AsyncIterator[Buffer]:
        async for chunk in chunks:
            view = memoryview(chunk).cast("B")
            half = (len(view) + 1) // 2
            for piece in (view[:half], view[half:]):
                await asyncio.sleep(STREAM_GAP_SECONDS)
                if node is None or node.contact != to or not node.alive:
                    raise Unreachable("connection reset")
                yield piece
                if fate.kill_amid_stream:
                    node.kill()

    # --- the callee's side ------------------------------------------------------------

    def _node(self, to: Contact) -> Node:
        node = self.nodes.get(to.endpoint)
        if node is None:
            raise Unreachable("connection refused")
        if node.contact != to:
            raise WrongRun("another process listens there now")
        return node

    def _start(self, node: Node, run: Callable[[StageService], Awaitable[T]]) -> asyncio.Task[T]:
        task = asyncio.create_task(self._serve(node, run))
        node.tasks.add(task)
        task.add_done_callback(node.tasks.discard)
        task.add_done_callback(_look)
        return task

    async def _serve(self, node: Node, run: Callable[[StageService], Awaitable[T]]) -> T:
        try:
            return await run(node.service)
        except SwarmError:
            raise
        except Exception as error:  # the root of the callee's task
            self.failures.append(error)
            raise PeerFailed(f"{type(error).__name__}: {error}") from error


def _look(task: asyncio.Task[Any]) -> None:
    """The caller may be gone: then nobody else asks for the error."""
    if not task.cancelled():
        task.exception()


class SimulatedCalls:
    """Implements :class:`swarm.ports.StageCalls` over a :class:`Network`, for one process called ``caller``."""

    def __init__(self, network: Network, caller: str) -> None:
        self._network = network
        self._caller = caller

    async def forward(self, to: Contact, request: ForwardRequest) -> TensorData:
        async def run(service: StageService) -> TensorData:
            service.admit("forward", request.call.deadline_seconds)
            return await service.forward(request)

        return await self._call("forward", to, request, request.call.deadline_seconds, run)

    async def backward(self, to: Contact, request: BackwardRequest) -> BackwardReply:
        async def run(service: StageService) -> BackwardReply:
            service.admit("backward", request.call.deadline_seconds)
            return await service.backward(request)

        return await self._call("backward", to, request, request.call.deadline_seconds, run)

    async def void(self, to: Contact, request: VoidRequest, timeout_seconds: float) -> VoidReply:
        return await self._call("void", to, request, timeout_seconds, lambda s: s.void(request))

    async def greet(self, to: Contact, request: Greeting, timeout_seconds: float) -> PeerReport:
        return await self._call("greet", to, request, timeout_seconds, lambda s: s.greet(request))

    async def freeze(self, to: Contact, request: FreezeRequest, timeout_seconds: float) -> FreezeReply:
        return await self._call("freeze", to, request, timeout_seconds, lambda s: s.freeze(request))

    async def drop(self, to: Contact, request: DropRequest, timeout_seconds: float) -> None:
        await self._call("drop", to, request, timeout_seconds, lambda s: s.drop(request))

    async def reduce(self, to: Contact, request: ReduceRequest, timeout_seconds: float) -> ReduceReply:
        return await self._call("reduce", to, request, timeout_seconds, lambda s: s.reduce(request))

    async def adopt(self, to: Contact, request: AdoptRequest, timeout_seconds: float) -> ReducedMark:
        return await self._call("adopt", to, request, timeout_seconds, lambda s: s.adopt(request))

    async def apply(self, to: Contact, request: ApplyRequest, timeout_seconds: float) -> StateMark:
        return await self._call("apply", to, request, timeout_seconds, lambda s: s.apply(request))

    async def fetch_state(
        self, to: Contact, request: StateRequest, timeout_seconds: float
    ) -> tuple[StateHead, AsyncIterator[Buffer]]:
        call = Call(kind="fetch_state", caller=self._caller, to=to, request=request)
        return await self._network.stream(call, timeout_seconds, lambda s: s.fetch_state(request))

    async def fetch_gradient(
        self, to: Contact, request: GradientRequest, timeout_seconds: float
    ) -> AsyncIterator[Buffer]:
        async def run(service: StageService) -> tuple[None, AsyncIterator[Buffer]]:
            return None, await service.fetch_gradient(request)

        call = Call(kind="fetch_gradient", caller=self._caller, to=to, request=request)
        return (await self._network.stream(call, timeout_seconds, run))[1]

    async def _call(
        self, kind: str, to: Contact, request: Any, seconds: float, run: Callable[[StageService], Awaitable[T]]
    ) -> T:
        return await self._network.call(Call(kind=kind, caller=self._caller, to=to, request=request), seconds, run)
