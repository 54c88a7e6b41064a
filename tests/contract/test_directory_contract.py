"""What roles rely on of a directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import pytest

from swarm import PROTOCOL_VERSION
from swarm.config import RunConfig
from swarm.dht.directory import HivemindDirectory
from swarm.dht.node import SwarmNode, start_node
from swarm.ids import PeerId, RunHash, SessionId
from swarm.ports import Directory
from swarm.records import LeadRecord, Lineage, PeerRecord, PeerState, Term
from swarm.sim.directory import Board, SimulatedDirectory
from swarm.sim.loop import Process
from swarm.sim.network import Network, Node
from tests.contract.worlds import FAST, REAL, RealKept, Simulated, World, world_fixture

VISIBLE_SECONDS = 3.0
"""After so long everybody sees what was written (on one site)."""
SHORT_SECONDS = 2.0
"""A life that a test waits for."""
LONG_SECONDS = 30.0
COUNT = 3


class Processes(Protocol):
    """COUNT processes that see the same directory."""

    peers: list[PeerId]

    def at(self, index: int, seconds: float = LONG_SECONDS) -> Directory:
        """A new directory of process ``index``, whose records live for so long."""


class SimulatedProcesses:
    def __init__(self) -> None:
        self._board, self._network = Board(), Network()
        self.peers = [PeerId(f"p{index}") for index in range(COUNT)]
        self._nodes = [Node(machine=self._network.machine(p), process=Process(p)) for p in self.peers]

    def at(self, index: int, seconds: float = LONG_SECONDS) -> Directory:
        return SimulatedDirectory(
            self._board,
            self._network,
            self._nodes[index],
            lifetime_seconds=seconds,
            run_lifetime_seconds=seconds,
        )


class RealProcesses:
    def __init__(self, nodes: list[SwarmNode]) -> None:
        self._nodes = nodes
        self.peers = [node.peer_id for node in nodes]

    def at(self, index: int, seconds: float = LONG_SECONDS) -> Directory:
        return HivemindDirectory(self._nodes[index], record_ttl_seconds=seconds, run_ttl_seconds=seconds)


@asynccontextmanager
async def simulated() -> AsyncIterator[Processes]:
    yield SimulatedProcesses()


@asynccontextmanager
async def real() -> AsyncIterator[Processes]:
    nodes = [await start_node()]
    try:
        while len(nodes) < COUNT:
            nodes.append(await start_node(join=nodes[0].addresses))
        yield RealProcesses(nodes)
    finally:
        for node in reversed(nodes):
            await node.close()


world = world_fixture((Simulated, simulated, FAST), (RealKept, real, REAL))


@pytest.fixture
def run(request: pytest.FixtureRequest) -> RunHash:
    """A run of each test's own."""
    return config(request.node.name).hash


def config(name: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "".join(c if c.isalnum() else "-" for c in name)[:60]},
            "model": {"layers": 2, "width": 8, "heads": 2, "sequence_length": 8},
            "optimizer": {"learning_rate": 0.1},
            "step": {"microbatches": 2, "microbatch_size": 1},
        }
    )


def record(run: RunHash, peer: PeerId, **changes: Any) -> PeerRecord:
    made = PeerRecord(
        peer=peer,
        session=SessionId("0" * 16),
        run=run,
        protocol=PROTOCOL_VERSION,
        stage=0,
        endpoint="127.0.0.1:4000",
        state=PeerState.READY,
        lineage=Lineage.root(run),
        forward_seconds=0.25,
        queue=3,
        numeric_class="cpu",
    )
    return replace(made, **changes)


def lease(run: RunHash, trainer: PeerId, number: int, counter: int = 0) -> LeadRecord:
    return LeadRecord(
        trainer=trainer,
        session=SessionId("0" * 16),
        run=run,
        term=Term(number, trainer),
        counter=counter,
        lineage=Lineage.root(run),
    )


async def until(read: Callable[[], Awaitable[object]], expected: object, seconds: float = VISIBLE_SECONDS) -> None:
    """Read until that is found.  Raises TimeoutError if it does not come within ``seconds``."""
    async with asyncio.timeout(seconds):
        while await read() != expected:
            pass


# --- peers --------------------------------------------------------------------------------


