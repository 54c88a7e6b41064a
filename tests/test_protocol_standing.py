"""What the trainer thinks of its peers: offences, doubts, losses, and peers that think wrongly of themselves."""

from __future__ import annotations

import asyncio

import pytest

from swarm.ids import PeerId
from swarm.ports import Draw
from swarm.sim.arithmetic import pack
from swarm.sim.fuzz.run import run_config
from swarm.sim.loop import run
from swarm.sim.swarm import SimulatedSwarm
from swarm.sim.weather import Call
from swarm.tensors import TensorData
from tests.protocol_script import BOUND_SECONDS, kinds, play, start, train, until

pytestmark = pytest.mark.fast


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
