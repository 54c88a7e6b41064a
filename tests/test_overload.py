"""More work than a real peer can do: it says so at once, stays reachable, and is as before when it is over.

grpc/grpc#7052, grpc/grpc#8616.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from peers.local.children import Children
from swarm.config import RunConfig, load
from swarm.data.text import TextBatches
from swarm.dht.directory import RECORD_TTL_SECONDS, HivemindDirectory
from swarm.dht.node import start_node
from swarm.errors import Busy, TimedOut
from swarm.ids import MicrobatchId, PeerId
from swarm.messages import Contact, ForwardRequest, Greeting, MicrobatchCall, StepKey
from swarm.records import Lineage, PeerRecord, PeerState, Term
from swarm.rpc.client import GrpcStageCalls
from tests.fault_swarm import FaultSwarm, options_for, run_file
from tests.test_forks import OnlyPeers

pytestmark = pytest.mark.swarm

CALLERS = 64
LOAD_SECONDS = 6.0
DEADLINE_SECONDS = 1.0
BUSY_SECONDS = 0.1
"""Between two tries of a caller that was told so; a trainer goes to another peer."""
ANSWER_SECONDS = 2.0
"""Within which whatever is not work is answered."""


def test_sixty_four_callers_at_one_peer(tmp_path: Path) -> None:
    path = run_file(tmp_path, stages=1)
    config = load(path)

    async def main() -> None:
        async with Children(tmp_path / "logs") as children:
            swarm = OnlyPeers(options_for(path, tmp_path / "logs", (1,), 1), children, {})
            # A forward takes a tenth of a second or so.
            swarm.extra = {"peer-0-0": ["--emulate-slowness", "40"]}
            await swarm.start()
            await scene(config, swarm)

    asyncio.run(main())


async def scene(config: RunConfig, swarm: FaultSwarm) -> None:
    node = await start_node(join=[swarm._address], client=True)
    calls = GrpcStageCalls()
    try:
        directory = HivemindDirectory(node)
        await directory.publish_run(config)
        record = await ready_peer(config, directory, swarm)
        process = psutil.Process(swarm.peers[0].child.process)
        caller = Caller(config, calls, record)
        await caller.forward(30.0)
        before = process.memory_info().rss
        answers: Counter[str] = Counter()
        until = time.monotonic() + LOAD_SECONDS
        async with asyncio.TaskGroup() as tasks:
            for number in range(CALLERS):
                # Some have hardly any time left when they arrive.
                seconds = 0.01 if number % 8 == 0 else DEADLINE_SECONDS
                tasks.create_task(caller.flood(seconds, until, answers))
            waits = tasks.create_task(caller.ask(until))
            ages = tasks.create_task(watch_record(config, directory, until))
        peak = process.memory_info().rss
        print(dict(answers), f"slowest answer {max(waits.result()):.2f} s, {(peak - before) >> 20} MiB more")
        assert len(waits.result()) >= 3
        assert max(waits.result()) < ANSWER_SECONDS
        assert all(ages.result())  # the record never was missing
        assert set(answers) <= {"done", "busy", "timed out"}
        assert answers["busy"] > answers["done"] > 0
        assert peak - before < 200 << 20
        # It's over: the next call is served as the first was.
        async with asyncio.timeout(10):
            while await caller.outcome(5.0) != "done":
                pass
        assert swarm.peers[0].child.alive
    finally:
        await calls.close()
        await node.close()


class Caller:
    """Calls the peer as a lead does."""

    def __init__(self, config: RunConfig, calls: GrpcStageCalls, record: PeerRecord) -> None:
        self._calls = calls
        self._to = Contact(peer=record.peer, session=record.session, endpoint=record.endpoint)
        self._term = Term(1, PeerId("lead"))
        self._greeting = Greeting(run=config.hash, term=self._term)
        self._key = StepKey(run=config.hash, stage=0, term=self._term, lineage=Lineage.root(config.hash))
        self._inputs, _, _ = TextBatches(config).microbatch(0, MicrobatchId(0))

    async def forward(self, seconds: float) -> None:
        head = MicrobatchCall(
            key=self._key, microbatch=MicrobatchId(0), try_number=0, attempt=0, deadline_seconds=seconds
        )
        await self._calls.forward(self._to, ForwardRequest(call=head, inputs=self._inputs))

    async def outcome(self, seconds: float) -> str:
        try:
            await self.forward(seconds)
        except Busy:
            return "busy"
        except TimedOut:
            return "timed out"
        return "done"

    async def flood(self, seconds: float, until: float, answers: Counter[str]) -> None:
        while time.monotonic() < until:
            began = time.monotonic()
            answer = await self.outcome(seconds)
            answers[answer] += 1
            assert time.monotonic() - began < seconds + ANSWER_SECONDS
            if answer == "busy":
                await asyncio.sleep(BUSY_SECONDS)

    async def ask(self, until: float) -> list[float]:
        """What it takes to be told how the peer is, again and again."""
        waits = []
        while time.monotonic() < until:
            began = time.monotonic()
            report = await self._calls.greet(self._to, self._greeting, 10.0)
            waits.append(time.monotonic() - began)
            assert report.state is PeerState.READY
            await asyncio.sleep(0.5)
        return waits


async def ready_peer(config: RunConfig, directory: HivemindDirectory, swarm: FaultSwarm) -> PeerRecord:
    async with asyncio.timeout(60):
        while True:
            for record in await directory.peers(config.hash, 0):
                if record.state is PeerState.READY:
                    return record
            await swarm._wait(swarm.peers[0].child)


async def watch_record(config: RunConfig, directory: HivemindDirectory, until: float) -> list[bool]:
    """Whether the peer's record is there, again and again; longer than it lives without renewal is not needed."""
    assert LOAD_SECONDS < RECORD_TTL_SECONDS
    seen = []
    while time.monotonic() < until:
        async with asyncio.timeout(ANSWER_SECONDS):
            seen.append(bool(await directory.peers(config.hash, 0)))
        await asyncio.sleep(0.5)
    return seen
