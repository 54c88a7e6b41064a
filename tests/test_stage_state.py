"""A stage's reduced gradient, update and snapshots."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from swarm.policy.schedule import clip_factor, learning_rate
from swarm.stage.arrays import to_buffer
from swarm.stage.module import TorchStage
from tests.stage_case import _joined, activations, draw, make_config, random

pytestmark = pytest.mark.fast


def trained(stage: TorchStage, steps: int = 2) -> TorchStage:
    for step in range(steps):
        stage.set_reduced(random(stage.gradient_sum().numel(), seed=step))
        stage.apply(step, 1.0)
    return stage


# --- the reduced gradient and the update ------------------------------------------------


def test_the_reduced_gradient_is_kept_as_it_was_hashed() -> None:
    module = TorchStage(make_config(weight_decay=0.1), 1)
    with pytest.raises(ValueError, match="no reduced"):
        module.apply(0, 1.0)
    with pytest.raises(ValueError, match="no reduced"):
        module.reduced_bytes()
    mean = random(module.gradient_sum().numel())
    found, norm = module.set_reduced(mean)
    assert norm == pytest.approx(float(mean.double().square().sum()), rel=1e-12)
    assert module.apply(0, 0.5) == pytest.approx(module.squared_norm(), rel=0)
    assert hashlib.sha256(module.reduced_bytes()).hexdigest() == found
    late = TorchStage(make_config(weight_decay=0.1), 1)
    assert late.load_reduced(bytes(module.reduced_bytes())) == (found, norm)
    late.apply(0, 0.5)
    assert late.digest() == module.digest()


def test_a_mean_that_is_the_sum_itself_is_copied() -> None:
    module = TorchStage(make_config(), 1)
    module.accumulate(module.backward(draw(), activations(), activations(1)))
    found, _ = module.set_reduced(module.gradient_sum())
    module.drop_gradient()
    assert hashlib.sha256(module.reduced_bytes()).hexdigest() == found


def test_reduced_gradients_of_a_wrong_size_are_refused() -> None:
    module = TorchStage(make_config(), 1)
    size = module.gradient_sum().numel()
    for wrong in (torch.zeros(size - 1), torch.zeros(size, dtype=torch.float64), torch.zeros(1, size)):
        with pytest.raises(ValueError):
            module.set_reduced(wrong)
    for data in (b"", bytes(size * 4 - 1), bytes(size * 4 + 4)):
        with pytest.raises(ValueError):
            module.load_reduced(data)


def test_weight_decay_is_for_matrices() -> None:
    module = TorchStage(make_config(weight_decay=0.5, learning_rate=0.1), 1)
    before = {name: parameter.clone() for name, parameter in module.named_parameters().items()}
    module.set_reduced(torch.zeros_like(module.gradient_sum()))
    module.apply(0, 1.0)
    for name, parameter in module.named_parameters().items():
        torch.testing.assert_close(parameter, before[name] * (0.95 if parameter.ndim > 1 else 1.0))


def test_learning_rate() -> None:
    def rates(*steps: int, **optimizer: Any) -> list[float]:
        section = make_config(learning_rate=1.0, **optimizer).optimizer
        return [learning_rate(section, step) for step in steps]

    assert rates(0, 1000) == [1.0, 1.0]
    assert rates(0, 1, 3, 4, 99, warmup_steps=4) == [0.25, 0.5, 1.0, 1.0, 1.0]
    linear = rates(1, 2, 6, 10, 99, warmup_steps=2, total_steps=10, schedule="linear")
    assert linear == pytest.approx([1.0, 1.0, 0.5, 0.0, 0.0])
    assert rates(0, 4, 8, 9, total_steps=8, schedule="cosine") == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert rates(1, 2, warmup_steps=2, total_steps=2, schedule="cosine") == [1.0, 0.0]


def test_clip_factor() -> None:
    section = make_config(clip_norm=2.0).optimizer
    assert clip_factor(section, 1.0) == 1.0
    assert clip_factor(section, 16.0) == pytest.approx(0.5)
    assert clip_factor(section, 0.0) == 1.0
    assert clip_factor(make_config().optimizer, 1e9) == 1.0


OPTIMIZERS: Sequence[dict[str, Any]] = (
    {"name": "adamw"},
    {"name": "sgd"},
    {"name": "sgd", "momentum": 0.0},
)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_snapshot_makes_an_equal_stage(optimizer: dict[str, Any], steps: int) -> None:
    config = make_config(**optimizer)
    donor = trained(TorchStage(config, 1), steps)
    # The receiver has a past of its own, of which nothing may remain.
    receiver = trained(TorchStage(config, 1), 3)
    layout, data = _joined(donor)
    receiver.load(layout, data)
    assert receiver.digest() == donor.digest()
    assert _joined(receiver) == (layout, data)
    for module in (donor, receiver):
        module.set_reduced(random(module.gradient_sum().numel(), seed=5))
        module.apply(steps, 1.0)
    assert receiver.digest() == donor.digest()


def test_a_snapshot_is_a_copy() -> None:
    module = trained(TorchStage(make_config(), 1))
    _, buffers = module.snapshot()
    before = b"".join(buffers)
    trained(module)
    assert b"".join(buffers) == before


def test_malformed_snapshots_change_nothing() -> None:
    module = trained(TorchStage(make_config(), 1))
    layout, data = _joined(module)
    entries = json.loads(layout)
    parameters = sum(p.numel() * 4 for p in module.named_parameters().values())

    def edited(index: int, **fields: object) -> str:
        return json.dumps([{**entry, **fields} if i == index else entry for i, entry in enumerate(entries)])

    other = trained(TorchStage(make_config(name="sgd"), 1))
    nan, minus = torch.tensor(float("nan")), torch.tensor(-1.0)
    wrong: list[tuple[str, bytes]] = [
        ("", data),
        ("{", data),
        ("null", data),
        ("{}", data),
        ("[1]", data),
        ("[" * 100_000, data),
        (json.dumps(entries[:-1]), data[:-4]),
        (json.dumps(entries[::-1]), data),
        (edited(0, name="x"), data),
        (edited(0, dtype="float64"), data),
        (edited(0, shape=[1 << 62, 1 << 62]), data),
        (edited(0, extra=1), data),
        (layout, data[:-1]),
        (layout, data + b"\0"),
        (layout, b""),
        (layout, bytes(to_buffer(nan)) + data[4:]),
        # After the parameters comes the first step counter, then first and second moments.
        (layout, data[:parameters] + bytes(to_buffer(minus)) + data[parameters + 4 :]),
        (layout, data[:-4] + bytes(to_buffer(minus))),
        _joined(other),
        _joined(TorchStage(make_config(), 2)),
    ]
    module.accumulate(module.backward(draw(), activations(), activations(1)))
    module.forward(draw(1), activations(), keep_graph=True)
    gradient = module.gradient_sum().clone()
    for bad_layout, bad_data in wrong:
        with pytest.raises(ValueError):
            module.load(bad_layout, bad_data)
    assert _joined(module) == (layout, data)
    assert torch.equal(module.gradient_sum(), gradient)
    assert module.backward(draw(1), None, activations(1)).finite
    module.load(layout, data)


def test_reset_is_version_0() -> None:
    module = TorchStage(make_config(), 1)
    initial = _joined(module)
    trained(module)
    assert _joined(module) != initial
    module.reset()
    assert _joined(module) == initial
