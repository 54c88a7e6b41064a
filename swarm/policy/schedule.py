"""The learning rate of a step, and how much of the gradient is kept."""

from __future__ import annotations

import math

from swarm.config import OptimizerSection


def learning_rate(optimizer: OptimizerSection, step: int) -> float:
    """Learning rate of ``step`` (from 0): linear warm-up, then constant, or down to zero at ``total_steps``.

    The first of W warm-up steps uses 1/W of the full rate, step W - 1 all of it.
    """
    full = optimizer.learning_rate
    if step < optimizer.warmup_steps:
        return full * (step + 1) / optimizer.warmup_steps
    if optimizer.schedule == "constant" or optimizer.total_steps is None:
        return full
    if step >= optimizer.total_steps:
        return 0.0
    done = (step - optimizer.warmup_steps) / (optimizer.total_steps - optimizer.warmup_steps)
    if optimizer.schedule == "linear":
        return full * (1.0 - done)
    return full * 0.5 * (1.0 + math.cos(math.pi * done))


def clip_factor(optimizer: OptimizerSection, squared_norm: float) -> float:
    """What every stage multiplies its mean gradient by, given the squared norm summed over all stages.

    The same formula as ``torch.nn.utils.clip_grad_norm_``, so that a plain loop can be compared.
    """
    if optimizer.clip_norm is None:
        return 1.0
    return min(1.0, optimizer.clip_norm / (math.sqrt(squared_norm) + 1e-6))