def test_an_announced_record_is_seen_by_all(world: World[Processes], run: RunHash) -> None:
    async def test(processes: Processes) -> None:
        mine = record(run, processes.peers[1])
        directories = [processes.at(index) for index in range(COUNT)]
        for directory in directories:
            assert await directory.peers(run, 0) == []
        await directories[1].announce(mine)
        for directory in directories:
            await until(partial(directory.peers, run, 0), [mine])

    world.run(test)


def test_the_records_of_several_peers_stand_side_by_side(world: World[Processes], run: RunHash) -> None:
    async def test(processes: Processes) -> None:
        records = [record(run, peer, queue=index) for index, peer in enumerate(processes.peers)]
        await asyncio.gather(*(processes.at(index).announce(r) for index, r in enumerate(records)))
        reader = processes.at(0)
        await until(partial(reader.peers, run, 0), sorted(records, key=lambda r: r.peer))

    world.run(test)


def test_a_later_announcement_replaces_the_peers_earlier_one(world: World[Processes], run: RunHash) -> None:
    """By the same life or by the next."""

    async def test(processes: Processes) -> None:
        mine = record(run, processes.peers[1])
        writer, reader = processes.at(1), processes.at(0)
        for queue in range(3):
            renewed = replace(mine, queue=queue)
            await writer.announce(renewed)
            await until(partial(reader.peers, run, 0), [renewed])
        reborn = replace(mine, session=SessionId("1" * 16))
        await processes.at(1).announce(reborn)
        await until(partial(reader.peers, run, 0), [reborn])

    world.run(test)


def test_a_withdrawn_record_is_gone_and_may_come_back(world: World[Processes], run: RunHash) -> None:
    async def test(processes: Processes) -> None:
        mine = record(run, processes.peers[1])
        writer, reader = processes.at(1), processes.at(0)
        await writer.announce(mine)
        await until(partial(reader.peers, run, 0), [mine])
        await writer.withdraw(mine)
        await until(partial(reader.peers, run, 0), [])
        assert await writer.peers(run, 0) == []
        await writer.announce(mine)
        await until(partial(reader.peers, run, 0), [mine])

    world.run(test)


def test_a_withdrawal_by_an_earlier_life_leaves_the_later_ones_record(world: World[Processes], run: RunHash) -> None:
    """A process that ends slowly while the next has begun."""

    async def test(processes: Processes) -> None:
        mine = record(run, processes.peers[1])
        reborn = replace(mine, session=SessionId("1" * 16))
        earlier, later, reader = processes.at(1), processes.at(1), processes.at(0)
        await earlier.announce(mine)
        await until(partial(reader.peers, run, 0), [mine])
        await later.announce(reborn)
        await until(partial(reader.peers, run, 0), [reborn])
        await earlier.withdraw(mine)
        assert await reader.peers(run, 0) == [reborn]
        assert await processes.at(2).peers(run, 0) == [reborn]

    world.run(test)


def test_a_withdrawal_leaves_others_and_other_stages(world: World[Processes], run: RunHash) -> None:
    async def test(processes: Processes) -> None:
        mine, theirs = (record(run, processes.peers[index]) for index in (1, 2))
        elsewhere = replace(mine, stage=1)
        writer, reader = processes.at(1), processes.at(0)
        await writer.announce(mine)
        await writer.announce(elsewhere)
        await processes.at(2).announce(theirs)
        await writer.withdraw(mine)
        await until(partial(reader.peers, run, 0), [theirs])
        await until(partial(reader.peers, run, 1), [elsewhere])

    world.run(test)


def test_records_of_another_stage_or_run_are_not_returned(world: World[Processes], run: RunHash) -> None:
    async def test(processes: Processes) -> None:
        reader, other_run = processes.at(0), RunHash("d" * 64)
        await processes.at(1).announce(record(run, processes.peers[1], stage=1))
        await processes.at(2).announce(record(other_run, processes.peers[2]))
        await until(partial(reader.peers, run, 1), [record(run, processes.peers[1], stage=1)])
        await until(partial(reader.peers, other_run, 0), [record(other_run, processes.peers[2])])
        assert await reader.peers(run, 0) == []

    world.run(test)


def test_a_record_that_is_not_renewed_expires(world: World[Processes], run: RunHash) -> None:
    async def test(processes: Processes) -> None:
        mine, theirs = (record(run, processes.peers[index]) for index in (1, 2))
        reader = processes.at(0)
        await processes.at(2).announce(theirs)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await processes.at(1, SHORT_SECONDS).announce(mine)
        await until(partial(reader.peers, run, 0), sorted([mine, theirs], key=lambda r: r.peer))
        await until(partial(reader.peers, run, 0), [theirs], SHORT_SECONDS + VISIBLE_SECONDS)
        assert loop.time() - began >= SHORT_SECONDS - 0.05
        assert await processes.at(1).peers(run, 0) == [theirs]

    world.run(test)


