"""One fault at a time, at the moment where it hurts most."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from swarm.errors import BadRequest, Frozen, StateLost
from swarm.ids import Digest, MicrobatchId, PeerId
from swarm.messages import (
    BackwardRequest,
    Contact,
    DropRequest,
    FreezeRequest,
    Greeting,
    GroupMember,
    MicrobatchCall,
    ReduceRequest,
    StepKey,
    VoidRequest,
)
from swarm.ports import Draw
from swarm.records import Lineage, PeerState, Term
from swarm.roles.stepbook import StepBook
from swarm.sim.arithmetic import NumericBatches, pack
from swarm.sim.fuzz.operator import superseded
from swarm.sim.fuzz.run import run_config
from swarm.sim.lives import MemoryLog
from swarm.sim.loop import run
from swarm.sim.numeric import Poison
from swarm.sim.swarm import SimulatedSwarm
from swarm.sim.truth import Violation
from swarm.sim.weather import Call, Fate
from swarm.tensors import TensorData

pytestmark = pytest.mark.fast

STEPS = 3
BOUND_SECONDS = 300.0


class Script:
    """A weather that a test writes: ``decide`` gives a fate, or None for fair weather."""

    def __init__(self, decide: Callable[[Call], Fate | None] = lambda call: None) -> None:
        self.decide = decide

    def fate(self, call: Call) -> Fate:
        return self.decide(call) or Fate()


def once(matches: Callable[[Call], bool], fate: Fate, times: int = 1) -> Callable[[Call], Fate | None]:
    left = [times]

    def decide(call: Call) -> Fate | None:
        if left[0] and matches(call):
            left[0] -= 1
            return fate
        return None

    return decide


def start(swarm: SimulatedSwarm, *peers: int) -> None:
    for stage, count in enumerate(peers):
        for index in range(count):
            swarm.start_peer(f"p{stage}{index}", stage)


async def train(swarm: SimulatedSwarm, steps: int = STEPS) -> None:
    async with asyncio.timeout(BOUND_SECONDS):
        await swarm.make_trainer(log=MemoryLog(list(swarm.log.commits))).run(steps)
    swarm.check_finished(steps)


async def until(swarm: SimulatedSwarm, condition: Callable[[], bool]) -> None:
    """Wait for the first call after which the condition holds."""
    holds = asyncio.Event()

    def look(call: Call, answer: object) -> None:
        if condition():
            holds.set()

    swarm.network.after_call.append(look)
    await holds.wait()


def play(
    peers: tuple[int, ...],
    decide: Callable[[Call], Fate | None] = lambda call: None,
    then: Callable[[SimulatedSwarm], Awaitable[None]] = train,
    poisons: frozenset[Poison] = frozenset(),
    sick: frozenset[Poison] = frozenset(),
    prepare: Callable[[SimulatedSwarm], None] = lambda swarm: None,
) -> SimulatedSwarm:
    async def main() -> SimulatedSwarm:
        swarm = SimulatedSwarm(run_config(len(peers), 4), Script(decide), poisons, sick)
        start(swarm, *peers)
        prepare(swarm)
        try:
            await then(swarm)
        finally:
            await swarm.close()
        return swarm

    return run(main())


def kinds(swarm: SimulatedSwarm) -> set[str]:
    return {kind for _, kind, _ in swarm.journal.events}


def is_backward(call: Call, stage: int, step: int = 0, microbatch: int = 1) -> bool:
    request = call.request
    if not isinstance(request, BackwardRequest):
        return False
    key = request.call.key
    return (key.stage, key.step, request.call.microbatch) == (stage, step, microbatch)


# --- microbatches -----------------------------------------------------------------------


def test_an_answer_after_its_deadline() -> None:
    swarm = play((2, 2), once(lambda c: is_backward(c, 1), Fate(reply_seconds=200.0)))
    assert "voided" in kinds(swarm)


def test_a_backward_that_arrives_twice_is_added_once() -> None:
    play((1, 1), lambda call: Fate(repeat=True) if call.kind == "backward" else None)


def test_a_backward_that_arrives_after_its_void() -> None:
    lost = Fate(lose_request=True, late_copy_seconds=31.0)
    play((2, 2), once(lambda c: is_backward(c, 1), lost))


def test_a_backward_that_arrives_after_the_commit() -> None:
    play((2, 2), once(lambda c: is_backward(c, 1), Fate(late_copy_seconds=5.0)))


def test_a_void_that_arrives_late() -> None:
    lost = once(lambda c: is_backward(c, 1), Fate(lose_reply=True))
    late = once(lambda c: c.kind == "void", Fate(lose_request=True, late_copy_seconds=2.5))
    swarm = play((2, 2), lambda call: lost(call) or late(call))
    assert "dropped" in kinds(swarm)  # both peers held it


def test_a_lost_reply_is_credited_and_the_gradient_of_the_input_computed_again() -> None:
    swarm = play((1, 2), once(lambda c: is_backward(c, 1), Fate(lose_reply=True)))
    assert "voided" in kinds(swarm)
    assert "dropped" not in kinds(swarm)


def test_an_addition_that_breaks_half_way() -> None:
    def prepare(swarm: SimulatedSwarm) -> None:
        for life in swarm.peers.values():
            life.module.breaks.add(MicrobatchId(2))

    swarm = play((2, 2), prepare=prepare)
    assert "gradient_lost" in kinds(swarm)


@pytest.mark.parametrize("where", ["output", "gradient"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("peers", [1, 2])
def test_a_microbatch_that_is_finite_nowhere_is_left_out_everywhere(peers: int, stage: int, where: str) -> None:
    poison = Poison(stage=stage, step=1, microbatch=MicrobatchId(2), where=where)
    swarm = play((peers,) * 3, poisons=frozenset({poison}))
    assert swarm.log.commits[1].excluded == (2,)
    assert swarm.log.commits[0].excluded == swarm.log.commits[2].excluded == ()


@pytest.mark.parametrize("where", ["output", "gradient"])
def test_a_peer_that_is_not_finite_alone_is_doubted(where: str) -> None:
    sick = frozenset(
        Poison(stage=0, step=1, microbatch=MicrobatchId(m), where=where) for m in range(4)
    )  # all, so that the sick peer gets one of them

    def prepare(swarm: SimulatedSwarm) -> None:
        swarm.start_peer("sick", 0, sick=True)

    swarm = play((2, 1), sick=sick, prepare=prepare)
    assert all(not commit.excluded for commit in swarm.log.commits)
    diverged = [fields["peer"] for _, kind, fields in swarm.journal.events if kind == "peer_diverged"]
    assert diverged
    assert set(diverged) == {"sick"}


# --- state ------------------------------------------------------------------------------


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


# --- reduce and commit --------------------------------------------------------------------


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


# --- trainers ---------------------------------------------------------------------------


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


# --- the book's own guards, which random schedules hardly tell apart ------------------------

KEY = StepKey(
    run=run_config(1, 4).hash, stage=0, term=Term(1, PeerId("t")), lineage=Lineage.root(run_config(1, 4).hash)
)
CALL = MicrobatchCall(key=KEY, microbatch=MicrobatchId(1), try_number=0, attempt=0, deadline_seconds=1.0)


def test_a_frozen_attempt_takes_nothing_more() -> None:
    book = StepBook(KEY)
    book.add(CALL, 3, 1)
    assert [h.microbatch for h in book.freeze(0)] == [1]
    with pytest.raises(Frozen):
        book.holds(replace(CALL, microbatch=MicrobatchId(2)))
    assert not book.holds(replace(CALL, microbatch=MicrobatchId(2), attempt=1))
    assert book.holds(CALL)  # asked again, it answers again


@pytest.mark.parametrize(("microbatches", "tokens"), [((1, 2), 3), ((2,), 3), ((1,), 4)])
def test_a_contribution_must_be_what_is_held(microbatches: tuple[int, ...], tokens: int) -> None:
    book = StepBook(KEY)
    book.add(CALL, 3, 1)
    with pytest.raises(BadRequest):
        book.contribute(0, tuple(MicrobatchId(m) for m in microbatches), tokens)
    assert not book.contribute(0, (MicrobatchId(1),), 3)
    assert book.contribute(0, (), 0)  # weight 0: what is held must go first
    book.freeze(1)
    with pytest.raises(Frozen):
        book.contribute(0, (MicrobatchId(1),), 3)


def test_the_world_itself_notices_a_state_that_no_commit_explains() -> None:
    async def then(swarm: SimulatedSwarm) -> None:
        await train(swarm, 1)
        life = swarm.peers[PeerId("p00")]
        life.peer.seat.lineage = replace(life.peer.seat.lineage, chain=Digest("0" * 64))
        with pytest.raises(Violation, match="nobody ever committed"):
            swarm.invariants.check()

    play((1, 1), then=then)


def test_contacts_of_an_earlier_life_are_refused() -> None:
    async def then(swarm: SimulatedSwarm) -> None:
        old = swarm.peers[PeerId("p00")].node.contact
        swarm.kill_peer(PeerId("p00"))
        swarm.start_peer("p00", 0)
        assert isinstance(old, Contact)
        assert swarm.peers[PeerId("p00")].node.contact != old
        await train(swarm)

    play((1, 1), then=then)


# --- peers that break the protocol --------------------------------------------------------


def test_a_reply_of_another_form_is_laid_at_its_senders_door() -> None:
    """Or the next stage's innocent peers would refuse it, and be blamed."""

    def prepare(swarm: SimulatedSwarm) -> None:
        module = swarm.peers[PeerId("p00")].module
        real = module.forward

        def forward(draw: Draw, inputs: TensorData, *, keep_graph: bool) -> TensorData:
            real(draw, inputs, keep_graph=keep_graph)
            return pack([1, 2])

        module.forward = forward  # type: ignore[method-assign]

    swarm = play((2, 2), prepare=prepare)
    suspected = {fields["peer"] for _, kind, fields in swarm.journal.events if kind == "peer_suspected"}
    assert suspected == {"p00"}


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


