"""The decoder computes and starts the same however it is cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarm.config import RunConfig, parse
from swarm.errors import UsageError
from swarm.ids import MicrobatchId
from swarm.models.decoder import build_stage
from swarm.models.draws import Dropout, keyed_generator
from swarm.models.stateless import check_stateless
from swarm.ports import Draw

pytestmark = pytest.mark.fast

LAYERS = 3
ROWS, COLUMNS, WIDTH, VOCABULARY = 2, 16, 32, 256
CUTS: list[int | list[int]] = [1, 2, 3, [2, 1]]
DRAW = Draw(step=5, microbatch=MicrobatchId(3))


def make_config(stages: int | list[int] = 1, seed: int = 7, **model: object) -> RunConfig:
    section = {"layers": LAYERS, "width": WIDTH, "heads": 4, "sequence_length": COLUMNS, "stages": stages, **model}
    return parse(
        {
            "run": {"name": "test", "seed": seed},
            "model": section,
            "optimizer": {"learning_rate": 0.1},
            "step": {"microbatches": 2, "microbatch_size": ROWS},
        },
        "test",
    )


def build(config: RunConfig) -> list[nn.Module]:
    torch.set_num_threads(1)
    return [build_stage(config, stage) for stage in range(config.model.stage_count)]


def named(stages: list[nn.Module]) -> dict[str, nn.Parameter]:
    return {name: parameter for stage in stages for name, parameter in stage.named_parameters()}


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (ROWS, COLUMNS + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


def train(stages: list[nn.Module], draw: Draw = DRAW) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one microbatch."""
    x, targets = batch()
    for stage in stages:
        x = stage(x, draw)
    loss = F.cross_entropy(x.flatten(0, 1), targets.flatten())
    parameters = named(stages)
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return loss.item(), dict(zip(parameters, gradients, strict=True))


@pytest.mark.parametrize("stages", CUTS)
def test_initial_parameters_do_not_depend_on_the_cut(stages: int | list[int]) -> None:
    whole = named(build(make_config(1)))
    cut = named(build(make_config(stages)))
    assert list(cut) == list(whole)
    assert "block.2.attention.qkv.weight" in cut
    assert all(torch.equal(cut[name], whole[name]) for name in whole)


def test_initial_parameters_are_those_described() -> None:
    parameters = named(build(make_config(1, width=128)))
    assert parameters["block.1.attention.qkv.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert parameters["block.1.mlp.projection.weight"].std().item() == pytest.approx(0.02 / 6**0.5, rel=0.05)
    assert all(not p.any() for name, p in parameters.items() if name.endswith("bias"))
    assert all(bool((p == 1).all()) for name, p in parameters.items() if name.endswith(("norm1.weight", "norm.weight")))
    # Layers draw from generators of their own: no two are equal, and another seed gives other values.
    assert not torch.equal(parameters["block.0.mlp.expansion.weight"], parameters["block.1.mlp.expansion.weight"])
    other = named(build(make_config(1, seed=8, width=128)))
    assert not torch.equal(parameters["head.output.weight"], other["head.output.weight"])


def test_building_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    build(make_config(2, dropout=0.1))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("stages", CUTS[1:])
def test_loss_and_gradients_do_not_depend_on_the_cut(stages: int | list[int], dropout: float) -> None:
    loss, gradients = train(build(make_config(1, dropout=dropout)))
    cut_loss, cut_gradients = train(build(make_config(stages, dropout=dropout)))
    assert cut_loss == pytest.approx(loss, abs=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(cut_gradients[name], gradient, rtol=0, atol=1e-5)


def test_attention_is_causal() -> None:
    (stage,) = build(make_config(1))
    ids, _ = batch()
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % VOCABULARY
    before, after = stage(ids, DRAW), stage(changed, DRAW)
    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert not torch.allclose(before[:, -1], after[:, -1])


def test_dropout_is_a_function_of_its_key() -> None:
    stages = build(make_config(2, dropout=0.3))
    loss, gradients = train(stages)
    torch.rand(5)  # what else draws in the process does not matter
    again, again_gradients = train(stages)
    assert again == loss
    assert all(torch.equal(gradients[name], again_gradients[name]) for name in gradients)
    for other in (Draw(step=5, microbatch=MicrobatchId(4)), Draw(step=6, microbatch=MicrobatchId(3))):
        assert train(stages, other)[0] != loss


def test_dropout_keeps_the_mean_and_differs_by_place_and_seed() -> None:
    ones = torch.ones(100, 1000)
    dropped = Dropout(0.25, 1, "block.0.mlp").forward(ones, DRAW)
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.02)
    assert (dropped == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    for other in (
        Dropout(0.25, 1, "block.1.mlp"),
        Dropout(0.25, 2, "block.0.mlp"),
        Dropout(0.25, 1, "block.0.attention"),
    ):
        assert not torch.equal(other.forward(ones, DRAW), dropped)


def test_no_dropout_draws_nothing() -> None:
    x = torch.ones(2, 3)
    assert Dropout(0.0, 1, "embedding").forward(x, DRAW) is x


def test_keys_do_not_run_together() -> None:
    a = torch.rand(4, generator=keyed_generator("a", 11, 1))
    assert not torch.equal(a, torch.rand(4, generator=keyed_generator("a", 1, 11)))
    assert torch.equal(a, torch.rand(4, generator=keyed_generator("a", 11, 1)))


class _Counter(nn.Module):
    """Counts its forwards in a buffer."""

    count: Tensor

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts = counts
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.count += 1
        return x


def test_modules_that_change_buffers_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="BatchNorm1d '1'"):
        check_stateless(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with pytest.raises(UsageError, match="InstanceNorm1d"):
        check_stateless(nn.InstanceNorm1d(2, track_running_stats=True))
    counting = nn.Sequential(nn.Linear(2, 2), _Counter(True))
    with pytest.raises(UsageError, match="_Counter '1'"):
        check_stateless(counting, lambda: counting(torch.zeros(1, 2)))


def test_modules_that_keep_their_buffers_are_accepted() -> None:
    constant = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), _Counter(False))
    before = torch.get_rng_state()
    check_stateless(constant, lambda: constant(torch.rand(3, 2)))
    assert torch.equal(before, torch.get_rng_state())


def test_a_stage_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="stage 2"):
        build_stage(make_config(2), 2)
