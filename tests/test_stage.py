"""One stage: nothing half done stays behind, and its state survives the way to another peer."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from swarm.errors import BadRequest, NeedsInput, NotFinite
from swarm.ids import MicrobatchId, PeerId, RunHash
from swarm.messages import BackwardRequest, ForwardRequest, MicrobatchCall, StepKey
from swarm.ports import Executor, Gradient, StageModule
from swarm.records import Lineage, Term
from swarm.stage.arrays import from_data, to_data
from swarm.stage.executor import ThreadExecutor
from swarm.stage.module import TorchStage, numeric_class
from swarm.tensors import TensorData
from tests.stage_case import COLUMNS, ROWS, VOCABULARY, WIDTH, _joined, activations, draw, make_config

pytestmark = pytest.mark.fast


def tokens(seed: int = 0, rows: int = ROWS) -> TensorData:
    return to_data(torch.randint(VOCABULARY, (rows, COLUMNS), generator=torch.Generator().manual_seed(seed)))


def make_call(stage: int) -> MicrobatchCall:
    run = RunHash("0" * 64)
    key = StepKey(run=run, stage=stage, term=Term(1, PeerId("a")), lineage=Lineage.root(run))
    return MicrobatchCall(key=key, microbatch=MicrobatchId(0), try_number=0, attempt=0, deadline_seconds=1.0)


def flat(gradient: Gradient) -> Tensor:
    return torch.cat([part.reshape(-1) for part in gradient.handle])


# --- computing ------------------------------------------------------------------------


def test_it_is_what_the_ports_ask_for() -> None:
    module: StageModule = TorchStage(make_config(), 0)
    executor: Executor = ThreadExecutor()
    assert module.squared_norm() > 0
    assert executor.waiting == 0
    assert numeric_class().startswith("cpu/")


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("stage", [0, 1])
def test_recomputation_gives_the_bits_of_the_kept_graph(stage: int, dropout: float) -> None:
    module = TorchStage(make_config(dropout=dropout), stage)
    inputs, seed = (tokens() if stage == 0 else activations()), activations(9)
    first = module.forward(draw(), inputs, keep_graph=True)
    assert len(module.graphs) == 1
    assert bytes(module.forward(draw(), inputs, keep_graph=False).data) == bytes(first.data)
    kept = module.backward(draw(), None, seed)
    assert len(module.graphs) == 0
    again = module.backward(draw(), inputs, seed)
    assert torch.equal(flat(kept), flat(again))
    assert kept.finite
    assert kept.samples == ROWS
    if stage == 0:
        assert kept.input_gradient is again.input_gradient is None
    else:
        assert kept.input_gradient is not None
        assert kept.input_gradient.spec == inputs.spec
        assert again.input_gradient is not None
        assert bytes(kept.input_gradient.data) == bytes(again.input_gradient.data)


def test_last_stage_sums_over_the_targets_that_count() -> None:
    module = TorchStage(make_config(), 2)
    targets = from_data(tokens()).clone()
    targets[0, 2:] = -1
    inputs = activations()
    logits = from_data(module.forward(draw(), inputs, keep_graph=False))
    gradient = module.backward(draw(), inputs, to_data(targets))
    counted = targets.flatten() >= 0
    expected = F.cross_entropy(logits.flatten(0, 1)[counted], targets.flatten()[counted], reduction="sum")
    assert gradient.loss == pytest.approx(expected.item(), rel=1e-6)
    assert gradient.finite
    nothing = module.backward(draw(), inputs, to_data(torch.full_like(targets, -5)))
    assert nothing.loss == 0.0
    assert not flat(nothing).any()


def test_a_model_of_one_stage() -> None:
    module = TorchStage(make_config(stages=1), 0)
    gradient = module.backward(draw(), tokens(), tokens(1))
    assert gradient.input_gradient is None
    assert gradient.loss is not None
    assert gradient.loss > 0
    assert gradient.finite


def test_a_gradient_is_apart_until_it_is_accumulated() -> None:
    module = TorchStage(make_config(), 1)
    first = module.backward(draw(0), activations(0), activations(1))
    second = module.backward(draw(1), activations(2, rows=1), activations(3, rows=1))
    assert not module.gradient_sum().any()
    module.accumulate(first)
    module.accumulate(second)
    assert torch.equal(module.gradient_sum(), flat(first) + flat(second))
    module.drop_gradient()
    assert not module.gradient_sum().any()


def test_an_exception_half_way_leaves_nothing_behind() -> None:
    module = TorchStage(make_config(), 1)
    module.accumulate(module.backward(draw(0), activations(0), activations(1)))
    before, parameters = module.gradient_sum().clone(), module.digest()
    reached = []

    def fail(gradient: Tensor) -> None:
        reached.append(tuple(gradient.shape))
        raise RuntimeError("half way")

    # The gradients of everything above this bias are computed when it raises.
    middle = module._module.block["1"].attention.qkv.bias  # type: ignore[union-attr]
    assert isinstance(middle, Tensor)
    hook = middle.register_hook(fail)  # type: ignore[no-untyped-call]
    module.forward(draw(1), activations(2), keep_graph=True)
    with pytest.raises(RuntimeError, match="half way"):
        module.backward(draw(1), None, activations(3))
    hook.remove()
    assert reached
    assert torch.equal(module.gradient_sum(), before)
    assert module.digest() == parameters
    assert len(module.graphs) == 0
    with pytest.raises(NeedsInput):
        module.backward(draw(1), None, activations(3))
    assert module.backward(draw(1), activations(2), activations(3)).finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_seen(bad: float) -> None:
    module = TorchStage(make_config(), 1)
    broken = from_data(activations()).clone()
    broken[1, 3, 5] = bad
    with pytest.raises(NotFinite, match="input"):
        module.forward(draw(), to_data(broken), keep_graph=True)
    assert not module.backward(draw(), activations(), to_data(broken)).finite
    with pytest.raises(NotFinite, match="input"):
        module.backward(draw(), to_data(broken), activations())
    last = TorchStage(make_config(), 2)
    with pytest.raises(NotFinite, match="input"):
        last.backward(draw(), to_data(broken), tokens())
    with torch.no_grad():
        module.named_parameters()["block.1.mlp.projection.bias"][0] = bad
    with pytest.raises(NotFinite, match="output"):
        module.forward(draw(), activations(), keep_graph=True)
    assert len(module.graphs) == 0
    assert not module.gradient_sum().any()


def test_a_graph_fed_by_other_inputs_is_not_used() -> None:
    module = TorchStage(make_config(), 1)
    expected = module.backward(draw(), activations(5), activations(9))
    module.forward(draw(), activations(0), keep_graph=True)
    assert torch.equal(flat(module.backward(draw(), activations(5), activations(9))), flat(expected))


def test_graphs_stay_within_the_budget_and_the_newest_goes() -> None:
    generous = TorchStage(make_config(), 1)
    generous.forward(draw(), activations(), keep_graph=True)
    one = generous.graphs.used_bytes
    # At least input and output, and the inner activations: 4 x width inside the MLP, 3 x in attention.
    assert one > ROWS * COLUMNS * WIDTH * 4 * 9
    module = TorchStage(make_config(), 1, graph_budget_bytes=2 * one + one // 2)
    for i in range(4):
        module.forward(draw(i), activations(i), keep_graph=True)
    assert module.graphs.used_bytes == 2 * one
    for i in (0, 1):
        assert module.backward(draw(i), None, activations(9)).finite
    assert module.graphs.used_bytes == 0
    for i in (2, 3):
        with pytest.raises(NeedsInput):
            module.backward(draw(i), None, activations(9))
    none = TorchStage(make_config(), 1, graph_budget_bytes=0)
    none.forward(draw(), activations(), keep_graph=True)
    assert len(none.graphs) == 0


def test_the_probe_leaves_nothing_behind() -> None:
    for stage in range(3):
        module = TorchStage(make_config(dropout=0.1), stage)
        before = module.digest()
        assert 0.0 < module.probe() < 10.0
        assert (module.digest(), len(module.graphs)) == (before, 0)
        assert not module.gradient_sum().any()
        assert module.gradient_bytes == 4 * module.gradient_sum().numel()


def test_a_graph_is_freed_when_it_is_dropped() -> None:
    """Measuring must not make a cycle: that would leak one graph per shape."""
    module = TorchStage(make_config(), 1)
    module.forward(draw(), activations(), keep_graph=True)
    graph = module.graphs.take(draw())
    assert graph is not None
    output, leaf = weakref.ref(graph.output), weakref.ref(graph.inputs)
    del graph
    assert output() is None
    assert leaf() is None


@pytest.mark.parametrize("drop", [lambda m: m.apply(0, 1.0), lambda m: m.load(*_joined(m)), lambda m: m.reset()])
def test_graphs_and_sum_do_not_outlive_the_parameters(drop: Callable[[TorchStage], object]) -> None:
    module = TorchStage(make_config(), 1)
    module.set_reduced(torch.ones_like(module.gradient_sum()))
    module.accumulate(module.backward(draw(0), activations(), activations(1)))
    module.forward(draw(1), activations(), keep_graph=True)
    drop(module)
    assert not module.gradient_sum().any()
    with pytest.raises(NeedsInput):
        module.backward(draw(1), None, activations(1))


def test_requests_that_do_not_fit_are_refused() -> None:
    first, middle, last = (TorchStage(make_config(), stage) for stage in range(3))
    good_ids, good = tokens(), activations()
    for module, fitting in ((first, good_ids), (middle, good), (last, good)):
        module.check_forward(ForwardRequest(call=make_call(0), inputs=fitting))
        module.check_forward(ForwardRequest(call=make_call(0), inputs=tokens(rows=1) if module is first else good))
    wrong: list[tuple[TorchStage, Tensor]] = [
        (first, from_data(good)),
        (first, torch.zeros(ROWS, COLUMNS, dtype=torch.int32)),
        (first, torch.zeros(ROWS, COLUMNS - 1, dtype=torch.int64)),
        (first, torch.zeros(ROWS + 1, COLUMNS, dtype=torch.int64)),
        (first, torch.zeros(0, COLUMNS, dtype=torch.int64)),
        (first, torch.zeros(COLUMNS, dtype=torch.int64)),
        (first, torch.zeros((), dtype=torch.int64)),
        (middle, from_data(good_ids)),
        (middle, torch.zeros(ROWS, COLUMNS, WIDTH, dtype=torch.float64)),
        (middle, torch.zeros(ROWS, COLUMNS, WIDTH + 1)),
        (middle, torch.zeros(ROWS, COLUMNS, WIDTH, 1)),
        (last, torch.zeros(0, COLUMNS, WIDTH)),
    ]
    for module, tensor in wrong:
        with pytest.raises(BadRequest):
            module.check_forward(ForwardRequest(call=make_call(0), inputs=to_data(tensor)))
        with pytest.raises(BadRequest):
            module.forward(draw(), to_data(tensor), keep_graph=True)


def test_backward_requests_that_do_not_fit_are_refused() -> None:
    first, middle, last = (TorchStage(make_config(), stage) for stage in range(3))
    good = ROWS * COLUMNS

    def request(inputs: TensorData | None, seed: TensorData, counted: int = good) -> BackwardRequest:
        return BackwardRequest(call=make_call(0), inputs=inputs, seed=seed, tokens=counted)

    first.check_backward(request(tokens(), activations()))
    middle.check_backward(request(None, activations(), 0))
    last.check_backward(request(activations(), tokens()))
    for module, wrong in (
        (first, request(activations(), activations())),
        (first, request(None, tokens())),
        (middle, request(activations(rows=1), activations())),
        (middle, request(None, activations(), good + 1)),
        (middle, request(None, activations(), -1)),
        (last, request(activations(), activations())),
        (last, request(activations(), tokens(), good - 1)),
        (last, request(activations(), to_data(torch.full((ROWS, COLUMNS), -1)), 1)),
    ):
        with pytest.raises(BadRequest):
            module.check_backward(wrong)
    middle.forward(draw(), activations(), keep_graph=True)
    with pytest.raises(BadRequest, match="rows"):
        middle.backward(draw(), None, activations(rows=1))


@pytest.mark.parametrize("bad", [-1, VOCABULARY, 1 << 62])
def test_ids_out_of_range_are_refused(bad: int) -> None:
    ids = from_data(tokens()).clone()
    ids[1, 2] = bad
    first, last = TorchStage(make_config(), 0), TorchStage(make_config(), 2)
    with pytest.raises(BadRequest):
        first.forward(draw(), to_data(ids), keep_graph=True)
    with pytest.raises(BadRequest):
        first.backward(draw(), to_data(ids), activations())
    if bad >= 0:
        with pytest.raises(BadRequest):
            last.backward(draw(), activations(), to_data(ids))
