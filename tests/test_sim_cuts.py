"""Calls of the simulated world between machines that are paused, cut off or slow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from swarm.errors import TimedOut
from swarm.ports import StageService
from swarm.sim.links import Link
from swarm.sim.loop import Process, run, world_later, world_seconds
from swarm.sim.machine import Machine
from swarm.sim.network import Cut, Node
from swarm.sim.weights import CONTROL_BYTES, Weights
from tests.network_world import World

pytestmark = pytest.mark.fast


# --- pauses -------------------------------------------------------------------------------


def test_a_paused_callee_answers_when_it_goes_on() -> None:
    async def main() -> None:
        world = World()
        node = world.start()
        node.process.pause()
        call = asyncio.create_task(world.call(seconds=10.0))
        await asyncio.sleep(4.0)
        assert world.arrived == 0
        node.process.resume()
        assert await call == "answer"
        assert world_seconds() == pytest.approx(4.11, abs=0.02)

    run(main())


def test_a_call_given_up_while_its_callee_was_paused_never_begins() -> None:
    async def main() -> None:
        world = World()
        node = world.start()
        node.process.pause()
        with pytest.raises(TimedOut):
            await world.call(seconds=1.0)
        node.process.resume()
        await asyncio.sleep(1.0)
        assert world.arrived == 0

    run(main())


def test_a_paused_donor_sends_nothing_until_it_goes_on_or_is_given_up() -> None:
    async def main() -> None:
        world = World()
        node = world.start()
        for pause_seconds, arrives in ((1.0, True), (5.0, False)):
            pieces = await world.stream(b"12345678", seconds=2.0)
            before = world_seconds()
            node.process.pause()
            world_later(pause_seconds, node.process.resume)
            if arrives:
                assert b"".join([bytes(piece) async for piece in pieces]) == b"12345678"
                assert world_seconds() - before == pytest.approx(1.0, abs=0.05)
            else:
                with pytest.raises(TimedOut):
                    await anext(pieces)

    run(main())


# --- cuts ---------------------------------------------------------------------------------


def test_messages_wait_while_machines_are_cut_off() -> None:
    async def main() -> None:
        world = World()
        world.start()
        world.network.cut(Cut(machines=frozenset({"p"})), 2.0)
        with pytest.raises(TimedOut):
            await world.call(seconds=1.0)
        assert world.arrived == 0
        assert await world.call(seconds=5.0) == "answer"
        assert world.arrived == 1
        assert world_seconds() == pytest.approx(2.11, abs=0.02)

    run(main())


@pytest.mark.parametrize(
    ("machine", "inward", "outward", "arrives_at"),
    [
        ("p", True, False, 3.0),  # the request waits
        ("p", False, True, 0.005),  # the answer waits
        ("t", False, True, 3.0),
        ("t", True, False, 0.005),
        ("elsewhere", True, True, None),
    ],
)
def test_a_cut_in_one_direction(machine: str, inward: bool, outward: bool, arrives_at: float | None) -> None:
    async def main() -> None:
        world = World()
        world.start()
        at = list[float]()

        async def work(service: StageService) -> str:
            at.append(world_seconds())
            return "answer"

        world.network.cut(Cut(machines=frozenset({machine}), inward=inward, outward=outward), 3.0)
        assert await world.call(work=work, seconds=10.0) == "answer"
        assert at == pytest.approx([arrives_at or 0.005], abs=0.01)
        assert world_seconds() == pytest.approx(3.0 if arrives_at else 0.01, abs=0.01)

    run(main())


def test_machines_on_the_same_side_of_a_cut_reach_each_other() -> None:
    async def main() -> None:
        world = World()
        world.start()
        world.network.cut(Cut(machines=frozenset({"p", "t"})), 100.0)
        assert await world.call() == "answer"
        assert world.network.blocked("p", "elsewhere")
        assert not world.network.blocked("p", "t")

    run(main())


def test_of_two_cuts_the_longer_counts() -> None:
    async def main() -> None:
        world = World()
        world.start()
        world.network.cut(Cut(machines=frozenset({"p"})), 2.0)
        world.network.cut(Cut(machines=frozenset({"t"})), 4.0)
        assert await world.call(seconds=10.0) == "answer"
        assert world_seconds() == pytest.approx(4.11, abs=0.02)

    run(main())


@pytest.mark.parametrize(("seconds", "whole"), [(1.0, True), (3.0, False)])
def test_a_stream_goes_on_after_a_short_cut_and_breaks_in_a_long_one(seconds: float, whole: bool) -> None:
    async def main() -> None:
        world = World()
        world.start()
        pieces = await world.stream(b"12345678", seconds=2.0)
        received = bytes(await anext(pieces))
        world.network.cut(Cut(machines=frozenset({"p"})), seconds)
        if whole:
            async for piece in pieces:
                received += piece
            assert received == b"12345678"
        else:
            with pytest.raises(TimedOut):
                await anext(pieces)

    run(main())


# --- what it costs ------------------------------------------------------------------------


def slow(name: str) -> Callable[[], Machine]:
    return lambda: Machine(name=name, up=Link(1000.0), down=Link(1000.0), latency_seconds=0.0)


def test_messages_and_streams_take_the_time_of_their_bytes() -> None:
    async def main() -> None:
        world = World(weights=Weights(state_bytes=(8000,)))
        world.caller = Node(machine=slow("t2")(), process=Process("t2#1"))
        world.start(machine=slow("p"))
        await world.call(seconds=10.0)
        assert world_seconds() == pytest.approx(2 * CONTROL_BYTES / 1000 + 0.1)
        before = world_seconds()
        assert b"".join([bytes(p) async for p in await world.stream(b"12345678", seconds=10.0)]) == b"12345678"
        assert world_seconds() - before == pytest.approx(2 * CONTROL_BYTES / 1000 + 8.0)
        sender, receiver = world.network.machines["p"], world.caller.machine
        assert (
            sender.sent_bytes
            == receiver.received_bytes
            == {"greet": CONTROL_BYTES, "fetch_state": CONTROL_BYTES + 8000}
        )
        assert receiver.sent_bytes == sender.received_bytes == {"greet": CONTROL_BYTES, "fetch_state": CONTROL_BYTES}

    run(main())


def test_a_message_given_up_gives_its_bandwidth_back() -> None:
    async def main() -> None:
        world = World()
        world.caller = Node(machine=slow("t2")(), process=Process("t2#1"))
        world.start(machine=slow("p"))
        with pytest.raises(TimedOut):
            await world.call(seconds=0.2)
        await asyncio.sleep(0.0)
        assert world.caller.machine.up.active == world.network.machines["p"].down.active == 0

    run(main())
