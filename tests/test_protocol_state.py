"""State: who fetches it, who keeps it, and when it is lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from swarm.errors import StateLost
from swarm.ids import PeerId
from swarm.messages import (
    Contact,
    Greeting,
)
from swarm.records import Lineage, PeerState, Term
from swarm.sim.lives import MemoryLog
from swarm.sim.swarm import SimulatedSwarm
from swarm.sim.weather import Call, Fate
from tests.protocol_script import BOUND_SECONDS, STEPS, kinds, once, play, train, until

pytestmark = pytest.mark.fast


def test_a_donor_dies_amid_its_state() -> None:
    async def then(swarm: SimulatedSwarm) -> None:
        await train(swarm, 2)
        swarm.start_peer("newcomer", 0)
        await train(swarm, 4)

    swarm = play((3, 1), once(lambda c: c.kind == "fetch_state", Fate(kill_amid_stream=True)), then)
    assert {"donor_failed", "state_fetched"} <= kinds(swarm)


def test_a_newcomer_one_behind_catches_up_by_the_reduced_gradient() -> None:
    async def then(swarm: SimulatedSwarm) -> None:
        await train(swarm, 1)
        swarm.start_peer("newcomer", 0)
        # Nobody offers it state, so that it starts at version 0.
        newcomer = swarm.peers[PeerId("newcomer")].peer
        newcomer.seat.set_state(PeerState.READY)
        await train(swarm, 3)
        assert newcomer.seat.lineage.length == 3
        assert swarm.network.calls["fetch_gradient"]
        assert "fetch_state" not in swarm.network.calls

    play((2, 1), then=then)


def test_both_peers_of_a_stage_die_before_any_commit() -> None:
    async def then(swarm: SimulatedSwarm) -> None:
        training = asyncio.create_task(swarm.make_trainer().run(STEPS))
        await until(swarm, lambda: bool(swarm.network.calls.get("backward")))
        assert not swarm.log.commits
        for name in ("p10", "p11"):
            swarm.kill_peer(PeerId(name))
        await asyncio.sleep(5.0)
        swarm.start_peer("another", 1)
        async with asyncio.timeout(BOUND_SECONDS):
            await training
        swarm.check_finished(STEPS)

    play((2, 2), then=then)


def test_both_peers_of_a_stage_die_after_a_commit() -> None:
    async def then(swarm: SimulatedSwarm) -> None:
        await train(swarm, 2)
        swarm.kill_peer(PeerId("p10"))
        swarm.kill_peer(PeerId("p11"))
        swarm.start_peer("another", 1)
        trainer = swarm.make_trainer(state_timeout_seconds=60.0)
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.timeout(100.0):
                await trainer.run(4)
        lost = caught.value.exceptions[0]
        assert isinstance(lost, StateLost)
        assert "stage 1" in str(lost)
        assert "step 1" in str(lost)
        swarm.invariants.check()

    play((2, 2), then=then)


def test_both_peers_of_a_stage_die_while_the_trainer_lives() -> None:
    async def then(swarm: SimulatedSwarm) -> None:
        training = asyncio.create_task(swarm.make_trainer(state_timeout_seconds=60.0).run(50))
        await until(swarm, lambda: len(swarm.log.commits) == 2)
        swarm.kill_peer(PeerId("p10"))
        swarm.kill_peer(PeerId("p11"))
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.timeout(120.0):
                await training
        assert "stage 1" in str(caught.value.exceptions[0])
        assert isinstance(caught.value.exceptions[0], StateLost)

    play((2, 2), then=then)


def test_the_lease_knows_of_commits_when_log_and_peers_are_gone() -> None:
    """Nothing starts again from the seed in silence, even if the trainer lost its own folder as well."""

    async def then(swarm: SimulatedSwarm) -> None:
        await train(swarm, 2)
        for name in ("p00", "p10"):
            swarm.kill_peer(PeerId(name))
        swarm.start_peer("new0", 0)
        swarm.start_peer("new1", 1)
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.timeout(100.0):
                await swarm.make_trainer(log=MemoryLog(), state_timeout_seconds=20.0).run(4)
        lost = caught.value.exceptions[0]
        assert isinstance(lost, StateLost)
        assert "step 1" in str(lost)

    play((1, 1), then=then)


def test_a_log_of_another_history_is_not_continued() -> None:
    async def then(swarm: SimulatedSwarm) -> None:
        await train(swarm, 2)
        *before, last = swarm.log.commits
        other = MemoryLog([*before, replace(last, losses=tuple(loss + 1 for loss in last.losses))])
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.timeout(100.0):
                await swarm.make_trainer(log=other, state_timeout_seconds=20.0).run(4)
        assert isinstance(caught.value.exceptions[0], StateLost)

    play((1, 1), then=then)


def test_who_missed_the_apply_applies_late() -> None:
    swarm = play((2, 1), once(lambda c: c.kind == "apply" and c.to.peer == "p00", Fate(lose_request=True)))
    assert "fetch_state" not in swarm.network.calls


def test_the_last_commit_is_brought_to_every_stage() -> None:
    def last(call: Call) -> bool:
        return call.kind == "apply" and call.to.peer == "p00" and call.request.commit.step == STEPS - 1

    play((1, 1), once(last, Fate(lose_request=True)))


def test_a_replica_that_differs_fetches_state() -> None:
    spoiled: list[PeerId] = []

    async def then(swarm: SimulatedSwarm) -> None:
        def spoil(call: Call) -> None:
            if call.kind == "apply" and call.to.peer == "p01" and not spoiled:
                life = swarm.peers[call.to.peer]
                spoiled.append(call.to.peer)
                life.trusted = False
                life.module.parameters = (1, 2, 3)

        def heal(call: Call, answer: object) -> None:
            if call.kind == "fetch_state" and call.caller == "p01":
                asyncio.get_running_loop().call_later(1.0, setattr, swarm.peers[PeerId("p01")], "trusted", True)

        swarm.network.before_call.append(spoil)
        swarm.network.after_call.append(heal)
        await train(swarm, 6)
        assert swarm.peers[PeerId("p01")].trusted
        swarm.invariants.check()

    swarm = play((3, 1), then=then)
    assert [f["peer"] for _, kind, f in swarm.journal.events if kind == "peer_diverged"] == ["p01"]
    assert "state_fetched" in kinds(swarm)


def test_a_late_greeting_does_not_turn_the_only_peer_back() -> None:
    """Its lead spoke of version t, the peer has applied t since: no donor could give it anything better."""

    async def then(swarm: SimulatedSwarm) -> None:
        await train(swarm, 2)
        assert "waiting_for_donor" not in kinds(swarm)

    play((1, 1), lambda c: Fate(late_copy_seconds=2.0) if c.kind == "greet" else None, then)


def test_contacts_of_an_earlier_life_are_refused() -> None:
    async def then(swarm: SimulatedSwarm) -> None:
        old = swarm.peers[PeerId("p00")].node.contact
        swarm.kill_peer(PeerId("p00"))
        swarm.start_peer("p00", 0)
        assert isinstance(old, Contact)
        assert swarm.peers[PeerId("p00")].node.contact != old
        await train(swarm)

    play((1, 1), then=then)


def test_a_peer_that_is_doubted_keeps_what_only_it_may_hold() -> None:
    """It was not finite twice, and then the only other peer of its stage dies: the run goes on with it."""

    async def then(swarm: SimulatedSwarm) -> None:
        await train(swarm, 1)
        doubted = swarm.peers[PeerId("p00")]
        training = asyncio.create_task(train(swarm, 3))
        doubted.module.sick_next = 2
        await until(swarm, lambda: "peer_diverged" in kinds(swarm))
        swarm.kill_peer(PeerId("p01"))
        await training

    swarm = play((2, 1), then=then)
    assert "state_fetched" not in kinds(swarm)


def test_a_lead_that_is_behind_turns_nobody_back() -> None:
    async def then(swarm: SimulatedSwarm) -> None:
        await train(swarm, 3)
        peer = swarm.peers[PeerId("p00")].peer
        behind = Greeting(run=swarm.config.hash, term=Term(99, PeerId("late")), lineage=Lineage.root(swarm.config.hash))
        assert (await peer.greet(behind)).lineage.length == 3
        assert peer.seat.state is PeerState.READY

    play((1,), then=then)
