"""Giving and fetching a stage's state: few copies at a time, nothing larger or slower than can be honest."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence

import pytest

from swarm import PROTOCOL_VERSION
from swarm.errors import Busy, TimedOut
from swarm.ids import Digest, PeerId, RunHash, SessionId
from swarm.messages import Contact, GradientRequest, ReducedMark, StateRequest
from swarm.policy.deadlines import LAN, WAN, transfer_deadline
from swarm.policy.sizes import most_state_bytes
from swarm.records import Lineage, PeerRecord, PeerState
from swarm.roles.donation import CHUNK_BYTES, DIGEST_BYTES, MOST_COPIES, Donation
from swarm.roles.seat import Seat
from swarm.sim.directory import SimulatedDirectory
from swarm.sim.executor import SimulatedExecutor
from swarm.sim.fuzz.run import run_config
from swarm.sim.loop import Process, VirtualClock, run
from swarm.sim.network import Node
from swarm.sim.numeric import NumericStage
from swarm.sim.swarm import SimulatedSwarm
from swarm.tensors import Buffer
from tests.stage_double import EchoStage

pytestmark = pytest.mark.fast

RUN = RunHash("ab" * 32)
STATE = StateRequest(run=RUN, stage=0)
BIG = bytes(2 * DIGEST_BYTES + 5)


class BigStage(NumericStage):
    """A stage whose state takes several jobs to digest."""

    def snapshot(self) -> tuple[str, Sequence[Buffer]]:
        return "", [BIG, b"tail"]


class CountingExecutor(SimulatedExecutor):
    """Counts its jobs."""

    jobs = 0

    async def _work(self) -> None:
        self.jobs += len(self._queue)
        await super()._work()


def donation() -> tuple[Donation, Seat, CountingExecutor]:
    contact = Contact(peer=PeerId("donor"), session=SessionId("0" * 16), endpoint="donor:1")
    seat = Seat(run=RUN, stage=0, contact=contact, clock=VirtualClock())
    seat.set_state(PeerState.READY)
    executor = CountingExecutor()
    return Donation(seat=seat, module=BigStage(0, 1), executor=executor, limits=LAN), seat, executor


def test_a_state_is_digested_and_sent_in_pieces() -> None:
    async def main() -> None:
        donor, _, executor = donation()
        head, data = await donor.fetch_state(STATE)
        pieces = [bytes(memoryview(piece)) async for piece in data]
        assert b"".join(pieces) == BIG + b"tail"
        assert head.total_bytes == len(BIG) + 4
        assert head.digest == hashlib.sha256(BIG + b"tail").hexdigest()
        assert max(map(len, pieces)) == CHUNK_BYTES
        assert executor.jobs == 1 + 3  # the copy, three pieces of the large buffer, the small one beside the last

    run(main())


def test_a_donor_makes_few_copies_at_a_time() -> None:
    """Places come back at the end of a transfer, at its close and when its maker was cancelled."""

    async def main() -> None:
        donor, _, _ = donation()
        outcomes = await asyncio.gather(*(donor.fetch_state(STATE) for _ in range(5)), return_exceptions=True)
        given = [outcome for outcome in outcomes if isinstance(outcome, tuple)]
        refused = [outcome for outcome in outcomes if isinstance(outcome, Busy)]
        assert (len(given), len(refused)) == (MOST_COPIES, 5 - MOST_COPIES)
        assert all(busy.retry_after_seconds > 0 for busy in refused)
        with pytest.raises(Busy):
            await donor.fetch_state(STATE)
        async for _ in given[0][1]:
            pass
        _, third = await donor.fetch_state(STATE)
        await third.aclose()  # type: ignore[attr-defined]  # before a single step
        made = asyncio.create_task(donor.fetch_state(STATE))
        await asyncio.sleep(0)
        made.cancel()
        await asyncio.wait({made})
        await donor.fetch_state(STATE)
        with pytest.raises(Busy):
            await donor.fetch_state(STATE)

    run(main())


def test_a_reader_that_takes_too_long_is_ended_and_its_place_is_free() -> None:
    async def main() -> None:
        donor, seat, _ = donation()
        transfers = [(await donor.fetch_state(STATE))[1] for _ in range(MOST_COPIES)]
        for transfer in transfers:
            await anext(transfer)
        seconds = transfer_deadline(LAN, most_state_bytes(donor._module.gradient_bytes), 1.0)
        await asyncio.sleep(seconds - 5)
        with pytest.raises(Busy):
            await donor.fetch_state(STATE)
        await anext(transfers[0])
        await asyncio.sleep(6)
        for _ in range(MOST_COPIES):
            await donor.fetch_state(STATE)
        for transfer in transfers:
            with pytest.raises(TimedOut, match=f"longer than {seconds:.0f} s"):
                await anext(transfer)
        digest = donor._module.set_reduced((1, 2, 3))[0]
        seat.kept = (seat.lineage, ReducedMark(attempt=0, digest=digest, squared_norm=1.0))
        request = GradientRequest(run=RUN, stage=0, parent=Lineage.root(RUN), digest=digest)
        gradient = await donor.fetch_gradient(request)
        await asyncio.sleep(WAN.reduce_floor_seconds)
        with pytest.raises(TimedOut):
            await anext(gradient)

    run(main())


class SlowStage(EchoStage):
    """Sends a byte every now and then."""

    async def _data(self) -> AsyncIterator[Buffer]:
        for _ in range(self.state_repeats):
            await asyncio.sleep(1.0)
            yield b"x"


LIE = most_state_bytes(NumericStage(0, 1).gradient_bytes) + 1


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        (EchoStage(state_chunks=(bytes(8),), state_bytes=LIE), f"a state of {LIE} bytes"),
        (SlowStage(state_repeats=50, state_bytes=50), "did not come within"),
    ],
)
def test_a_state_that_is_too_large_or_too_slow_is_given_up(stage: EchoStage, reason: str) -> None:
    """Of the second donor no pause is too long, only the whole."""

    async def main() -> None:
        swarm = SimulatedSwarm(run_config(1, 1))
        liar = Contact(peer=PeerId("liar"), session=SessionId("liar#1"), endpoint="liar:1")
        node = Node(machine=swarm.network.machine("liar"), process=Process(liar.session), contact=liar, service=stage)
        swarm.network.join(node)
        record = PeerRecord(
            peer=liar.peer,
            session=liar.session,
            run=swarm.config.hash,
            protocol=PROTOCOL_VERSION,
            stage=0,
            endpoint=liar.endpoint,
            state=PeerState.READY,
            lineage=Lineage(generation=0, length=3, chain=Digest("cd" * 32)),
            forward_seconds=0.1,
            queue=0,
            numeric_class="simulated",
        )
        await SimulatedDirectory(swarm.board, swarm.network, node, lifetime_seconds=1000).announce(record)
        swarm.start_peer("newcomer", 0)
        await asyncio.sleep(60)
        reasons = [fields["reason"] for _, kind, fields in swarm.journal.events if kind == "donor_failed"]
        assert len(reasons) == 1
        assert reason in reasons[0]

    run(main())
