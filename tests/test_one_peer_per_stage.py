"""A stage with a single peer learns as one with two does, and so it goes on when a second one joins and leaves.

learning-at-home/hivemind#450.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from swarm.storage.commit_log import FileCommitLog
from tests.fault_program import Fault
from tests.fault_swarm import FaultSwarm, Watcher, run_swarm

pytestmark = pytest.mark.swarm

STEPS = 50


def test_a_second_peer_joins_and_leaves(tmp_path: Path) -> None:
    async def visit(swarm: FaultSwarm) -> None:
        watcher = Watcher(swarm)
        await watcher.step(at_least=4)
        guest = swarm.start_peer(1)
        await watcher.joined(guest)
        await watcher.step()
        await watcher.step()
        await watcher.step()
        swarm.children.signal(guest.child.name, signal.SIGTERM)
        await guest.child.ended.wait()
        assert guest.child.exit_code == 0
        await watcher.step()
        await watcher.step()

    # Steps of a third of a second, so that the guest is there for some of them.
    slow = [Fault(point="compute is emulated", file=str(tmp_path / "fired"), seconds=0.012)]
    outcome = run_swarm(tmp_path, peers=(1, 1, 1), steps=STEPS, faults={"peer-0-0": slow}, meanwhile=visit)
    outcome.check()  # parameters, and the losses of all steps: 1e-4 of the reference's
    commits = FileCommitLog(outcome.logs / "trainer" / "commits.jsonl").read()
    members = [len(commit.stages[1].members) for commit in commits]
    assert members[0] == members[-1] == 1
    assert 2 in members
    # Something is learned at every step and stage: a step on zero gradients would have norm 0.
    assert all(stage.squared_norm > 1e-6 for commit in commits for stage in commit.stages)
    seconds = [float(str(event.fields["seconds"])) for event in outcome.of("step")]
    assert sorted(seconds)[len(seconds) // 2] < 1.0  # nobody waits for partners that there are not