def test_a_trainer_goes_beyond_whatever_term_it_finds() -> None:
    async def then(swarm: SimulatedSwarm) -> None:
        seat = swarm.peers[PeerId("p00")].peer.seat
        seat.follow(Term(900_000, PeerId("stranger")))
        await train(swarm)
        assert seat.term.number > 900_000

    play((1, 1), then=then)


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


def test_a_lead_that_is_behind_turns_nobody_back() -> None:
    async def then(swarm: SimulatedSwarm) -> None:
        await train(swarm, 3)
        peer = swarm.peers[PeerId("p00")].peer
        behind = Greeting(run=swarm.config.hash, term=Term(99, PeerId("late")), lineage=Lineage.root(swarm.config.hash))
        assert (await peer.greet(behind)).lineage.length == 3
        assert peer.seat.state is PeerState.READY

    play((1,), then=then)


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


def test_a_doubt_that_comes_up_during_a_greeting_stays() -> None:
    async def then(swarm: SimulatedSwarm) -> None:
        trainer = swarm.make_trainer()
        await trainer.run(1)
        member = trainer.roster.stages[0][PeerId("p00")]
        greeting = asyncio.create_task(trainer.roster.greet(member))
        await asyncio.sleep(0.001)
        trainer.roster.distrust(member, "its norm is another")
        await greeting
        assert member.distrusted
        assert member not in trainer.roster.eligible(0)

    play((2,), then=then)


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


