"""torch's optimizers over named parameters, with a state that can be listed in a fixed order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from swarm.config import OptimizerSection
from swarm.tensors import TensorSpec


class StageOptimizer:
    """AdamW, or SGD with momentum, of one stage.

    Weight decay applies to matrices (two dimensions or more, embeddings included) and not to biases and norms:
    decoupled in AdamW (Loshchilov and Hutter 2019), added to the gradient in SGD.
    """

    def __init__(self, config: OptimizerSection, parameters: Mapping[str, nn.Parameter]) -> None:
        self._config = config
        self._parameters = dict(parameters)
        self._optimizer = self._build()

    def step(self, learning_rate: float, gradients: Sequence[Tensor]) -> None:
        """Update the parameters in place; ``gradients`` in the parameters' order."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        for parameter, gradient in zip(self._parameters.values(), gradients, strict=True):
            parameter.grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> list[Tensor]:
        """All state tensors, not copied, in the order of :meth:`state_specs`; none before the first step."""
        keys = self._keys()
        states = [self._optimizer.state.get(parameter, {}) for parameter in self._parameters.values()]
        if not all(states):
            return []
        return [state[key] for state in states for key in keys]

    def state_specs(self) -> list[tuple[str, TensorSpec]]:
        """Names, dtypes and shapes of the state once a step was made."""
        found = []
        for name, parameter in self._parameters.items():
            for key in self._keys():
                shape = () if key == "step" else tuple(parameter.shape)
                found.append((f"optimizer.{name}.{key}", TensorSpec(dtype="float32", shape=shape)))
        return found

    def check_state(self, state: Sequence[Tensor]) -> None:
        """Raise ValueError if counters are not whole or second moments are negative (finiteness is checked before)."""
        keys = self._keys()
        for i, tensor in enumerate(state):
            key = keys[i % len(keys)]
            if key == "step" and (tensor.item() < 1 or tensor.item() % 1):
                raise ValueError(f"step counter is {tensor.item()}")
            if key == "exp_avg_sq" and tensor.numel() and tensor.min().item() < 0:
                raise ValueError("a second moment is negative")

    def load_state(self, state: Sequence[Tensor]) -> None:
        """Take over a copy of ``state`` (in the order of :meth:`state_specs`; empty: as before the first step)."""
        self._optimizer = self._build()
        if not state:
            return
        keys = self._keys()
        for i, parameter in enumerate(self._parameters.values()):
            own = state[i * len(keys) : (i + 1) * len(keys)]
            # AdamW keeps its step counters on the CPU whatever the device.
            self._optimizer.state[parameter] = {
                key: tensor.clone() if key == "step" else tensor.to(parameter.device, copy=True)
                for key, tensor in zip(keys, own, strict=True)
            }

    def _keys(self) -> tuple[str, ...]:
        if self._config.name == "adamw":
            return ("step", "exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self._config.momentum else ()

    def _build(self) -> torch.optim.Optimizer:
        config, parameters = self._config, self._parameters.values()
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if config.name == "adamw":
            return torch.optim.AdamW(
                groups, lr=config.learning_rate, betas=config.betas, eps=config.epsilon, foreach=True
            )
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, foreach=True)
