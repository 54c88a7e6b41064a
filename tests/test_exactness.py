"""A swarm of real processes ends with the parameters of a single process; one wrong microbatch is seen by far."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.config import load
from swarm.data.text import TextBatches
from swarm.reference import Reference, relative_difference
from tests.fault_program import Fault
from tests.fault_swarm import ADAMW, SGD, fired, run_file, run_swarm

pytestmark = pytest.mark.swarm

STEPS = 30
TOLERANCE = 5e-4
"""norm(swarm - reference) / norm(reference - initial), of each stage."""
LOSS_TOLERANCE = 1e-4
"""Relative, of each step's loss."""
FLOOR = 2e-5
"""What the order of additions alone makes of these runs: 3e-7 to 4e-6 were measured."""

RUNS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "adamw": ((2, 2, 2), {"optimizer": ADAMW}),
    "sgd": ((2, 2, 2), {"optimizer": SGD}),
    "one peer per stage": ((1, 1, 1), {"optimizer": SGD}),
    "dropout": ((1, 2, 1), {"optimizer": ADAMW, "dropout": 0.1}),
    "a single stage": ((2,), {"optimizer": ADAMW, "stages": 1}),
}
"""Peers per stage, and what differs from the small run's config."""


@pytest.mark.parametrize("name", RUNS)
def test_parameters_and_losses_equal_one_process(name: str, tmp_path: Path) -> None:
    peers, values = RUNS[name]
    floor = _floor(tmp_path, **values)
    outcome = run_swarm(tmp_path, peers=peers, steps=STEPS, **values)
    outcome.check()
    differences = outcome.verdict["differences"]
    print(f"{name}: floor {floor:.1e}, swarm {max(differences):.1e}, losses {outcome.verdict['loss_difference']:.1e}")
    assert len(differences) == len(peers)
    assert max(differences) <= TOLERANCE
    assert outcome.verdict["loss_difference"] <= LOSS_TOLERANCE
    assert floor <= FLOOR  # so the tolerance is far above what additions in another order do
    losses = [loss for loss in outcome.report.losses if loss is not None]
    assert len(losses) == STEPS
    assert losses[-1] < 0.8 * losses[0]  # training went somewhere, so there is something to compare
    assert outcome.report.microbatches.completed == 8 * STEPS


@pytest.mark.parametrize(
    ("point", "least"),
    [
        # Times the tolerance; three times as much was measured.
        ("microbatch is dropped", 50),
        ("microbatch is doubled", 50),
        ("microbatch is weighted wrongly", 25),
    ],
)
def test_one_wrong_microbatch_is_seen_by_far(point: str, least: float, tmp_path: Path) -> None:
    """The negative control: once, in one step, at one stage, in a way that no protocol can notice."""
    file = tmp_path / "fired"
    fault = Fault(point=point, step=2, file=str(file))
    outcome = run_swarm(tmp_path, peers=(1, 2, 1), steps=12, faults={"peer-1-0": [fault]})
    assert fired(file) == [point]
    print(f"{point}: {outcome.verdict['relative_difference'] / TOLERANCE:.0f} times the tolerance")
    assert outcome.verdict["relative_difference"] > least * TOLERANCE
    assert not outcome.verdict["ok"]


def _floor(folder: Path, **values: object) -> float:
    """How far two single processes are apart that add the microbatches up in opposite orders: the worst stage's."""
    torch.set_num_threads(1)
    config = load(run_file(folder, **values))
    batches = TextBatches(config)
    forwards = Reference(config, batches)
    backwards = Reference(config, batches, order=lambda _, microbatches: list(reversed(microbatches)))
    for _ in range(STEPS):
        forwards.step()
        backwards.step()
    return max(
        relative_difference(backwards.parameters(stage), forwards.parameters(stage), initial)
        for stage, initial in enumerate(forwards.initial)
    )
