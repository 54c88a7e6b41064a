"""A stage without peers: the trainer waits and says so; a committed state is never replaced by the seed's."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from peers.local.children import Children
from swarm.errors import ExitCode, RunFailed
from swarm.telemetry.journal import read_events
from tests.fault_program import Fault
from tests.fault_swarm import FaultSwarm, fired, options_for, quiet_screen, run_file, run_swarm

pytestmark = pytest.mark.swarm

WATCHED_SECONDS = 6.0
IDLE_SHARE = 0.02
"""Of one core: what the trainer's process may use while it waits."""
STATE_TIMEOUT_SECONDS = 8.0


def test_a_newcomer_takes_an_empty_stage_before_the_first_commit(tmp_path: Path) -> None:
    """Nothing is lost yet: a peer that starts from the run's seed is what the dead ones were."""
    file = tmp_path / "fired"
    dies = [Fault(point="backward arrives", step=0, file=str(file))]
    used: dict[str, float] = {}

    async def come_late(swarm: FaultSwarm) -> None:
        await swarm.until(lambda: _all_dead(swarm, 1) and "stage 1" in swarm.view.waiting)
        used.update(await _cpu_shares(swarm))
        swarm.start_peer(1)

    faults = {"peer-1-0": dies, "peer-1-1": dies}
    outcome = run_swarm(tmp_path, peers=(1, 2, 1), steps=6, faults=faults, meanwhile=come_late)
    assert fired(file) == ["backward arrives"] * 2
    outcome.check()
    print({name: f"{100 * share:.1f}% of a core" for name, share in used.items()})
    assert used["trainer"] < IDLE_SHARE
    assert [event.fields["stage"] for event in outcome.of("stage_back")] == [1]


def test_peers_that_come_back_bring_their_state(tmp_path: Path) -> None:
    """Both peers of a stage stand still for a while: they hold what was committed, so nothing is lost."""
    file = tmp_path / "fired"
    stops = [Fault(point="backward arrives", step=3, action="stop", seconds=9.0, file=str(file))]
    outcome = run_swarm(tmp_path, peers=(1, 2, 1), steps=6, faults={"peer-1-0": stops, "peer-1-1": stops})
    assert fired(file) == ["backward arrives"] * 2
    outcome.check()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["died", "left"])
def test_a_committed_state_that_nobody_holds_ends_the_run(number: signal.Signals, tmp_path: Path) -> None:
    """Exit code 4, and a newcomer at the seed's parameters is never used."""

    async def leave(swarm: FaultSwarm) -> None:
        await swarm.until(lambda: swarm.view.steps_done >= 3)
        for peer in swarm.peers:
            if peer.stage == 1:
                swarm.children.signal(peer.child.name, number)
        await asyncio.gather(*(peer.child.ended.wait() for peer in swarm.peers if peer.stage == 1))
        swarm.start_peer(1)

    lost = _lost(tmp_path, leave, peers=(1, 2, 1))
    events = read_events(tmp_path / "logs" / "trainer.jsonl")
    step = max(int(str(event.fields["step"])) for event in events if event.kind == "step")
    assert "stage 1 has had no peer for" in lost
    assert f"after step {step} " in lost
    newcomer = read_events(tmp_path / "logs" / "peer-1-2.jsonl")
    kinds = [event.kind for event in newcomer]
    assert "waiting_for_donor" in kinds
    assert "applied" not in kinds
    (serving,) = [event for event in newcomer if event.kind == "serving"]
    used = [event for event in events if event.fields.get("peer") == serving.fields["peer"]]
    assert not [event for event in used if event.kind in ("peer_joined", "retried", "repaired")]


@pytest.mark.parametrize("new_peers", [0, 1], ids=["alone", "with new peers"])
def test_a_trainer_whose_peers_were_all_lost_says_so(new_peers: int, tmp_path: Path) -> None:
    """Its log has commits that nobody holds: it does not begin again as if there had been none."""

    async def lose_everything(swarm: FaultSwarm) -> None:
        await swarm.until(lambda: swarm.view.steps_done >= 2)
        mortal = [swarm.children.by_name["trainer"], *(peer.child for peer in swarm.peers)]
        for child in mortal:
            swarm.children.signal(child.name, signal.SIGKILL)
        await asyncio.gather(*(child.ended.wait() for child in mortal))
        for stage in range(2 * new_peers):
            swarm.start_peer(stage)

    lost = _lost(tmp_path, lose_everything, peers=(1, 1), stages=2)
    assert "stage 0" in lost
    events = read_events(tmp_path / "logs" / "trainer.jsonl")
    assert len([event for event in events if event.kind == "leads"]) == 1
    step = max(int(str(event.fields["step"])) for event in events if event.kind == "step")
    assert f"after step {step} " in lost


def _lost(
    folder: Path, meanwhile: Callable[[FaultSwarm], Awaitable[None]], *, peers: tuple[int, ...], **values: object
) -> str:
    """Train until the run ends as lost; the one line that it says."""
    logs = folder / "logs"

    async def main() -> None:
        options = options_for(run_file(folder, **values), logs, peers, 500, STATE_TIMEOUT_SECONDS)
        async with Children(logs) as children:
            swarm = FaultSwarm(options, children, {})
            await swarm.start()
            async with asyncio.TaskGroup() as tasks:
                training = tasks.create_task(_until_it_fails(swarm))
                await meanwhile(swarm)
            assert training.result().exit_code is ExitCode.STATE_LOST, training.result()

    asyncio.run(main())
    lines = (logs / "trainer.log").read_text().splitlines()
    assert not [line for line in lines if "Traceback" in line]
    (last,) = [line for line in lines if line.startswith("swarm:")]
    return last


async def _until_it_fails(swarm: FaultSwarm) -> RunFailed:
    try:
        await swarm.train_through(quiet_screen())
    except RunFailed as error:
        return error
    raise AssertionError("the run was not lost")


def _all_dead(swarm: FaultSwarm, stage: int) -> bool:
    return not [peer for peer in swarm.peers if peer.stage == stage and peer.child.alive]


async def _cpu_shares(swarm: FaultSwarm) -> dict[str, float]:
    """CPU seconds per second over a while: of the trainer's process, and of its p2pd."""
    trainer = psutil.Process(swarm.children.by_name["trainer"].process)
    (daemon,) = trainer.children()
    watched = {"trainer": trainer, "p2pd": daemon}
    before = {name: _cpu_seconds(process) for name, process in watched.items()}
    began = time.monotonic()
    await swarm.until(lambda: time.monotonic() - began >= WATCHED_SECONDS)
    elapsed = time.monotonic() - began
    return {name: (_cpu_seconds(process) - before[name]) / elapsed for name, process in watched.items()}


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
