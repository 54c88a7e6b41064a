"""The simulated directory: records are seen late, get old, expire, are damaged, and a cut-off reader sees none."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from swarm import PROTOCOL_VERSION
from swarm.ids import PeerId, RunHash, SessionId
from swarm.records import LeadRecord, Lineage, PeerRecord, PeerState, Term
from swarm.sim.directory import DHT, Board, SimulatedDirectory
from swarm.sim.fuzz.run import run_config
from swarm.sim.loop import Process, run
from swarm.sim.network import Cut, Network, Node
from swarm.sim.swarm import SimulatedSwarm

pytestmark = pytest.mark.fast

RUN = RunHash("ab" * 32)


def record(peer: str = "p", queue: int = 0) -> PeerRecord:
    return PeerRecord(
        peer=PeerId(peer),
        session=SessionId(f"{peer}#1"),
        run=RUN,
        protocol=PROTOCOL_VERSION,
        stage=0,
        endpoint=f"{peer}:1",
        state=PeerState.READY,
        lineage=Lineage.root(RUN),
        forward_seconds=0.1,
        queue=queue,
        numeric_class="simulated",
    )


def lease(trainer: str, number: int) -> LeadRecord:
    peer = PeerId(trainer)
    term = Term(number, peer)
    session = SessionId(f"{trainer}#1")
    return LeadRecord(trainer=peer, session=session, run=RUN, term=term, counter=0, lineage=Lineage.root(RUN))


class World:
    """A writer and a reader of one board, at machines of these names."""

    def __init__(self, staleness_seconds: float = 0.0) -> None:
        self.board = Board()
        self.network = Network()
        self.nodes = {
            name: Node(machine=self.network.machine(name), process=Process(f"{name}#1"))
            for name in ("writer", "reader")
        }
        self.writer = SimulatedDirectory(self.board, self.network, self.nodes["writer"])
        self.reader = SimulatedDirectory(
            self.board, self.network, self.nodes["reader"], staleness_seconds=staleness_seconds
        )

    async def queues(self) -> list[int]:
        """Of all records that the reader sees: a record's queue tells which version it is."""
        return [record.queue for record in await self.reader.peers(RUN, 0)]


def test_a_record_is_seen_once_its_announcement_has_returned_and_not_before() -> None:
    async def main() -> None:
        world = World()
        task = asyncio.create_task(world.writer.announce(record()))
        await asyncio.sleep(0.1)
        assert await world.queues() == []
        await task
        assert await world.queues() == [0]

    run(main())


def test_a_record_expires_unless_it_is_renewed() -> None:
    async def main() -> None:
        world = World()
        await world.writer.announce(record(queue=1))
        await asyncio.sleep(29.0)
        assert await world.queues() == [1]
        await world.writer.announce(record(queue=2))
        await asyncio.sleep(29.0)
        assert await world.queues() == [2]
        await asyncio.sleep(2.0)
        assert await world.queues() == []

    run(main())


def test_a_reader_may_see_what_is_old_but_nothing_that_has_expired() -> None:
    async def main() -> None:
        world = World(staleness_seconds=5.0)
        await world.writer.announce(record(queue=1))
        await asyncio.sleep(4.0)
        assert await world.queues() == []
        await asyncio.sleep(2.0)
        assert await world.queues() == [1]
        await world.writer.announce(record(queue=2))
        assert await world.queues() == [1]
        await asyncio.sleep(5.0)
        assert await world.queues() == [2]
        await world.writer.withdraw(record())
        assert await world.queues() == [2]
        await asyncio.sleep(5.0)
        assert await world.queues() == []
        await world.writer.announce(record(queue=3))
        await asyncio.sleep(31.0)
        assert await world.queues() == []

    run(main())


def test_a_damaged_record_is_left_out_until_it_is_whole_again_or_renewed() -> None:
    async def main() -> None:
        world = World()
        world.board.damage(RUN, 0, PeerId("p"), 5.0)  # nothing is there yet
        await world.writer.announce(record(queue=1))
        world.board.damage(RUN, 0, PeerId("p"), 5.0)
        assert await world.queues() == []
        await asyncio.sleep(5.0)
        assert await world.queues() == [1]
        world.board.damage(RUN, 0, PeerId("p"), 5.0)
        await world.writer.announce(record(queue=2))
        assert await world.queues() == [2]
        await asyncio.sleep(10.0)
        assert await world.queues() == [2]
        world.board.damage(RUN, 0, PeerId("p"), 60.0)
        await asyncio.sleep(61.0)
        assert await world.queues() == []

    run(main())


