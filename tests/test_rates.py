"""Work goes to peers in proportion to their speed, which is emulated by sleeping: two cores stand for many devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.ids import short
from tests.fault_program import Fault
from tests.fault_swarm import FaultSwarm, run_swarm

pytestmark = pytest.mark.swarm

FORWARD_SECONDS = 0.015
"""Of the fast twin; a backward takes twice that."""
TIMES_SLOWER = 4.0
STEPS = 4
MICROBATCHES = 100
FAIR_SHARE = 1 / (1 + TIMES_SLOWER)


def test_a_peer_four_times_slower_than_its_twin_gets_a_fifth(tmp_path: Path) -> None:
    seconds = {
        "peer-0-0": FORWARD_SECONDS,
        "peer-0-1": TIMES_SLOWER * FORWARD_SECONDS,
        # Together a little faster than the first stage, which is what holds the swarm up.
        "peer-1-0": FORWARD_SECONDS,
        "peer-1-1": FORWARD_SECONDS,
    }
    faults = {name: [_emulated(each, tmp_path)] for name, each in seconds.items()}
    swarms: list[FaultSwarm] = []

    async def keep(swarm: FaultSwarm) -> None:
        swarms.append(swarm)

    outcome = run_swarm(
        tmp_path, peers=(2, 2), steps=STEPS, faults=faults, meanwhile=keep, stages=2, microbatches=MICROBATCHES
    )
    outcome.check()
    assert outcome.report.microbatches.completed == STEPS * MICROBATCHES
    assert outcome.report.microbatches.retried == 0
    share = _shares(swarms[0])
    per_step = [float(str(event.fields["seconds"])) for event in outcome.of("step")]
    least = MICROBATCHES * 3 * FORWARD_SECONDS / (1 + 1 / TIMES_SLOWER)
    print({name: f"{part:.3f}" for name, part in share.items()}, [f"{each / least:.2f}" for each in per_step])
    assert share["peer-0-1"] == pytest.approx(FAIR_SHARE, rel=0.25)
    assert share["peer-0-0"] + share["peer-0-1"] == pytest.approx(1)
    # The stage that holds the swarm up is busy nearly all of the time: its pace is 1.1 times what its peers can do.
    assert sum(per_step) < 1.5 * STEPS * least
    # Twins of one speed share their stage: neither is idle while the other has a queue.
    assert min(share["peer-1-0"], share["peer-1-1"]) > 0.5 * 0.75


def _emulated(seconds: float, folder: Path) -> Fault:
    return Fault(point="compute is emulated", seconds=seconds, file=str(folder / "fired"))


def _shares(swarm: FaultSwarm) -> dict[str, float]:
    """By name of its process, the part of its stage's microbatches that each peer was credited with."""
    names = {short(peer.peer): peer.child.name for peer in swarm.peers if peer.peer is not None}
    rows = [row for stage in swarm.view.stages for row in stage.peers]
    return {names[row.name]: row.share or 0.0 for row in rows}
