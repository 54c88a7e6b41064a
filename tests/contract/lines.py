"""A peer that is served, and how to call it: for the contracts of calls and of streams."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from swarm.messages import Contact
from swarm.ports import StageCalls
from swarm.rpc.client import GrpcStageCalls
from swarm.rpc.server import StageServer
from swarm.sim.calls import SimulatedCalls
from swarm.sim.links import Link
from swarm.sim.loop import Process
from swarm.sim.machine import Machine
from swarm.sim.network import Network, Node
from swarm.sim.weights import Weights
from swarm.tensors import Buffer
from tests.stage_double import PEER, SESSION, EchoStage, tensor

SLACK_SECONDS = 1.0
SOON_SECONDS = 0.2
"""A time-out that a test waits for."""
LONG_SECONDS = 20.0
"""One that it does not."""

LARGE = tensor(bytes(32 << 20))
"""Takes long to send."""


class Donor(EchoStage):
    """A stage double that keeps the streams that it gives."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.given: list[Given] = []

    def _data(self) -> AsyncIterator[Buffer]:
        self.given.append(Given(self))
        return self.given[-1]


class Given(AsyncIterator[Buffer]):
    """What a donor gives to one reader; it ends when the gate is open."""

    def __init__(self, stage: Donor) -> None:
        self._gate = stage.gate
        self._chunks = iter(stage.state_chunks * stage.state_repeats)
        self.all_given, self.closed = asyncio.Event(), asyncio.Event()

    async def __anext__(self) -> Buffer:
        for chunk in self._chunks:
            return chunk
        self.all_given.set()
        await self._gate.wait()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.closed.set()


@dataclass(frozen=True)
class Line:
    """A stage double that is served, and how to call it."""

    stage: Donor
    calls: StageCalls
    to: Contact
    nobody: Contact
    """Where nothing listens."""
    kill: Callable[[], Awaitable[None]]
    """The callee's process dies."""
    make_large_tensors_slow: Callable[[], None] = lambda: None
    """Where they are not anyway."""


@asynccontextmanager
async def simulated() -> AsyncIterator[Line]:
    network = Network()
    stage = Donor()
    to = Contact(peer=PEER, session=SESSION, endpoint="peer:1")
    machine = network.machine("peer", lambda: Machine(name="peer", down=Link(len(LARGE.data) / 10.0)))
    node = network.join(Node(machine=machine, process=Process("peer#1"), contact=to, service=stage))
    caller = Node(machine=network.machine("trainer"), process=Process("trainer#1"))

    async def kill() -> None:
        network.leave(node)

    def slow() -> None:
        # All tensors that are sent weigh as much as the large one, which takes 10 s.
        network.weights = Weights(boundary_bytes=len(LARGE.data), gradient_bytes=(0, 0))

    yield Line(stage, SimulatedCalls(network, caller), to, replace(to, endpoint="nobody:1"), kill, slow)


@asynccontextmanager
async def real() -> AsyncIterator[Line]:
    stage, calls = Donor(), GrpcStageCalls()
    server = StageServer(peer=PEER, session=SESSION)
    port = await server.bind("127.0.0.1:0")
    await server.start(stage)
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        to = Contact(peer=PEER, session=SESSION, endpoint=f"127.0.0.1:{port}")
        nobody = replace(to, endpoint=f"127.0.0.1:{taken.getsockname()[1]}")
        yield Line(stage, calls, to, nobody, lambda: server.stop(0))
    await calls.close()
    await server.stop(0)
