"""What roles rely on of a stage's module: the step's gradient, updates, and state that travels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

import pytest

from swarm.errors import NeedsInput
from tests.contract.modules import STAGE_KINDS, STAGES, Kind, draw, joined, kind_fixture, one_step, sum_digest

kind = kind_fixture()


# --- the step's gradient ------------------------------------------------------------------


def test_a_dropped_gradient_is_zero_and_graphs_stay(kind: Kind) -> None:
    module = kind.module(1)
    nothing = sum_digest(kind, module)
    module.accumulate(module.backward(draw(), kind.inputs(1), kind.seed(1)))
    module.forward(draw(1), kind.inputs(1), keep_graph=True)
    module.drop_gradient()
    assert sum_digest(kind, module) == nothing
    module.backward(draw(1), None, kind.seed(1))


def test_a_reduced_gradient_survives_the_way_to_another_peer(kind: Kind) -> None:
    module, other = kind.module(1), kind.module(1)
    module.accumulate(module.backward(draw(), kind.inputs(1), kind.seed(1)))
    digest, squared_norm = module.set_reduced(kind.mean(module.gradient_sum(), kind.tokens()))
    data = bytes(memoryview(module.reduced_bytes()).cast("B"))
    assert len(data) == module.gradient_bytes
    assert hashlib.sha256(data).hexdigest() == digest  # how a peer that fetches it knows that it is whole
    assert other.load_reduced(bytearray(data)) == (digest, squared_norm)
    assert joined([other.reduced_bytes()]) == data
    assert module.apply(0, 1.0) == other.apply(0, 1.0)
    assert module.digest() == other.digest()


@pytest.mark.parametrize("damage", [lambda data: data[:-4], lambda data: data + bytes(4), lambda data: b""])
def test_a_reduced_gradient_of_a_wrong_size_is_refused(kind: Kind, damage: Callable[[bytes], bytes]) -> None:
    module = kind.module(1)
    digest, _ = module.set_reduced(kind.mean(module.gradient_sum(), 1))
    data = joined([module.reduced_bytes()])
    with pytest.raises(ValueError):
        module.load_reduced(bytearray(damage(data)))
    with pytest.raises(ValueError):
        module.set_reduced(module.gradient_sum()[:-1])
    assert hashlib.sha256(joined([module.reduced_bytes()])).hexdigest() == digest


def test_what_is_reduced_does_not_follow_the_sum(kind: Kind) -> None:
    """A group of one may be given its own sum."""
    module = kind.module(1)
    module.accumulate(module.backward(draw(), kind.inputs(1), kind.seed(1)))
    module.set_reduced(module.gradient_sum())
    data = joined([module.reduced_bytes()])
    module.accumulate(module.backward(draw(), kind.inputs(1), kind.seed(1)))
    module.drop_gradient()
    assert joined([module.reduced_bytes()]) == data


def test_an_update_moves_the_parameters_and_forgets_sum_and_graphs(kind: Kind) -> None:
    module = kind.module(1)
    nothing, before = sum_digest(kind, module), module.digest()
    module.accumulate(module.backward(draw(), kind.inputs(1), kind.seed(1)))
    module.forward(draw(1), kind.inputs(1), keep_graph=True)
    digest, _ = module.set_reduced(kind.mean(module.gradient_sum(), kind.tokens()))
    assert module.apply(0, 1.0) == module.squared_norm()
    assert module.digest() != before
    assert hashlib.sha256(joined([module.reduced_bytes()])).hexdigest() == digest  # donors give it to who missed it
    assert sum_digest(kind, module) == nothing
    with pytest.raises(NeedsInput):
        module.backward(draw(1), None, kind.seed(1))


def test_nothing_is_applied_that_was_never_reduced(kind: Kind) -> None:
    module = kind.module(1)
    before = module.digest()
    with pytest.raises(ValueError):
        module.reduced_bytes()
    with pytest.raises(ValueError):
        module.apply(0, 1.0)
    assert module.digest() == before


# --- parameters and state -----------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGE_KINDS)
def test_peers_of_a_stage_begin_alike_and_those_of_others_do_not(kind: Kind, stage: int) -> None:
    assert kind.module(stage).digest() == kind.module(stage).digest()
    assert kind.module(stage).squared_norm() == kind.module(stage).squared_norm()
    assert kind.module(stage).digest() != kind.module((stage + 1) % STAGES).digest()


@pytest.mark.parametrize("steps", [0, 2])
def test_a_snapshot_survives_the_way_to_another_peer(kind: Kind, steps: int) -> None:
    module, other = kind.module(1), kind.module(1)
    for step in range(steps):
        one_step(kind, module, 1, step)
    if steps == 0:
        one_step(kind, other, 1)
    layout, buffers = module.snapshot()
    other.load(layout, bytearray(joined(buffers)))
    assert other.digest() == module.digest()
    for peer in (module, other):  # and so does what an update depends on beside them
        one_step(kind, peer, 1, steps, numbers=(3,))
    assert other.digest() == module.digest()


def test_a_snapshot_is_a_copy(kind: Kind) -> None:
    module = kind.module(1)
    _, buffers = module.snapshot()
    before = joined(buffers)
    one_step(kind, module, 1)
    assert joined(buffers) == before
    assert joined(module.snapshot()[1]) != before


def test_what_belongs_to_other_parameters_is_forgotten(kind: Kind) -> None:
    for take in ("load", "reset"):
        module = kind.module(1)
        nothing = sum_digest(kind, module)
        layout, buffers = kind.module(1).snapshot()
        module.accumulate(module.backward(draw(), kind.inputs(1), kind.seed(1)))
        module.forward(draw(1), kind.inputs(1), keep_graph=True)
        module.set_reduced(kind.mean(module.gradient_sum(), 1))
        if take == "load":
            module.load(layout, bytearray(joined(buffers)))
        else:
            module.reset()
        with pytest.raises(ValueError):
            module.apply(0, 1.0)
        with pytest.raises(NeedsInput):
            module.backward(draw(1), None, kind.seed(1))
        assert sum_digest(kind, module) == nothing


def _others(layout: str, data: bytes, other: str) -> list[tuple[str, bytes]]:
    raw = json.dumps([json.loads(layout)])
    return [(other, data), ("", data), ("{", data), ("[]", data), (raw, data), (layout, data[:-4]), (layout, b"")]


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(kind: Kind) -> None:
    module = kind.module(1)
    layout, buffers = module.snapshot()
    data = joined(buffers)
    one_step(kind, module, 1)
    module.accumulate(module.backward(draw(0, 1), kind.inputs(1), kind.seed(1)))
    module.forward(draw(1, 1), kind.inputs(1), keep_graph=True)
    state = joined(module.snapshot()[1])
    total = sum_digest(kind, module)
    other = kind.module(0).snapshot()[0]
    for wrong_layout, wrong_data in [*_others(layout, data, other), (layout, data + bytes(4))]:
        with pytest.raises(ValueError):
            module.load(wrong_layout, bytearray(wrong_data))
        assert joined(module.snapshot()[1]) == state
        assert sum_digest(kind, module) == total
    module.backward(draw(1, 1), None, kind.seed(1))
    module.load(layout, bytearray(data))
    assert module.digest() == kind.module(1).digest()


def test_reset_goes_back_to_version_0(kind: Kind) -> None:
    module = kind.module(1)
    one_step(kind, module, 1)
    module.reset()
    assert joined(module.snapshot()[1]) == joined(kind.module(1).snapshot()[1])
    one_step(kind, module, 1)
    other = kind.module(1)
    one_step(kind, other, 1)
    assert module.digest() == other.digest()