def test_who_was_lost_and_comes_back_works_again_in_the_same_step() -> None:
    """Its record had expired; what it held was computed by others meanwhile."""

    async def then(swarm: SimulatedSwarm) -> None:
        training = asyncio.create_task(swarm.make_trainer().run(1))

        def works() -> bool:
            life = swarm.peers.get(PeerId("p00"))
            return life is not None and bool(life.module.added)

        async with asyncio.timeout(BOUND_SECONDS):
            await until(swarm, works)
            swarm.kill_peer(PeerId("p00"))
            await until(swarm, lambda: "mending" in kinds(swarm))
            swarm.start_peer("p00", 0)
            await until(swarm, works)
            assert not training.done()
            await training
        swarm.check_finished(1)

    async def main() -> None:
        swarm = SimulatedSwarm(run_config(1, 600))
        start(swarm, 3)
        try:
            await then(swarm)
        finally:
            await swarm.close()

    run(main())


def test_a_peer_whose_clock_jumped_in_the_middle_of_a_job_is_not_too_slow_for_ever() -> None:
    """It takes itself for slow then, and would refuse whatever it is asked; only work mends the estimate."""

    async def then(swarm: SimulatedSwarm) -> None:
        jumped = list[str]()

        def jump(call: Call) -> None:
            if call.kind == "forward" and not jumped:
                jumped.append(call.to.peer)
                asyncio.get_running_loop().call_later(0.05, swarm.peers[call.to.peer].node.process.jump, 60.0)

        swarm.network.before_call.append(jump)
        await train(swarm)
        assert jumped

    play((1, 1), then=then)
