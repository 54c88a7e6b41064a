"""SIGKILL between a microbatch's forward and its backward, ten times in one run.

bigscience-workshop/petals#587.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fault_program import Fault
from tests.fault_swarm import FaultSwarm, Watcher, run_swarm

pytestmark = pytest.mark.swarm

DEATHS = 10
AT_ONCE = 5
STEPS = 60


def test_ten_peers_die_before_their_backward(tmp_path: Path) -> None:
    file = tmp_path / "fired"
    # One healthy peer, and one after another that dies when its first backward of some step arrives.
    doomed = {
        f"peer-1-{1 + n}": [Fault(point="backward arrives", step=3 + 2 * n, file=str(file))] for n in range(DEATHS)
    }
    # Steps long enough for newcomers to arrive within a few.
    slow = {"peer-0-0": [Fault(point="compute is emulated", file=str(file), seconds=0.012)]}

    async def replace(swarm: FaultSwarm) -> None:
        await Watcher(swarm).step()
        while sum(peer.stage == 1 for peer in swarm.peers) < 1 + DEATHS:
            alive = [peer for peer in swarm.peers if peer.stage == 1 and peer.child.alive]
            if len(alive) < 1 + AT_ONCE:
                swarm.start_peer(1)
            else:
                await swarm._wait(swarm.children.by_name["trainer"])

    outcome = run_swarm(tmp_path, peers=(1, 1 + AT_ONCE, 1), steps=STEPS, faults={**doomed, **slow}, meanwhile=replace)
    deaths = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(deaths) == DEATHS
    assert len({death["pid"] for death in deaths}) == DEATHS
    outcome.check()
    assert outcome.report.microbatches.completed == 8 * STEPS
    assert outcome.report.microbatches.excluded == 0
