"""A small stage and inputs for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swarm.config import RunConfig, parse
from swarm.ids import MicrobatchId
from swarm.ports import Draw
from swarm.stage.arrays import to_data
from swarm.stage.module import TorchStage
from swarm.tensors import TensorData

ROWS, COLUMNS, WIDTH, VOCABULARY = 2, 8, 16, 256


def make_config(stages: int = 3, dropout: float = 0.0, **optimizer: Any) -> RunConfig:
    return parse(
        {
            "run": {"name": "test", "seed": 7},
            "model": {
                "layers": 3,
                "width": WIDTH,
                "heads": 2,
                "sequence_length": COLUMNS,
                "stages": stages,
                "dropout": dropout,
            },
            "optimizer": {"learning_rate": 0.01, **optimizer},
            "step": {"microbatches": 2, "microbatch_size": ROWS},
        },
        "test",
    )


def draw(microbatch: int = 0, step: int = 0) -> Draw:
    return Draw(step=step, microbatch=MicrobatchId(microbatch))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def activations(seed: int = 0, rows: int = ROWS) -> TensorData:
    return to_data(random(rows, COLUMNS, WIDTH, seed=seed))


# --- snapshots ---------------------------------------------------------------------------


def _joined(module: TorchStage) -> tuple[str, bytes]:
    layout, buffers = module.snapshot()
    return layout, b"".join(buffers)
