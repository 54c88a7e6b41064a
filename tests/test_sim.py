"""The simulated world itself: time, network, executor, directory and averager do what the tests assume."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from swarm.errors import BadRequest, PeerFailed, ReduceFailed, SwarmError, TimedOut, Unreachable, WrongRun
from swarm.ids import MicrobatchId, PeerId, SessionId
from swarm.messages import Contact, GroupMember, ReduceRequest, StepKey
from swarm.ports import Draw, Priority, StageService
from swarm.records import Lineage, Term
from swarm.sim.averager import Meetings, SimulatedAverager
from swarm.sim.executor import SimulatedExecutor
from swarm.sim.loop import Deadlock, run
from swarm.sim.network import Call, Fate, Network, Node
from swarm.sim.numeric import PRIME, ZERO, Broken, NumericBatches, NumericStage, pack, train_step, unpack
from swarm.sim.swarm import SimulatedSwarm
from swarm.tensors import Buffer
from tests.protocol_driver import run_config

pytestmark = pytest.mark.fast

CONTACT = Contact(peer=PeerId("p"), session=SessionId("p#1"), endpoint="p:1")


# --- time -------------------------------------------------------------------------------


def test_time_is_virtual() -> None:
    async def main() -> float:
        await asyncio.sleep(1e6)
        return asyncio.get_running_loop().time()

    started = time.monotonic()
    assert run(main()) == pytest.approx(1e6)
    assert time.monotonic() - started < 5.0


def test_a_wait_without_a_deadline_is_a_deadlock() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(main())


# --- network ------------------------------------------------------------------------------


class Fixed:
    def __init__(self, fate: Fate) -> None:
        self._fate = fate

    def fate(self, call: Call) -> Fate:
        return self._fate


class World:
    """One node whose calls are given as functions."""

    def __init__(self, fate: Fate) -> None:
        self.network = Network(Fixed(fate))
        self.arrived = 0
        self.node: Node | None = None

    def start(self) -> None:
        # No call of these tests reaches for the service: each brings its own work.
        service: StageService = None  # type: ignore[assignment]
        self.node = self.network.join(CONTACT, service, self.kill)

    def kill(self) -> None:
        assert self.node is not None
        self.network.leave(self.node)

    async def work(self, service: StageService) -> str:
        self.arrived += 1
        await asyncio.sleep(0.1)
        return "answer"

    async def call(
        self, to: Contact = CONTACT, work: Callable[[StageService], Awaitable[str]] | None = None, seconds: float = 1.0
    ) -> str:
        call = Call(kind="greet", caller="t", to=to, request=None)
        return await self.network.call(call, seconds, work or self.work)


def outcome(fate: Fate, after_seconds: float = 20.0) -> tuple[str | type[SwarmError], int]:
    """What the caller of one call gets, and how often the callee was reached."""

    async def main() -> tuple[str | type[SwarmError], int]:
        world = World(fate)
        world.start()
        try:
            answer: str | type[SwarmError] = await world.call()
        except SwarmError as error:
            answer = type(error)
        await asyncio.sleep(after_seconds)
        return answer, world.arrived

    return run(main())


@pytest.mark.parametrize(
    ("fate", "answer", "arrived"),
    [
        (Fate(), "answer", 1),
        (Fate(lose_request=True), TimedOut, 0),
        (Fate(lose_reply=True), TimedOut, 1),
        (Fate(request_seconds=2.0), TimedOut, 0),
        (Fate(reply_seconds=2.0), TimedOut, 1),
        (Fate(repeat=True), "answer", 2),
        (Fate(late_copy_seconds=9.0), "answer", 2),
        (Fate(lose_request=True, late_copy_seconds=9.0), TimedOut, 1),
        (Fate(kill_before=True), Unreachable, 0),
        (Fate(kill_after=True), Unreachable, 1),
    ],
)
def test_fates(fate: Fate, answer: str | type[SwarmError], arrived: int) -> None:
    assert outcome(fate) == (answer, arrived)


def test_calls_to_nobody_and_to_an_earlier_life() -> None:
    async def main() -> None:
        world = World(Fate())
        with pytest.raises(Unreachable):
            await world.call()
        world.start()
        with pytest.raises(WrongRun):
            await world.call(Contact(peer=PeerId("p"), session=SessionId("p#0"), endpoint="p:1"))

    run(main())


def test_an_unforeseen_error_reaches_the_caller_as_a_failure_of_the_peer_and_is_kept() -> None:
    async def main() -> None:
        async def broken(service: StageService) -> str:
            raise KeyError("oops")

        world = World(Fate())
        world.start()
        with pytest.raises(PeerFailed, match="KeyError"):
            await world.call(work=broken)
        assert [type(error) for error in world.network.failures] == [KeyError]

    run(main())


def test_a_death_breaks_the_calls_that_run() -> None:
    async def main() -> None:
        world = World(Fate())
        world.start()
        asyncio.get_running_loop().call_later(0.05, world.kill)
        with pytest.raises(Unreachable):
            await world.call()

    run(main())


def test_a_caller_that_is_cancelled_with_its_callee_stays_cancelled() -> None:
    async def main() -> None:
        world = World(Fate())
        world.start()
        caller = asyncio.create_task(world.call())
        await asyncio.sleep(0.05)
        world.kill()
        caller.cancel()
        await asyncio.wait({caller})
        assert caller.cancelled()

    run(main())


@pytest.mark.parametrize("dies", [False, True])
def test_a_stream_breaks_when_its_sender_dies(dies: bool) -> None:
    async def main() -> bytes:
        async def chunks() -> AsyncIterator[Buffer]:
            yield b"12345678"

        async def work(service: StageService) -> tuple[int, AsyncIterator[Buffer]]:
            return 8, chunks()

        world = World(Fate(kill_amid_stream=dies))
        world.start()
        call = Call(kind="fetch_state", caller="t", to=CONTACT, request=None)
        _, pieces = await world.network.stream(call, 1.0, work)
        received = bytearray()
        try:
            async for piece in pieces:
                received += piece
        except Unreachable:
            received += b"!"
        return bytes(received)

    assert run(main()) == (b"1234!" if dies else b"12345678")


# --- executor -----------------------------------------------------------------------------


def test_jobs_run_one_at_a_time_in_order_of_priority_and_cancelled_ones_never() -> None:
    async def main() -> None:
        executor, order = SimulatedExecutor(), list[str]()

        def job(name: str) -> Callable[[], None]:
            return lambda: order.append(name)

        first = asyncio.create_task(executor.run(Priority.BACKWARD, job("first")))
        await asyncio.sleep(0.01)
        tasks = [
            asyncio.create_task(executor.run(priority, job(priority.name)))
            for priority in (Priority.BACKGROUND, Priority.FORWARD, Priority.CONTROL)
        ]
        cancelled = asyncio.create_task(executor.run(Priority.CONTROL, job("cancelled")))
        await asyncio.sleep(0.01)
        assert executor.waiting == 5
        cancelled.cancel()
        await asyncio.gather(first, *tasks)
        assert order == ["first", "CONTROL", "FORWARD", "BACKGROUND"]
        assert executor.waiting == 0

    run(main())


# --- arithmetic ---------------------------------------------------------------------------


def test_a_stage_computes_what_the_truth_does() -> None:
    stage, batches = NumericStage(0, 1), NumericBatches()
    for index in range(4):
        draw = Draw(step=0, microbatch=MicrobatchId(index))
        inputs, targets, _ = batches.microbatch(0, draw.microbatch)
        stage.accumulate(stage.backward(draw, inputs, targets))
    weight = sum(batches.microbatch(0, MicrobatchId(m))[2] for m in range(4))
    before = stage.parameters
    stage.set_reduced(tuple(v * pow(weight, -1, PRIME) % PRIME for v in stage.gradient_sum()))
    stage.apply(0, 1.0)
    assert [stage.parameters] == train_step([before], 0, [MicrobatchId(m) for m in range(4)])[0]
    assert stage.parameters != train_step([before], 0, [MicrobatchId(m) for m in range(3)])[0][0]


def test_an_addition_that_breaks_leaves_the_sum_half_changed_until_it_is_dropped() -> None:
    stage = NumericStage(0, 1)
    stage.breaks.add(MicrobatchId(1))
    inputs, targets, _ = NumericBatches().microbatch(0, MicrobatchId(1))
    gradient = stage.backward(Draw(step=0, microbatch=MicrobatchId(1)), inputs, targets)
    with pytest.raises(Broken):
        stage.accumulate(gradient)
    assert tuple(stage.gradient_sum()) != ZERO
    stage.drop_gradient()
    assert tuple(stage.gradient_sum()) == ZERO
    stage.accumulate(gradient)
    assert tuple(stage.gradient_sum()) == gradient.handle[1]


def test_tensors_of_another_form_are_refused() -> None:
    assert unpack(pack([1, 2, 3])) == (1, 2, 3)
    with pytest.raises(BadRequest):
        unpack(pack([1, 2]))


# --- averager -----------------------------------------------------------------------------


def reduce_among(*tokens: int, total: int | None = None, come: int | None = None) -> list[object]:
    """What each of those who come gets; member i contributes (i + 1, 0, 0)."""

    async def main() -> list[object]:
        meetings = Meetings()
        contacts = [
            Contact(peer=PeerId(f"p{i}"), session=SessionId("s"), endpoint=f"p{i}:1") for i in range(len(tokens))
        ]
        request = ReduceRequest(
            key=StepKey(
                run=run_config(1, 1).hash,
                stage=0,
                term=Term(1, PeerId("t")),
                lineage=Lineage.root(run_config(1, 1).hash),
            ),
            attempt=0,
            members=tuple(
                GroupMember(contact=c, microbatches=(), tokens=t) for c, t in zip(contacts, tokens, strict=True)
            ),
            total_tokens=sum(tokens) if total is None else total,
            deadline_seconds=10.0,
        )
        results: list[object] = await asyncio.gather(
            *(
                SimulatedAverager(meetings, contact).reduce(request, [i + 1, 0, 0])
                for i, contact in enumerate(contacts[:come])
            ),
            return_exceptions=True,
        )
        return results

    return run(main())


def test_an_average() -> None:
    assert reduce_among(1, 1, 1) == [(2, 0, 0)] * 3
    assert reduce_among(1, 0) == [(3, 0, 0)] * 2


def test_a_member_that_does_not_come_is_named() -> None:
    (error,) = reduce_among(1, 1, come=1)
    assert isinstance(error, ReduceFailed)
    assert error.unreachable == ("p1",)


def test_a_wrong_weight_is_no_result() -> None:
    assert all(isinstance(error, ReduceFailed) for error in reduce_among(1, 1, total=3))


# --- directory ----------------------------------------------------------------------------


def test_a_killed_peers_record_stays_until_it_expires() -> None:
    async def main() -> None:
        swarm = SimulatedSwarm(run_config(1, 4))
        peer = swarm.start_peer("p", 0)
        await asyncio.sleep(2.0)
        assert [key[2] for key in swarm.board.peers] == [peer]
        swarm.kill_peer(peer)
        await asyncio.sleep(1.0)
        assert not swarm.peers
        assert [key[2] for key in swarm.board.peers] == [peer]
        await swarm.close()

    run(main())


def test_the_last_who_holds_a_state_may_not_be_killed() -> None:
    async def main() -> None:
        swarm = SimulatedSwarm(run_config(1, 4))
        first, second = swarm.start_peer("a", 0), swarm.start_peer("b", 0)
        await asyncio.sleep(2.0)
        assert swarm.may_kill(first)
        assert swarm.may_kill(second)
        swarm.kill_peer(second)
        assert not swarm.may_kill(first)
        await swarm.close()

    run(main())
