"""SIGKILL at named points of the protocol, in real processes: the result equals a single process's all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault_program import PEER_POINTS, TRAINER_POINTS, Fault
from tests.fault_swarm import FaultSwarm, fired, run_swarm

pytestmark = pytest.mark.swarm


@pytest.mark.parametrize("point", PEER_POINTS)
def test_a_peer_is_killed(point: str, tmp_path: Path) -> None:
    file = tmp_path / "fired"
    outcome = run_swarm(tmp_path, faults={"peer-1-0": [Fault(point=point, step=3, file=str(file))]})
    assert fired(file) == [point]
    outcome.check()
    assert outcome.of("peer_suspected")


@pytest.mark.parametrize("point", TRAINER_POINTS)
def test_the_trainer_is_killed(point: str, tmp_path: Path) -> None:
    file = tmp_path / "fired"
    outcome = run_swarm(tmp_path, faults={"trainer": [Fault(point=point, step=3, file=str(file))]})
    assert fired(file) == [point]
    outcome.check()
    first, second = (int(str(event.fields["term"])) for event in outcome.of("leads"))
    assert second > first


def test_a_donor_is_killed_during_a_transfer(tmp_path: Path) -> None:
    """The newcomer goes to the other donor, and ends with that one's state."""
    file = tmp_path / "fired"
    fault = Fault(point="state is half sent", file=str(file), shared=True)

    async def join_late(swarm: FaultSwarm) -> None:
        await swarm.until(lambda: swarm.view.steps_done >= 2)
        swarm.start_peer(0)
        swarm.start_peer(0)

    outcome = run_swarm(tmp_path, steps=20, faults={"peer-0-0": [fault], "peer-0-1": [fault]}, meanwhile=join_late)
    assert fired(file) == ["state is half sent"]
    outcome.check()
