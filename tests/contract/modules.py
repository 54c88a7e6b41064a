"""Modules of both kinds, tensors that they take, and steps that tests of their contract make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import pytest
import torch

from swarm.config import RunConfig, parse
from swarm.ids import MicrobatchId
from swarm.messages import MicrobatchCall, StepKey
from swarm.ports import Draw, StageModule
from swarm.records import Lineage
from swarm.sim.arithmetic import WIDTH, NumericBatches, mean, pack
from swarm.sim.numeric import NumericStage
from swarm.stage.arrays import to_data
from swarm.stage.module import TorchStage
from swarm.tensors import TensorData
from tests.contract.worlds import FAST, REAL
from tests.stage_double import RUN, TERM

STAGES = 3
STAGE_KINDS = range(STAGES)
"""The first takes ids and gives no input gradient; the last takes targets and gives a loss."""


class Kind(Protocol):
    """Modules of one kind, and tensors that they take.  Numbers choose among several."""

    def module(self, stage: int) -> StageModule: ...
    def inputs(self, stage: int, number: int = 0) -> TensorData: ...
    def seed(self, stage: int, number: int = 0) -> TensorData: ...
    def wrong(self) -> TensorData:
        """A tensor that no stage takes."""

    def tokens(self) -> int:
        """Targets that count in a seed."""

    def mean(self, gradient_sum: Any, tokens: int) -> Any:
        """What an averager of a single member would give."""


class Numeric:
    def module(self, stage: int) -> StageModule:
        return NumericStage(stage, STAGES)

    def inputs(self, stage: int, number: int = 0) -> TensorData:
        return NumericBatches().microbatch(stage, MicrobatchId(number))[0]

    def seed(self, stage: int, number: int = 0) -> TensorData:
        return NumericBatches().microbatch(stage, MicrobatchId(number))[1]

    def wrong(self) -> TensorData:
        return pack([1] * (WIDTH + 1))

    def tokens(self) -> int:
        return 1

    def mean(self, gradient_sum: Any, tokens: int) -> Any:
        return mean(tuple(gradient_sum), tokens)


class Torch:
    rows, columns, width, vocabulary = 2, 8, 16, 256
    config: RunConfig = parse(
        {
            "run": {"name": "test", "seed": 7},
            "model": {"layers": 3, "width": width, "heads": 2, "sequence_length": columns, "stages": 3, "dropout": 0.1},
            "optimizer": {"learning_rate": 0.01},
            "step": {"microbatches": 2, "microbatch_size": rows},
        },
        "test",
    )

    def module(self, stage: int) -> StageModule:
        return TorchStage(self.config, stage)

    def inputs(self, stage: int, number: int = 0) -> TensorData:
        return self._ids(number) if stage == 0 else self._activations(number)

    def seed(self, stage: int, number: int = 0) -> TensorData:
        return self._ids(100 + number) if stage == STAGES - 1 else self._activations(100 + number)

    def wrong(self) -> TensorData:
        return to_data(torch.zeros(self.rows, self.columns + 1, self.width))

    def tokens(self) -> int:
        return self.rows * self.columns

    def mean(self, gradient_sum: Any, tokens: int) -> Any:
        return gradient_sum / tokens

    def _ids(self, number: int) -> TensorData:
        generator = torch.Generator().manual_seed(number)
        return to_data(torch.randint(self.vocabulary, (self.rows, self.columns), generator=generator))

    def _activations(self, number: int) -> TensorData:
        generator = torch.Generator().manual_seed(number)
        return to_data(torch.randn(self.rows, self.columns, self.width, generator=generator))


def kind_fixture() -> Any:
    """A fixture that has each test of its module run with modules of both kinds."""

    @pytest.fixture(
        params=[pytest.param(Numeric, marks=FAST, id="simulated"), pytest.param(Torch, marks=REAL, id="real")]
    )
    def kind(request: pytest.FixtureRequest) -> Kind:
        make: Callable[[], Kind] = request.param
        return make()

    return kind


def draw(microbatch: int = 0, step: int = 0) -> Draw:
    return Draw(step=step, microbatch=MicrobatchId(microbatch))


def call(stage: int) -> MicrobatchCall:
    key = StepKey(run=RUN, stage=stage, term=TERM, lineage=Lineage.root(RUN))
    return MicrobatchCall(key=key, microbatch=MicrobatchId(0), try_number=0, attempt=0, deadline_seconds=1.0)


def joined(buffers: Any) -> bytes:
    return b"".join(bytes(memoryview(buffer).cast("B")) for buffer in buffers)


def sum_digest(kind: Kind, module: StageModule) -> str:
    """Of the step's sum: by way of a mean over one token, which leaves it as it is."""
    return module.set_reduced(kind.mean(module.gradient_sum(), 1))[0]


def one_step(kind: Kind, module: StageModule, stage: int, step: int = 0, numbers: tuple[int, ...] = (0, 1)) -> None:
    for number in numbers:
        gradient = module.backward(draw(number, step), kind.inputs(stage, number), kind.seed(stage, number))
        module.accumulate(gradient)
    module.set_reduced(kind.mean(module.gradient_sum(), len(numbers) * kind.tokens()))
    module.apply(step, 1.0)
