"""The simulated executor, arithmetic and averager do what the tests assume, and a swarm knows whom it may kill."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from swarm.errors import BadRequest, ReduceFailed
from swarm.ids import MicrobatchId, PeerId, SessionId
from swarm.messages import Contact, GroupMember, ReduceRequest, StepKey
from swarm.ports import Draw, Priority
from swarm.records import Lineage, Term
from swarm.sim.arithmetic import PRIME, ZERO, NumericBatches, pack, train_step, unpack
from swarm.sim.averager import Meetings, SimulatedAverager
from swarm.sim.executor import SimulatedExecutor
from swarm.sim.fuzz.run import run_config
from swarm.sim.loop import Process, run, world_seconds
from swarm.sim.machine import Device
from swarm.sim.network import Cut, Network, Node
from swarm.sim.numeric import Broken, NumericStage
from swarm.sim.swarm import SimulatedSwarm

pytestmark = pytest.mark.fast


# --- executor -----------------------------------------------------------------------------


def test_jobs_run_one_at_a_time_in_order_of_priority_and_cancelled_ones_never() -> None:
    async def main() -> None:
        executor, order, device = SimulatedExecutor(), list[str](), Device(seconds_per_unit=1.0)

        def job(name: str) -> Callable[[], None]:
            return lambda: order.append(name)

        def take_time() -> None:
            device.compute(1.0)
            order.append("first")

        first = asyncio.create_task(executor.run(Priority.BACKWARD, take_time))
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


def test_a_job_that_computes_stands_still_in_the_middle_while_the_loop_goes_on() -> None:
    async def main() -> None:
        executor, device = SimulatedExecutor(), Device(seconds_per_unit=1.0)
        happened = list[str]()

        def job() -> str:
            happened.append("begun")
            device.compute(1.5)
            happened.append("half done")
            device.compute(2.0)
            happened.append("done")
            return "result"

        task = asyncio.create_task(executor.run(Priority.FORWARD, job))
        await asyncio.sleep(0.5)
        queued = asyncio.create_task(executor.run(Priority.CONTROL, lambda: device.compute(0.7)))
        await asyncio.sleep(0.5)
        for second in range(1, 5):
            happened.append(f"{second} s")
            assert executor.waiting == (2 if second < 4 else 1)
            await asyncio.sleep(1.0)
        assert await task == "result"
        await queued
        assert happened == ["begun", "1 s", "half done", "2 s", "3 s", "done", "4 s"]
        assert device.busy_seconds == pytest.approx(4.2)

    run(main())


def test_a_job_that_computes_takes_as_long_as_its_device_is_slow() -> None:
    async def main() -> None:
        executor, device = SimulatedExecutor(), Device(seconds_per_unit=2.0, slowness=3.0)

        def job() -> None:
            device.compute(0.5)
            device.slowness = 1.0
            device.compute(0.5)

        await executor.run(Priority.FORWARD, job)
        assert world_seconds() == pytest.approx(4.0)
        device.compute(100.0)  # not in a job: takes no time
        assert world_seconds() == pytest.approx(4.0)

    run(main())


def test_a_machine_that_dies_leaves_its_jobs_unfinished() -> None:
    async def main() -> None:
        executor, device = SimulatedExecutor(), Device(seconds_per_unit=1.0)
        happened = list[str]()

        def job() -> None:
            try:
                device.compute(5.0)
                happened.append("done")
            finally:
                happened.append("ended")

        tasks = [asyncio.create_task(executor.run(Priority.FORWARD, job)) for _ in range(2)]
        await asyncio.sleep(1.0)
        executor.die()
        await asyncio.sleep(60.0)
        assert happened == ["ended"]
        assert not any(task.done() for task in tasks)
        assert executor.waiting == 0

    run(main())


def test_a_job_stands_still_in_a_pause_of_its_process() -> None:
    async def main() -> None:
        process, executor, device = Process("p"), SimulatedExecutor(), Device(seconds_per_unit=1.0)
        task = process.spawn(executor.run(Priority.FORWARD, lambda: device.compute(2.0)))
        await asyncio.sleep(1.0)
        process.pause()
        await asyncio.sleep(9.0)
        assert not task.done()
        process.resume()
        await task
        assert world_seconds() == pytest.approx(10.0)

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


class Group:
    """Members of one all-reduce; member i contributes (i + 1, 0, 0)."""

    def __init__(self, *tokens: int) -> None:
        self.network = Network()
        self.meetings = Meetings()
        run_hash = run_config(1, 1).hash
        contacts = [
            Contact(peer=PeerId(f"p{i}"), session=SessionId("s"), endpoint=f"p{i}:1") for i in range(len(tokens))
        ]
        self.nodes = [Node(machine=self.network.machine(c.peer), process=Process(c.peer), contact=c) for c in contacts]
        self.request = ReduceRequest(
            key=StepKey(run=run_hash, stage=0, term=Term(1, PeerId("t")), lineage=Lineage.root(run_hash)),
            attempt=0,
            members=tuple(
                GroupMember(contact=c, microbatches=(), tokens=t) for c, t in zip(contacts, tokens, strict=True)
            ),
            total_tokens=sum(tokens),
            deadline_seconds=10.0,
        )

    def start(self, index: int) -> asyncio.Task[object]:
        node = self.nodes[index]
        averager = SimulatedAverager(self.meetings, self.network, node)
        return node.process.spawn(averager.reduce(self.request, [index + 1, 0, 0]))


def test_a_member_that_dies_or_is_cut_off_in_the_middle_is_named() -> None:
    async def main(how: str) -> None:
        group = Group(1, 1, 1)
        tasks = [group.start(index) for index in range(3)]
        await asyncio.sleep(0.01)
        if how == "dies":
            group.network.leave(group.nodes[2])
            tasks[2].cancel()
        else:
            group.network.cut(Cut(machines=frozenset({"p2"})), 60.0)
        first, second, _ = await asyncio.gather(*tasks, return_exceptions=True)
        for error in (first, second):
            assert isinstance(error, ReduceFailed)
            assert error.unreachable == ("p2",)

    for how in ("dies", "is cut off"):
        run(main(how))


def test_a_result_is_lost_on_the_way_to_one_member() -> None:
    async def main() -> None:
        group = Group(1, 1)
        group.meetings.loses = lambda peer: peer == "p1"
        first, second = group.start(0), group.start(1)
        with pytest.raises(ReduceFailed, match="lost"):
            await second
        assert await first == tuple(v * pow(2, -1, PRIME) % PRIME for v in (3, 0, 0))

    run(main())


def test_a_member_that_computes_its_result_late_has_the_others_sums_as_they_were() -> None:
    """The others may go on, and throw their sums away, while a member is paused."""

    async def main() -> None:
        group = Group(1, 1)
        averagers = [SimulatedAverager(group.meetings, group.network, node) for node in group.nodes]
        sums = [[1, 0, 0], [2, 0, 0]]

        def pause_the_other(peer: PeerId) -> bool:
            if peer == "p0":
                group.nodes[1].process.pause()
            return False

        group.meetings.loses = pause_the_other
        tasks = [
            node.process.spawn(averager.reduce(group.request, total))
            for node, averager, total in zip(group.nodes, averagers, sums, strict=True)
        ]
        first = await tasks[0]
        sums[0][:] = [0, 0, 0]
        await asyncio.sleep(1.0)
        assert not tasks[1].done()
        group.nodes[1].process.resume()
        assert await tasks[1] == first

    run(main())


# --- the swarm ----------------------------------------------------------------------------


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