@pytest.mark.parametrize("machine", ["reader", DHT])
def test_a_reader_that_is_cut_off_sees_what_it_saw_until_that_expires(machine: str) -> None:
    async def main() -> None:
        world = World()
        await world.writer.announce(record(queue=1))
        assert await world.queues() == [1]
        world.network.cut(Cut(machines=frozenset({machine})), 40.0)
        if machine == "reader":
            await world.writer.announce(record(queue=2))
            assert await world.queues() == [1]
            await asyncio.sleep(20.0)
            await world.writer.announce(record(queue=3))
        else:
            await asyncio.sleep(20.0)
            assert await world.queues() == [1]
        await asyncio.sleep(11.0)
        assert await world.queues() == []
        await asyncio.sleep(10.0)
        assert await world.queues() == ([3] if machine == "reader" else [])

    run(main())


def test_what_a_writer_says_that_is_cut_off_or_dead_is_lost() -> None:
    async def main() -> None:
        world = World()
        await world.writer.announce(record(queue=1))
        world.network.cut(Cut(machines=frozenset({"writer"})), 10.0)
        await world.writer.announce(record(queue=2))
        await world.writer.withdraw(record())
        await world.writer.renew_lead(lease("writer", 1))
        await world.writer.publish_run(run_config(1, 1))
        assert await world.queues() == [1]
        assert await world.reader.lead(RUN) is None
        assert await world.reader.runs() == []
        await asyncio.sleep(10.0)
        await world.writer.announce(record(queue=3))
        assert await world.queues() == [3]
        world.network.leave(world.nodes["writer"])
        await world.writer.announce(record(queue=4))
        assert await world.queues() == [3]

    run(main())


def test_a_withdrawal_of_an_earlier_life_leaves_the_later_ones_record() -> None:
    async def main() -> None:
        world = World()
        await world.writer.announce(record(queue=1))
        await world.writer.announce(replace(record(queue=2), session=SessionId("p#2")))
        await world.writer.withdraw(record())
        assert await world.queues() == [2]

    run(main())


def test_a_lease_that_a_reader_does_not_find() -> None:
    async def main() -> None:
        world = World()
        await world.writer.renew_lead(lease("a", 3))
        blind = SimulatedDirectory(world.board, world.network, world.nodes["reader"], sees_lead=False)
        assert await blind.lead(RUN) is None
        assert await world.reader.lead(RUN) == lease("a", 3)

    run(main())


def test_what_is_read_and_by_whom_is_counted() -> None:
    async def main() -> None:
        world = World()
        seen = list[tuple[str, str]]()
        world.board.observers.append(lambda operation, node: seen.append((operation, node.machine.name)))
        await world.writer.announce(record("a"))
        await world.writer.announce(record("b"))
        await world.queues()
        assert world.board.operations == {"announce": 2, "peers": 1}
        assert list(world.board.read_bytes) == ["reader"]
        assert seen == [("announce", "writer"), ("announce", "writer"), ("peers", "reader")]

    run(main())


def test_a_killed_peers_record_stays_until_it_expires_and_a_stopped_ones_does_not() -> None:
    async def main() -> None:
        swarm = SimulatedSwarm(run_config(1, 4))
        reader = SimulatedDirectory(swarm.board, swarm.network, swarm.trainer_node())
        killed, stopped = swarm.start_peer("killed", 0), swarm.start_peer("stopped", 0)
        await asyncio.sleep(2.0)
        found = await reader.peers(swarm.config.hash, 0)
        assert [record.peer for record in found] == [killed, stopped]
        swarm.kill_peer(killed)
        swarm.stop_peer(stopped)
        await asyncio.sleep(1.0)
        assert not swarm.peers
        assert [record.peer for record in await reader.peers(swarm.config.hash, 0)] == [killed]
        await asyncio.sleep(30.0)
        assert await reader.peers(swarm.config.hash, 0) == []
        await swarm.close()

    run(main())
