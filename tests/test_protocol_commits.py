"""Reduces and updates: lost, late, half done, not finite, and overtaken."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from swarm.errors import Frozen
from swarm.ids import MicrobatchId, PeerId
from swarm.messages import (
    BackwardRequest,
    DropRequest,
    FreezeRequest,
    Greeting,
    GroupMember,
    MicrobatchCall,
    ReduceRequest,
    StepKey,
    VoidRequest,
)
from swarm.records import Lineage, Term
from swarm.sim.arithmetic import NumericBatches
from swarm.sim.fuzz.operator import superseded
from swarm.sim.swarm import SimulatedSwarm
from swarm.sim.weather import Call, Fate
from tests.protocol_script import STEPS, kinds, play, train, until

pytestmark = pytest.mark.fast


def test_members_that_lose_the_result_are_given_it() -> None:
    def prepare(swarm: SimulatedSwarm) -> None:
        swarm.meetings.loses = lambda peer: peer == "p01"

    swarm = play((3, 1), prepare=prepare)
    assert swarm.network.calls["adopt"] == STEPS


def test_if_all_lose_the_result_the_next_attempt_runs() -> None:
    def prepare(swarm: SimulatedSwarm) -> None:
        losers = iter([True] * 4)
        swarm.meetings.loses = lambda peer: peer[1] == "0" and next(losers, False)

    swarm = play((2, 1), prepare=prepare)
    assert swarm.log.commits[0].stages[0].attempt == 2


def test_a_member_that_never_comes_is_left_out_and_what_it_held_is_repaired() -> None:
    swarm = play((3, 1), lambda c: Fate(lose_request=True) if c.kind == "reduce" and c.to.peer == "p01" else None)
    assert {"fenced", "repaired"} <= kinds(swarm)
    assert "p01" not in swarm.log.commits[0].stages[0].members


def test_a_reduce_that_arrives_late_does_not_end_the_one_that_runs() -> None:
    play((2, 1), lambda c: Fate(late_copy_seconds=0.02, repeat=True) if c.kind == "reduce" else None)


def test_an_update_that_breaks_half_way_is_not_made_twice() -> None:
    def prepare(swarm: SimulatedSwarm) -> None:
        module = swarm.peers[PeerId("p10")].module
        real = module.apply

        def apply(step: int, clip_factor: float) -> float:
            module.apply = real  # type: ignore[method-assign]
            module.parameters = (7, 7, 7)
            raise MemoryError("in the middle of the update")

        module.apply = apply  # type: ignore[method-assign]

    swarm = play((2, 2), prepare=prepare)
    fetched = [fields for _, kind, fields in swarm.journal.events if kind == "state_fetched"]
    assert [fields["stage"] for fields in fetched] == [1]


def test_a_commit_that_was_noted_and_applied_by_nobody_is_completed() -> None:
    cut_off = [True]

    def lose_applies(call: Call) -> Fate | None:
        lost = cut_off[0] and call.kind == "apply" and call.request.key.step == 1
        return Fate(lose_request=True) if lost else None

    async def then(swarm: SimulatedSwarm) -> None:
        first = asyncio.create_task(swarm.make_trainer().run(STEPS))
        await until(swarm, lambda: len(swarm.log.commits) == 2)
        first.cancel()
        await asyncio.wait({first})
        assert {life.peer.seat.lineage.length for life in swarm.peers.values()} == {1}
        cut_off[0] = False
        await train(swarm)
        assert swarm.log.commits[1].term.number < swarm.log.commits[2].term.number

    play((2, 2), lose_applies, then=then)


def test_a_new_term_ends_the_reduce_that_reads_the_sum() -> None:
    async def then(swarm: SimulatedSwarm) -> None:
        await train(swarm, 1)
        life = swarm.peers[PeerId("p00")]
        old = StepKey(run=swarm.config.hash, stage=0, term=Term(50, PeerId("a")), lineage=life.peer.seat.lineage)
        members = tuple(
            GroupMember(contact=each.peer.seat.contact, microbatches=(), tokens=int(each is not life))
            for each in swarm.peers.values()
        )
        request = ReduceRequest(
            key=old, attempt=0, members=members, total_tokens=len(members) - 1, deadline_seconds=60.0
        )
        reducing = asyncio.create_task(life.peer.reduce(request))
        await asyncio.sleep(1.0)
        new = replace(old, term=Term(51, PeerId("b")))
        await life.peer.void(VoidRequest(key=new, microbatch=MicrobatchId(0), below_try=1))
        with pytest.raises(Frozen):
            await reducing

    play((2,), then=then)


def test_a_sum_that_is_not_finite_is_dropped_and_made_again() -> None:
    """At all members at once it might be the run that diverges; the second time it is said so."""

    async def then(swarm: SimulatedSwarm) -> None:
        spoiled = list[str]()

        def spoil(call: Call) -> None:
            life = swarm.peers[call.to.peer]
            if call.kind == "reduce" and call.to.peer not in spoiled:
                spoiled.append(call.to.peer)
                life.module.spoil()

        swarm.network.before_call.append(spoil)
        await train(swarm)
        assert len(spoiled) == len(swarm.peers)

    swarm = play((2, 1), then=then)
    assert all(not commit.excluded for commit in swarm.log.commits)


def test_a_drop_that_comes_late_does_not_touch_a_sum_that_is_being_averaged() -> None:
    """Its peer was fenced, let back in by another drop, and has closed a later attempt since."""

    async def then(swarm: SimulatedSwarm) -> None:
        await asyncio.sleep(5.0)  # both have found that they begin
        first, second = (swarm.peers[PeerId(name)].peer for name in ("p00", "p01"))
        key = StepKey(run=swarm.config.hash, stage=0, term=Term(1, PeerId("t")), lineage=first.seat.lineage)
        late = DropRequest(key=key, attempt=0)
        await first.drop(late)
        members = []
        for number, peer in enumerate((first, second)):
            inputs, targets, tokens = NumericBatches().microbatch(0, MicrobatchId(number))
            call = MicrobatchCall(
                key=key, microbatch=MicrobatchId(number), try_number=0, attempt=1, deadline_seconds=30.0
            )
            await peer.backward(BackwardRequest(call=call, inputs=inputs, seed=targets, tokens=tokens))
            held = await peer.freeze(FreezeRequest(key=key, attempt=1))
            members.append(
                GroupMember(
                    contact=peer.seat.contact,
                    microbatches=tuple(h.microbatch for h in held.held),
                    tokens=sum(h.tokens for h in held.held),
                )
            )
        total = sum(member.tokens for member in members)
        request = ReduceRequest(key=key, attempt=1, members=tuple(members), total_tokens=total, deadline_seconds=15.0)
        reducing = asyncio.gather(first.reduce(request), second.reduce(request))
        await asyncio.sleep(0.01)
        with pytest.raises(Frozen):
            await first.drop(late)
        replies = await reducing
        assert all(reply.reduced is not None for reply in replies)
        assert not swarm.network.failures

    play((2,), then=then)


def test_what_a_peer_tells_a_new_lead_is_not_overtaken_by_an_update_of_the_old() -> None:
    """It is greeted in the middle of the update: either that is over when it answers, or it never happens."""

    async def then(swarm: SimulatedSwarm) -> None:
        life = swarm.peers[PeerId("p00")]
        told = list[asyncio.Task[Lineage]]()

        async def greet() -> Lineage:
            await asyncio.sleep(0.02)  # past the call's way, in the middle of the update
            greeting = Greeting(run=swarm.config.hash, term=Term(50, PeerId("another")))
            return (await life.peer.greet(greeting)).lineage

        def look(call: Call) -> None:
            if call.kind == "apply" and call.to.peer == "p00" and not told:
                told.append(asyncio.create_task(greet()))

        swarm.network.before_call.append(look)
        training = asyncio.create_task(swarm.make_trainer().run(1))
        await until(swarm, lambda: bool(told))
        reported = await told[0]
        await asyncio.sleep(5.0)
        assert life.peer.seat.lineage == reported
        assert superseded(training)

    play((1, 1), then=then)


def test_an_update_whose_caller_has_gone_and_that_breaks_half_way_is_noticed() -> None:
    async def then(swarm: SimulatedSwarm) -> None:
        life = swarm.peers[PeerId("p10")]

        def apply(step: int, clip_factor: float) -> float:
            del life.module.apply
            life.module.device.compute(10.0)
            life.module.parameters = (7, 7, 7)
            raise MemoryError("in the middle of the update")

        def give_up() -> None:
            for task in life.node.tasks:
                task.cancel()

        def look(call: Call) -> None:
            if call.kind == "apply" and call.to.peer == "p10":
                asyncio.get_running_loop().call_later(0.5, give_up)

        life.module.apply = apply  # type: ignore[method-assign]
        swarm.network.before_call.append(look)
        await train(swarm)

    swarm = play((2, 2), then=then)
    assert "apply_failed" in kinds(swarm)
    fetched = [fields for _, kind, fields in swarm.journal.events if kind == "state_fetched"]
    assert [fields["stage"] for fields in fetched] == [1]
