"""The same run in one process: the definition of what the swarm should compute.

Model and update are the peers' own code (``TorchStage``); what differs is all that can go wrong: here nothing is
sent, routed, retried or averaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from swarm.config import RunConfig
from swarm.errors import NotFinite, RunFailed
from swarm.ids import MicrobatchId
from swarm.policy.schedule import clip_factor
from swarm.ports import Batches, Draw, Gradient
from swarm.stage import measures
from swarm.stage.module import TorchStage

Order = Callable[[int, Sequence[MicrobatchId]], Sequence[MicrobatchId]]
"""(step, microbatches in index order) to the order in which their gradients are added up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step: ``loss`` is the mean per token, in nats, before the update."""

    loss: float
    tokens: int
    excluded: tuple[MicrobatchId, ...]
    """Not finite, and in no stage's gradient."""
    clip_factor: float
    samples: int
    """Sequences in every stage's gradient."""


class Reference:
    """All stages in this process, from the run's seed.

    ``order`` permutes the microbatches, to measure how much the order of float additions alone makes of a run.
    """

    def __init__(self, config: RunConfig, batches: Batches, order: Order | None = None, device: str = "cpu") -> None:
        self._config = config
        self._batches = batches
        self._order = order
        self.stages = [TorchStage(config, stage, device) for stage in range(config.model.stage_count)]
        self.initial = [stage.flat_parameters() for stage in self.stages]
        """Parameters before the first step, one flat tensor a stage."""
        self.steps = 0

    def parameters(self, stage: int) -> Tensor:
        """A flat copy of a stage's parameters."""
        return self.stages[stage].flat_parameters()

    def step(self) -> StepResult:
        """One optimizer step over all microbatches.

        Raises RunFailed if not a single token is left to train on.
        """
        ids = [MicrobatchId(i) for i in range(self._config.step.microbatches)]
        excluded: list[MicrobatchId] = []
        losses: dict[MicrobatchId, float] = {}
        tokens = samples = 0
        for microbatch in ids if self._order is None else self._order(self.steps, ids):
            gradients, counted = self._gradients(microbatch)
            if not gradients:
                excluded.append(microbatch)
                continue
            for stage, gradient in zip(self.stages, gradients, strict=True):
                stage.accumulate(gradient)
            losses[microbatch] = gradients[-1].loss or 0.0
            tokens += counted
            samples += gradients[-1].samples
        if tokens == 0:
            raise RunFailed(f"step {self.steps} has no finite microbatch with tokens to train on")
        factor = self._update(tokens)
        # Added up in index order, as a commit record does, whatever the order of the gradients.
        loss = sum(losses[i] for i in sorted(losses)) / tokens
        return StepResult(
            loss=loss, tokens=tokens, excluded=tuple(sorted(excluded)), clip_factor=factor, samples=samples
        )

    def _gradients(self, microbatch: MicrobatchId) -> tuple[list[Gradient], int]:
        """A gradient per stage and the number of tokens; no gradients if any of them is not finite."""
        draw = Draw(step=self.steps, microbatch=microbatch)
        inputs, seed, tokens = self._batches.microbatch(self.steps, microbatch)
        activations = [inputs]
        try:
            for stage in self.stages[:-1]:
                activations.append(stage.forward(draw, activations[-1], keep_graph=True))
        except NotFinite:
            return [], tokens
        gradients: list[Gradient] = []
        for stage, given in zip(reversed(self.stages), reversed(activations), strict=True):
            gradient = stage.backward(draw, given, seed)
            if not gradient.finite:
                return [], tokens
            gradients.insert(0, gradient)
            if gradient.input_gradient is not None:
                seed = gradient.input_gradient
        return gradients, tokens

    def _update(self, tokens: int) -> float:
        """Mean over the step's tokens, clip over all stages, update; returns the clip factor."""
        squared = 0.0
        for stage in self.stages:
            squared += stage.set_reduced(stage.gradient_sum() / tokens)[1]
        factor = clip_factor(self._config.optimizer, squared)
        for stage in self.stages:
            stage.apply(self.steps, factor)
        self.steps += 1
        return factor


def relative_difference(found: Tensor, reference: Tensor, initial: Tensor) -> float:
    """norm(found - reference) / norm(reference - initial), in float64: 0 is equal, 1 is as far as training went.

    Infinite if they differ although the reference never moved.
    """
    apart = math.sqrt(measures.squared_norm([found.double() - reference.double()]))
    moved = math.sqrt(measures.squared_norm([reference.double() - initial.double()]))
    if moved == 0.0:
        return 0.0 if apart == 0.0 else math.inf
    return apart / moved
