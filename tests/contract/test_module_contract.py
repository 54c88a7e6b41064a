"""What roles rely on of a stage's module: forwards, backwards and graphs."""

from __future__ import annotations

import pytest

from swarm.errors import BadRequest, NeedsInput
from swarm.messages import BackwardRequest, ForwardRequest
from tests.contract.modules import STAGE_KINDS, STAGES, Kind, call, draw, kind_fixture, sum_digest

kind = kind_fixture()


@pytest.mark.parametrize("stage", STAGE_KINDS)
def test_what_a_backward_answers(kind: Kind, stage: int) -> None:
    gradient = kind.module(stage).backward(draw(), kind.inputs(stage), kind.seed(stage))
    assert (gradient.input_gradient is None) == (stage == 0)
    assert (gradient.loss is None) == (stage != STAGES - 1)
    assert gradient.finite
    assert gradient.samples > 0
    if gradient.input_gradient is not None:
        assert gradient.input_gradient.spec == kind.inputs(stage).spec


@pytest.mark.parametrize("stage", STAGE_KINDS)
def test_a_backward_adds_nothing_until_its_gradient_is_accumulated(kind: Kind, stage: int) -> None:
    module = kind.module(stage)
    nothing, parameters = sum_digest(kind, module), module.digest()
    gradient = module.backward(draw(), kind.inputs(stage), kind.seed(stage))
    assert sum_digest(kind, module) == nothing
    module.accumulate(gradient)
    assert sum_digest(kind, module) != nothing
    assert module.digest() == parameters


def test_each_accumulated_gradient_counts_and_its_own_way(kind: Kind) -> None:
    module, found = kind.module(1), set[str]()
    for numbers in ((), (0,), (1,), (0, 0), (0, 1), (0, 1, 2)):
        module.drop_gradient()
        for number in numbers:
            module.accumulate(module.backward(draw(number), kind.inputs(1, number), kind.seed(1, number)))
        found.add(sum_digest(kind, module))
    assert len(found) == 6


@pytest.mark.parametrize("stage", STAGE_KINDS)
def test_a_kept_graph_gives_what_a_recomputation_gives(kind: Kind, stage: int) -> None:
    module, seed = kind.module(stage), kind.seed(stage)
    results = []
    for keep_graph, with_inputs in ((True, False), (True, True), (False, True)):
        module.forward(draw(), kind.inputs(stage), keep_graph=keep_graph)
        gradient = module.backward(draw(), kind.inputs(stage) if with_inputs else None, seed)
        module.drop_gradient()
        module.accumulate(gradient)
        results.append((gradient.input_gradient, gradient.loss, sum_digest(kind, module)))
    other = kind.module(stage).backward(draw(), kind.inputs(stage), seed)  # another peer, that ran no forward
    assert results[0] == results[1] == results[2]
    assert (other.input_gradient, other.loss) == results[0][:2]


def test_inputs_that_come_with_a_backward_win_over_the_graph(kind: Kind) -> None:
    """The forward may have been fed by another peer than this backward."""
    module = kind.module(1)
    module.forward(draw(), kind.inputs(1, number=5), keep_graph=True)
    gradient = module.backward(draw(), kind.inputs(1), kind.seed(1))
    expected = kind.module(1).backward(draw(), kind.inputs(1), kind.seed(1))
    assert gradient.input_gradient == expected.input_gradient
    module.accumulate(gradient)
    reference = kind.module(1)
    reference.accumulate(expected)
    assert sum_digest(kind, module) == sum_digest(kind, reference)


def test_a_graph_is_used_once_and_belongs_to_its_microbatch(kind: Kind) -> None:
    module = kind.module(1)
    with pytest.raises(NeedsInput):
        module.backward(draw(), None, kind.seed(1))
    module.forward(draw(), kind.inputs(1), keep_graph=True)
    for other in (draw(1), draw(0, step=1)):
        with pytest.raises(NeedsInput):
            module.backward(other, None, kind.seed(1))
    module.backward(draw(), None, kind.seed(1))
    with pytest.raises(NeedsInput):
        module.backward(draw(), None, kind.seed(1))
    module.forward(draw(), kind.inputs(1), keep_graph=False)
    with pytest.raises(NeedsInput):
        module.backward(draw(), None, kind.seed(1))


def test_a_backward_that_is_refused_leaves_the_graph(kind: Kind) -> None:
    module = kind.module(1)
    module.forward(draw(), kind.inputs(1), keep_graph=True)
    with pytest.raises(BadRequest):
        module.backward(draw(), None, kind.wrong())
    module.backward(draw(), None, kind.seed(1))


def test_a_forward_changes_nothing(kind: Kind) -> None:
    module = kind.module(1)
    before = module.digest(), sum_digest(kind, module)
    first = module.forward(draw(), kind.inputs(1), keep_graph=True)
    assert module.forward(draw(), kind.inputs(1), keep_graph=False) == first
    assert kind.module(1).forward(draw(), kind.inputs(1), keep_graph=False) == first
    assert module.probe() >= 0
    assert (module.digest(), sum_digest(kind, module)) == before


@pytest.mark.parametrize("stage", STAGE_KINDS)
def test_tensors_of_another_form_are_refused(kind: Kind, stage: int) -> None:
    module, wrong = kind.module(stage), kind.wrong()
    inputs, seed = kind.inputs(stage), kind.seed(stage)
    module.check_forward(ForwardRequest(call=call(stage), inputs=inputs))
    module.check_backward(BackwardRequest(call=call(stage), inputs=inputs, seed=seed, tokens=kind.tokens()))
    module.check_backward(BackwardRequest(call=call(stage), inputs=None, seed=seed, tokens=kind.tokens()))
    with pytest.raises(BadRequest):
        module.check_forward(ForwardRequest(call=call(stage), inputs=wrong))
    with pytest.raises(BadRequest):
        module.check_backward(BackwardRequest(call=call(stage), inputs=wrong, seed=seed, tokens=kind.tokens()))
    with pytest.raises(BadRequest):
        module.check_backward(BackwardRequest(call=call(stage), inputs=inputs, seed=wrong, tokens=kind.tokens()))
    with pytest.raises(BadRequest):
        module.forward(draw(), wrong, keep_graph=True)
    with pytest.raises(BadRequest):
        module.backward(draw(), wrong, seed)
