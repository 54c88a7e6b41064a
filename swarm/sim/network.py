"""Calls between simulated nodes: latency, loss of requests and replies, repeats, deaths.

A call runs as a task of the callee's node, so a node's death cancels what it computes and its callers see a broken
connection; a caller's time-out cancels the callee's task as gRPC does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from swarm.errors import SwarmError, TimedOut, Unreachable, WrongRun
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What happens to one call.  Seconds are virtual."""

    request_seconds: float = 0.005
    reply_seconds: float = 0.005
    lose_request: bool = False
    lose_reply: bool = False
    repeat: bool = False
    """The request arrives twice; the first answer counts."""
    kill_before: bool = False
    """The callee dies when the request arrives."""
    kill_after: bool = False
    """The callee dies once it has computed the answer, before the answer leaves."""


class Weather(Protocol):
    """Decides the fate of each call; a test's source of faults."""

    def fate(self, kind: str, to: Contact) -> Fate:
        """``kind`` is the name of the call."""


class FairWeather:
    """Nothing is lost."""

    def fate(self, kind: str, to: Contact) -> Fate:
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
        self.after_call: list[Callable[[str, Contact, Any, Any], None]] = []
        """Called after each answered call with (kind, callee, request, answer)."""

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

    async def call(
        self, kind: str, to: Contact, request: Any, seconds: float, run: Callable[[StageService], Awaitable[T]]
    ) -> T:
        """One call with a time-out."""
        self.calls[kind] = self.calls.get(kind, 0) + 1
        fate = self.weather.fate(kind, to)
        try:
            async with asyncio.timeout(seconds):
                answer = await self._deliver(fate, to, run)
        except TimeoutError:
            raise TimedOut(f"{kind}: no answer in {seconds:.1f} s") from None
        for observer in self.after_call:
            observer(kind, to, request, answer)
        return answer

    async def _deliver(self, fate: Fate, to: Contact, run: Callable[[StageService], Awaitable[T]]) -> T:
        await asyncio.sleep(fate.request_seconds)
        node = self.nodes.get(to.endpoint)
        if node is None:
            raise Unreachable("connection refused")
        if node.contact != to:
            raise WrongRun("another process listens there now")
        if fate.lose_request:
            await asyncio.get_running_loop().create_future()
        if fate.kill_before:
            node.kill()
            raise Unreachable("connection reset")
        task = asyncio.ensure_future(run(node.service))
        tasks = {task}
        if fate.repeat:
            tasks.add(asyncio.ensure_future(run(node.service)))
        for each in tasks:
            node.tasks.add(each)
            each.add_done_callback(node.tasks.discard)
            each.add_done_callback(_look)
        try:
            # Shielded: a repeat goes on even when its twin has answered, as on a real network.
            answer = await asyncio.shield(task)
        except asyncio.CancelledError:
            if not node.alive:
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


def _look(task: asyncio.Task[Any]) -> None:
    """Errors of the protocol are the caller's business; anything else is a bug and must be seen."""
    if task.cancelled():
        return
    error = task.exception()
    if error is not None and not isinstance(error, SwarmError):
        asyncio.get_running_loop().call_exception_handler({"message": "handler failed", "exception": error})


class SimulatedCalls:
    """Implements :class:`swarm.ports.StageCalls` over a :class:`Network`."""

    def __init__(self, network: Network) -> None:
        self._network = network

    async def forward(self, to: Contact, request: ForwardRequest) -> TensorData:
        async def run(service: StageService) -> TensorData:
            service.admit("forward", request.call.deadline_seconds)
            return await service.forward(request)

        return await self._network.call("forward", to, request, request.call.deadline_seconds, run)

    async def backward(self, to: Contact, request: BackwardRequest) -> BackwardReply:
        async def run(service: StageService) -> BackwardReply:
            service.admit("backward", request.call.deadline_seconds)
            return await service.backward(request)

        return await self._network.call("backward", to, request, request.call.deadline_seconds, run)

    async def void(self, to: Contact, request: VoidRequest, timeout_seconds: float) -> VoidReply:
        return await self._network.call("void", to, request, timeout_seconds, lambda s: s.void(request))

    async def greet(self, to: Contact, request: Greeting, timeout_seconds: float) -> PeerReport:
        return await self._network.call("greet", to, request, timeout_seconds, lambda s: s.greet(request))

    async def freeze(self, to: Contact, request: FreezeRequest, timeout_seconds: float) -> FreezeReply:
        return await self._network.call("freeze", to, request, timeout_seconds, lambda s: s.freeze(request))

    async def drop(self, to: Contact, request: DropRequest, timeout_seconds: float) -> None:
        await self._network.call("drop", to, request, timeout_seconds, lambda s: s.drop(request))

    async def reduce(self, to: Contact, request: ReduceRequest, timeout_seconds: float) -> ReduceReply:
        return await self._network.call("reduce", to, request, timeout_seconds, lambda s: s.reduce(request))

    async def adopt(self, to: Contact, request: AdoptRequest, timeout_seconds: float) -> ReducedMark:
        return await self._network.call("adopt", to, request, timeout_seconds, lambda s: s.adopt(request))

    async def apply(self, to: Contact, request: ApplyRequest, timeout_seconds: float) -> StateMark:
        return await self._network.call("apply", to, request, timeout_seconds, lambda s: s.apply(request))

    async def fetch_state(
        self, to: Contact, request: StateRequest, timeout_seconds: float
    ) -> tuple[StateHead, AsyncIterator[Buffer]]:
        return await self._network.call("fetch_state", to, request, timeout_seconds, lambda s: s.fetch_state(request))

    async def fetch_gradient(
        self, to: Contact, request: GradientRequest, timeout_seconds: float
    ) -> AsyncIterator[Buffer]:
        return await self._network.call(
            "fetch_gradient", to, request, timeout_seconds, lambda s: s.fetch_gradient(request)
        )


