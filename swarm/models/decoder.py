"""A GPT-like decoder, cut into stages.

Pre-norm, learned positions, causal attention, GELU, untied head (Radford et al. 2019, without dropout of the
attention's weights).  Parameters are named by their layer in the whole model and drawn from a generator of
their layer, so that names and initial values do not depend on the cut.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarm.config import ModelSection, RunConfig
from swarm.models.draws import Dropout, keyed_generator
from swarm.models.stateless import check_stateless
from swarm.ports import Draw

INITIAL_STD = 0.02


class Embedding(nn.Module):
    """Token ids (B, T) to activations (B, T, D)."""

    def __init__(self, model: ModelSection, run_seed: int) -> None:
        super().__init__()
        self.token = nn.Embedding(model.vocabulary, model.width)
        self.position = nn.Embedding(model.sequence_length, model.width)
        self.dropout = Dropout(model.dropout, run_seed, "embedding")

    def forward(self, ids: Tensor, draw: Draw) -> Tensor:
        x: Tensor = self.token(ids) + self.position.weight[: ids.shape[1]]
        return self.dropout.forward(x, draw)


class Attention(nn.Module):
    """Causal self-attention; (B, T, D) to (B, T, D)."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.heads = model.heads
        self.qkv = nn.Linear(model.width, 3 * model.width)
        self.projection = nn.Linear(model.width, model.width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(x).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection.forward(mixed.transpose(1, 2).reshape(rows, length, width))


class Mlp(nn.Module):
    """Position-wise (B, T, D) to (B, T, D), four times as wide inside."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.expansion = nn.Linear(model.width, 4 * model.width)
        self.projection = nn.Linear(4 * model.width, model.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection.forward(F.gelu(self.expansion(x)))


class Block(nn.Module):
    """One layer; ``index`` counts over the whole model."""

    def __init__(self, model: ModelSection, run_seed: int, index: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(model.width)
        self.attention = Attention(model)
        self.dropout1 = Dropout(model.dropout, run_seed, f"block.{index}.attention")
        self.norm2 = nn.LayerNorm(model.width)
        self.mlp = Mlp(model)
        self.dropout2 = Dropout(model.dropout, run_seed, f"block.{index}.mlp")

    def forward(self, x: Tensor, draw: Draw) -> Tensor:
        x = x + self.dropout1.forward(self.attention(self.norm1(x)), draw)
        return x + self.dropout2.forward(self.mlp(self.norm2(x)), draw)


class Head(nn.Module):
    """Activations (B, T, D) to logits (B, T, V)."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(model.width)
        self.output = nn.Linear(model.width, model.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.output(self.norm(x))
        return logits


class Stage(nn.Module):
    """Contiguous layers of the decoder: ids (at stage 0) or activations in, activations or logits (last stage) out."""

    def __init__(self, config: RunConfig, stage: int) -> None:
        super().__init__()
        model, seed = config.model, config.run.seed
        layers = model.layers_per_stage
        first = sum(layers[:stage])
        self.embedding = Embedding(model, seed) if stage == 0 else None
        self.block = nn.ModuleDict({str(i): Block(model, seed, i) for i in range(first, first + layers[stage])})
        self.head = Head(model) if stage == len(layers) - 1 else None

    def forward(self, x: Tensor, draw: Draw) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x, draw)
        for block in self.block.values():
            x = block(x, draw)
        return x if self.head is None else self.head(x)


def build_stage(config: RunConfig, stage: int) -> Stage:
    """Build ``stage`` (from 0) on the CPU, initialised from the run's seed; torch's global generator is not touched."""
    if not 0 <= stage < config.model.stage_count:
        raise ValueError(f"stage {stage} is not one of {config.model.stage_count}")
    with torch.device("meta"):
        # Torch's own initialisation would draw from the global generator.
        module = Stage(config, stage)
    module.to_empty(device="cpu")
    layers: dict[str, nn.Module] = {f"block.{name}": block for name, block in module.block.items()}
    if module.embedding is not None:
        layers["embedding"] = module.embedding
    if module.head is not None:
        layers["head"] = module.head
    for name, layer in layers.items():
        _initialise(layer, keyed_generator("initial", config.run.seed, name), config.model.layers)
    check_stateless(module)
    return module.train()


def _initialise(layer: nn.Module, generator: torch.Generator, layers: int) -> None:
    """Norms to one, biases to zero, matrices normal; those that add to the residual scaled by 1/sqrt(2 * layers)."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            *_, owner, kind = name.split(".")
            if kind == "bias":
                parameter.zero_()
            elif owner.startswith("norm"):
                parameter.fill_(1.0)
            else:
                std = INITIAL_STD / math.sqrt(2 * layers) if owner == "projection" else INITIAL_STD
                parameter.normal_(0.0, std, generator=generator)
