"""A small simulated network for tests: one node whose calls are given as functions, and one caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from swarm.ids import PeerId, SessionId
from swarm.messages import Contact, StateRequest
from swarm.ports import StageService
from swarm.sim import streams
from swarm.sim.loop import Process
from swarm.sim.machine import Machine
from swarm.sim.network import Network, Node
from swarm.sim.weather import FAIR, Call, Fate
from swarm.sim.weights import Weights
from swarm.tensors import Buffer
from tests.stage_double import RUN, EchoStage

CONTACT = Contact(peer=PeerId("p"), session=SessionId("p#1"), endpoint="p:1")


class Fixed:
    """The same fate for every call."""

    def __init__(self, fate: Fate) -> None:
        self._fate = fate

    def fate(self, call: Call) -> Fate:
        return self._fate


class World:
    """One node whose calls are given as functions, and one caller.  Messages take 5 ms each way."""

    def __init__(self, fate: Fate = FAIR, weights: Weights | None = None) -> None:
        self.network = Network(Fixed(fate), weights)
        self.caller = Node(machine=self.network.machine("t"), process=Process("t#1"))
        self.arrived = 0
        self.cancelled = 0
        self.node: Node | None = None

    def start(self, contact: Contact = CONTACT, machine: Callable[[], Machine] | None = None) -> Node:
        # The calls of these tests bring their own work.
        node = Node(
            machine=self.network.machine("p", machine),
            process=Process(contact.session),
            contact=contact,
            service=EchoStage(),
            kill=self.kill,
        )
        self.node = self.network.join(node)
        return node

    def kill(self, *, silently: bool = False) -> None:
        assert self.node is not None
        self.network.leave(self.node, silently=silently)

    async def work(self, service: StageService) -> str:
        self.arrived += 1
        try:
            await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return "answer"

    async def call(
        self, to: Contact = CONTACT, work: Callable[[StageService], Awaitable[str]] | None = None, seconds: float = 1.0
    ) -> str:
        call = Call(kind="greet", caller="t", to=to, request=None)
        return await self.network.call(self.caller, call, seconds, work or self.work)

    async def stream(self, data: bytes, seconds: float = 1.0) -> AsyncIterator[Buffer]:
        async def chunks() -> AsyncIterator[Buffer]:
            yield data

        async def work(service: StageService) -> tuple[int, AsyncIterator[Buffer]]:
            return len(data), chunks()

        call = Call(kind="fetch_state", caller="t", to=CONTACT, request=StateRequest(run=RUN, stage=0))
        _, pieces = await streams.fetch(self.network, self.caller, call, seconds, work)
        return pieces
