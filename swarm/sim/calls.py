"""The calls of one simulated process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from swarm.errors import Unreachable
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
from swarm.sim import streams
from swarm.sim.network import Network, Node
from swarm.sim.weather import Call
from swarm.tensors import Buffer, TensorData

T = TypeVar("T")


class SimulatedCalls:
    """Implements :class:`swarm.ports.StageCalls` over a :class:`Network`, for one process."""

    def __init__(self, network: Network, node: Node) -> None:
        self._network = network
        self._node = node

    async def forward(self, to: Contact, request: ForwardRequest) -> TensorData:
        return await self._call("forward", to, request, request.call.deadline_seconds, lambda s: s.forward(request))

    async def backward(self, to: Contact, request: BackwardRequest) -> BackwardReply:
        return await self._call("backward", to, request, request.call.deadline_seconds, lambda s: s.backward(request))

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
    ) -> tuple[StateHead, streams.Stream]:
        call = self._head("fetch_state", to, request)
        return await streams.fetch(self._network, self._node, call, timeout_seconds, lambda s: s.fetch_state(request))

    async def fetch_gradient(self, to: Contact, request: GradientRequest, timeout_seconds: float) -> streams.Stream:
        async def run(service: StageService) -> tuple[None, AsyncIterator[Buffer]]:
            return None, await service.fetch_gradient(request)

        call = self._head("fetch_gradient", to, request)
        return (await streams.fetch(self._network, self._node, call, timeout_seconds, run))[1]

    async def _call(
        self, kind: str, to: Contact, request: Any, seconds: float, run: Callable[[StageService], Awaitable[T]]
    ) -> T:
        return await self._network.call(self._node, self._head(kind, to, request), seconds, run)

    def _head(self, kind: str, to: Contact, request: Any) -> Call:
        if not self._node.alive:
            raise Unreachable("this process is dead")
        self._node.machine.calls[kind] += 1
        return Call(kind=kind, caller=self._node.machine.name, to=to, request=request)