# --- leads --------------------------------------------------------------------------------


def test_there_is_no_lead_before_one_has_spoken(world: World[Processes], run: RunHash) -> None:
    async def test(processes: Processes) -> None:
        assert await processes.at(0).lead(run) is None

    world.run(test)


def test_a_lease_is_seen_renewed_and_expires(world: World[Processes], run: RunHash) -> None:
    async def test(processes: Processes) -> None:
        trainer, writer, reader = processes.peers[1], processes.at(1, SHORT_SECONDS), processes.at(0)
        for counter in range(3):
            await writer.renew_lead(lease(run, trainer, 3, counter))
            await until(partial(reader.lead, run), lease(run, trainer, 3, counter))
        assert await reader.lead(RunHash("e" * 64)) is None
        await until(partial(reader.lead, run), None, SHORT_SECONDS + VISIBLE_SECONDS)

    world.run(test)


def test_of_two_leases_the_greater_term_is_the_lead(world: World[Processes], run: RunHash) -> None:
    """Whoever writes last; of equal numbers the trainer's name decides."""

    async def test(processes: Processes) -> None:
        _, one, two = processes.peers
        low, high, reader = processes.at(1), processes.at(2), processes.at(0)
        await low.renew_lead(lease(run, one, 3))
        await until(partial(reader.lead, run), lease(run, one, 3))
        await high.renew_lead(lease(run, two, 4))
        await until(partial(reader.lead, run), lease(run, two, 4))
        await low.renew_lead(lease(run, one, 3, counter=1))
        assert await reader.lead(run) == lease(run, two, 4)
        await low.renew_lead(lease(run, one, 4))
        await until(partial(reader.lead, run), lease(run, max(one, two), 4))

    world.run(test)


def test_a_lower_lease_is_seen_once_the_greater_has_expired(world: World[Processes], run: RunHash) -> None:
    async def test(processes: Processes) -> None:
        _, one, two = processes.peers
        reader = processes.at(0)
        await processes.at(2, SHORT_SECONDS).renew_lead(lease(run, two, 9))
        await processes.at(1).renew_lead(lease(run, one, 3))
        assert await reader.lead(run) == lease(run, two, 9)
        await until(partial(reader.lead, run), lease(run, one, 3), SHORT_SECONDS + VISIBLE_SECONDS)

    world.run(test)


def test_a_trainer_has_one_lease(world: World[Processes], run: RunHash) -> None:
    """One that starts again may not know the term that it had."""

    async def test(processes: Processes) -> None:
        trainer, reader = processes.peers[1], processes.at(0)
        await processes.at(1).renew_lead(lease(run, trainer, 7))
        await until(partial(reader.lead, run), lease(run, trainer, 7))
        await processes.at(1).renew_lead(lease(run, trainer, 2))
        await until(partial(reader.lead, run), lease(run, trainer, 2))

    world.run(test)


# --- runs ---------------------------------------------------------------------------------


def test_published_runs_are_seen_by_all_without_their_data_and_expire(world: World[Processes]) -> None:
    async def test(processes: Processes) -> None:
        first, second = config("first"), config("second")
        private = first.model_copy(update={"data": first.data.model_copy(update={"path": "/secret"})})
        assert private.hash == first.hash
        reader = processes.at(0)

        async def names() -> list[str]:
            return sorted(found.run.name for found in await reader.runs())

        assert await reader.runs() == []
        await processes.at(1, SHORT_SECONDS).publish_run(private)
        await until(reader.runs, [first])
        await processes.at(2).publish_run(second)
        await until(names, ["first", "second"])
        await until(reader.runs, [second], SHORT_SECONDS + VISIBLE_SECONDS)

    world.run(test)


def test_a_run_that_several_publish_is_there_once(world: World[Processes]) -> None:
    async def test(processes: Processes) -> None:
        mine, reader = config("shared"), processes.at(0)
        for index in range(COUNT):
            await processes.at(index, LONG_SECONDS + index).publish_run(mine)

        async def count() -> int:
            return [found.hash for found in await reader.runs()].count(mine.hash)

        await until(count, 1)

    world.run(test)
