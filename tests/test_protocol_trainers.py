"""Trainers that die, come back, and meet each other."""

from __future__ import annotations

import asyncio

import pytest

from swarm.ids import PeerId
from swarm.records import Term
from swarm.sim.fuzz.operator import superseded
from swarm.sim.lives import MemoryLog
from swarm.sim.swarm import SimulatedSwarm
from swarm.sim.weather import Call, Fate
from tests.protocol_script import BOUND_SECONDS, STEPS, Script, play, train

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("moment", ["freeze", "reduce", "apply"])
@pytest.mark.parametrize("heard", [False, True])
def test_the_trainer_dies_and_comes_back(moment: str, heard: bool, empty: bool) -> None:
    async def then(swarm: SimulatedSwarm) -> None:
        task = asyncio.create_task(swarm.make_trainer().run(STEPS))

        def kill(call: Call) -> None:
            if call.kind == moment and call.request.key.step == 1:
                task.cancel()

        def kill_after(call: Call, answer: object) -> None:
            kill(call)

        if heard:
            swarm.network.after_call.append(kill_after)
        else:
            swarm.network.before_call.append(kill)
        with pytest.raises(asyncio.CancelledError):
            await task
        swarm.network.before_call[1:] = []
        swarm.network.after_call[1:] = []
        log = MemoryLog() if empty else MemoryLog(list(swarm.log.commits))
        async with asyncio.timeout(BOUND_SECONDS):
            await swarm.make_trainer(log=log).run(STEPS)
        swarm.check_finished(STEPS)

    play((2, 2), then=then)


def test_a_commit_that_one_peer_has_applied_is_completed() -> None:
    """The first peer to apply step 1 is the only one that hears of it before the trainer dies."""

    async def then(swarm: SimulatedSwarm) -> None:
        task = asyncio.create_task(swarm.make_trainer().run(STEPS))
        commits = []

        def only_one(call: Call) -> Fate | None:
            if call.kind != "apply" or call.request.commit.step != 1 or task.done():
                return None
            return Fate(lose_request=call.to.peer != "p00")

        def kill(call: Call, answer: object) -> None:
            if call.kind == "apply" and call.request.commit.step == 1 and not task.done():
                commits.append(call.request.commit)
                task.cancel()

        assert isinstance(swarm.network.weather, Script)
        swarm.network.weather.decide = only_one
        swarm.network.after_call.append(kill)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(swarm.log.commits) == 1
        await train(swarm)
        assert swarm.log.commits[1] == commits[0]

    play((2, 2), then=then)


def test_a_second_trainer_supersedes_the_first() -> None:
    async def then(swarm: SimulatedSwarm) -> None:
        async def first(log: MemoryLog) -> MemoryLog:
            await swarm.make_trainer("first", log=log).run(50)
            return log

        task = asyncio.create_task(first(swarm.log))
        await asyncio.sleep(3.0)
        second = swarm.make_trainer("second", log=MemoryLog(), sees_lead=False)
        async with asyncio.timeout(BOUND_SECONDS):
            await second.run(8)
            await asyncio.wait({task})
        assert superseded(task)
        swarm.check_finished(8)

    play((2, 2), then=then)


def test_a_second_trainer_that_sees_the_lease_does_not_start() -> None:
    async def then(swarm: SimulatedSwarm) -> None:
        log = swarm.log
        task = asyncio.create_task(swarm.make_trainer("first").run(12))
        await asyncio.sleep(3.0)
        second = asyncio.create_task(swarm.make_trainer("second", log=MemoryLog()).run(STEPS))
        await asyncio.wait({second})
        assert isinstance(second.exception(), Exception)
        assert "first leads" in str(second.exception())
        await task
        swarm.log = log
        swarm.check_finished(12)

    play((2, 2), then=then)


def test_another_life_of_the_same_trainer_leads_under_another_term() -> None:
    """The first life hangs, its lease is lost and so is its log: only peers know its term."""

    async def then(swarm: SimulatedSwarm) -> None:
        task = asyncio.create_task(swarm.make_trainer("same", log=MemoryLog()).run(50))
        await asyncio.sleep(3.0)
        known = max(life.peer.seat.term for life in swarm.peers.values())
        async with asyncio.timeout(BOUND_SECONDS):
            await swarm.make_trainer("same", log=MemoryLog(), sees_lead=False).run(8)
        assert all(life.peer.seat.term > known for life in swarm.peers.values())
        await asyncio.wait({task})
        assert isinstance(task.exception(), ExceptionGroup)
        swarm.check_finished(8)

    play((1, 1), then=then)


def test_a_trainer_goes_beyond_whatever_term_it_finds() -> None:
    async def then(swarm: SimulatedSwarm) -> None:
        seat = swarm.peers[PeerId("p00")].peer.seat
        seat.follow(Term(900_000, PeerId("stranger")))
        await train(swarm)
        assert seat.term.number > 900_000

    play((1, 1), then=then)
