"""Microbatches: lost, late, doubled, not finite; and what the book itself refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm.errors import BadRequest, Frozen
from swarm.ids import Digest, MicrobatchId, PeerId
from swarm.messages import (
    MicrobatchCall,
    StepKey,
)
from swarm.records import Lineage, Term
from swarm.roles.stepbook import StepBook
from swarm.sim.fuzz.run import run_config
from swarm.sim.numeric import Poison
from swarm.sim.swarm import SimulatedSwarm
from swarm.sim.truth import Violation
from swarm.sim.weather import Fate
from tests.protocol_script import is_backward, kinds, once, play, train

pytestmark = pytest.mark.fast

KEY = StepKey(
    run=run_config(1, 4).hash, stage=0, term=Term(1, PeerId("t")), lineage=Lineage.root(run_config(1, 4).hash)
)
CALL = MicrobatchCall(key=KEY, microbatch=MicrobatchId(1), try_number=0, attempt=0, deadline_seconds=1.0)


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
