"""NaN and infinity are found where they enter, laid at the right door, and get into nobody's parameters.

macrocosm-os/iota#198.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from swarm.config import load
from swarm.data.text import TextBatches
from swarm.ids import MicrobatchId
from swarm.ports import Gradient
from swarm.reference import Reference
from swarm.telemetry.journal import Event, read_events
from tests.fault_program import Fault
from tests.fault_swarm import Outcome, fired, run_file, run_swarm

pytestmark = pytest.mark.swarm


def peer_of(outcome: Outcome, name: str) -> str:
    """The id of the peer that ran under this name."""
    return next(str(e.fields["peer"]) for e in read_events(outcome.logs / f"{name}.jsonl") if e.kind == "serving")


def blamed(events: list[Event]) -> set[str]:
    return {str(event.fields["peer"]) for event in events}


def check_finite(outcome: Outcome) -> None:
    assert all(norm is not None and math.isfinite(norm) for norm in outcome.report.parameter_norms)
    assert all(loss is not None and math.isfinite(loss) for loss in outcome.report.losses)
    assert outcome.report.microbatches.excluded == 0


def test_one_peer_at_a_time_computes_nan(tmp_path: Path) -> None:
    """Activations twice, after which it is left alone; then the sums of gradients, in groups of two and of one.

    Late in the run, when all six peers have joined it.
    """
    file = tmp_path / "fired"
    faults = {
        "peer-1-0": [Fault(point="output is NaN", step=40, file=str(file)) for _ in range(2)],
        "peer-1-1": [Fault(point="gradient is NaN", step=50, file=str(file))],
        "peer-2-0": [Fault(point="gradient is NaN", step=56, file=str(file))],
        "peer-0-0": [Fault(point="gradient is NaN", step=62, file=str(file))],
    }
    outcome = run_swarm(tmp_path, peers=(1, 3, 2), steps=70, faults=faults)
    assert sorted(fired(file)) == ["gradient is NaN"] * 3 + ["output is NaN"] * 2
    outcome.check()
    check_finite(outcome)
    assert blamed(outcome.of("not_finite")) == {peer_of(outcome, "peer-1-0")}
    assert blamed(outcome.of("peer_diverged")) == {
        peer_of(outcome, name) for name in ("peer-1-0", "peer-1-1", "peer-2-0")
    }
    assert blamed(outcome.of("gradient_not_finite")) == {
        peer_of(outcome, name) for name in ("peer-1-1", "peer-2-0", "peer-0-0")
    }


def test_a_peer_that_computes_nan_for_ever_is_avoided(tmp_path: Path) -> None:
    """The others go on without it."""
    file = str(tmp_path / "fired")
    faults = {
        "peer-1-0": [Fault(point="outputs are NaN", step=2, file=file)],
        "peer-2-0": [Fault(point="gradients are NaN", step=2, file=file)],
    }
    outcome = run_swarm(tmp_path, peers=(1, 2, 2), steps=10, faults=faults)
    outcome.check()
    check_finite(outcome)
    culprits = [peer_of(outcome, name) for name in ("peer-1-0", "peer-2-0")]
    diverged = [str(event.fields["peer"]) for event in outcome.of("peer_diverged")]
    assert set(diverged) == set(culprits)
    # The second time it is left alone for half a minute, longer than this run.
    assert max(diverged.count(culprit) for culprit in culprits) <= 2
    assert blamed(outcome.of("gradient_not_finite")) == {culprits[1]}


class WithoutOne(Reference):
    """The reference under the same rule: microbatch 3 of step 2 is not finite."""

    def _gradients(self, microbatch: MicrobatchId) -> tuple[list[Gradient], int]:
        gradients, tokens = super()._gradients(microbatch)
        return ([] if (self.steps, microbatch) == (2, 3) else gradients), tokens


def test_a_batch_whose_loss_is_infinite_is_left_out_at_all_stages(tmp_path: Path) -> None:
    """Two peers say so, so it is the batch's fault and nobody is distrusted."""
    file = tmp_path / "fired"
    fault = Fault(point="loss is infinite", step=2, microbatch=3, file=str(file))
    outcome = run_swarm(tmp_path, peers=(1, 1, 2), steps=6, faults={"peer-2-0": [fault], "peer-2-1": [fault]})
    assert len(fired(file)) == 2
    assert [(e.fields["step"], e.fields["microbatch"]) for e in outcome.of("excluded")] == [(2, 3)]
    assert outcome.of("peer_diverged") == []
    assert outcome.report.microbatches.excluded == 1
    samples = outcome.report.samples_per_stage_and_step
    assert [list(stage) for stage in samples] == [[16, 16, 14, 16, 16, 16]] * 3
    config = load(run_file(tmp_path))
    reference = WithoutOne(config, TextBatches(config))
    losses = [reference.step().loss for _ in range(6)]
    assert outcome.report.losses == pytest.approx(losses, rel=1e-4)
    norms = [math.sqrt(stage.squared_norm()) for stage in reference.stages]
    assert outcome.report.parameter_norms == pytest.approx(norms, rel=1e-6)
    assert outcome.verdict["loss_difference"] > 1e-4  # as it would be with the microbatch
