"""How big things are, from the config alone: for deadlines and memory limits.  Exact for the built-in decoder."""

from __future__ import annotations

from swarm.config import ModelSection, RunConfig
from swarm.tensors import TensorSpec

BYTES_PER_PARAMETER = 24
"""Parameters 4, moments 8, step gradient 4, gradient being computed 4, reduced gradient 4 (fp32, Adam)."""

STATE_PER_GRADIENT = 8
"""Greatest state per byte of gradient: parameters and two moments are 3, in float32."""
STATE_SLACK_BYTES = 1 << 20
"""What a state may have beside that."""


def most_state_bytes(gradient_bytes: int) -> int:
    """No state (parameters and optimizer) of a stage whose gradient has ``gradient_bytes`` is larger."""
    return STATE_PER_GRADIENT * gradient_bytes + STATE_SLACK_BYTES


def stage_parameters(model: ModelSection, stage: int) -> int:
    """Number of parameters of a stage."""
    d = model.width
    count = model.layers_per_stage[stage] * (12 * d * d + 13 * d)
    if stage == 0:
        count += (model.vocabulary + model.sequence_length) * d
    if stage == model.stage_count - 1:
        count += 2 * d + model.vocabulary * d
    return count


def largest_tensor_bytes(config: RunConfig) -> int:
    """No tensor of a forward or backward of this run is larger: ids or activations."""
    return 8 * config.step.microbatch_size * config.model.sequence_length * config.model.width


def boundary_spec(model: ModelSection, ids: TensorSpec) -> TensorSpec:
    """What travels between stages for token ids (B, T): activations (B, T, D), and gradients of the same form."""
    return TensorSpec(dtype="float32", shape=(*ids.shape, model.width))


def stage_memory_bytes(model: ModelSection, stage: int) -> int:
    """Memory of a peer of the stage without activations."""
    return BYTES_PER_PARAMETER * stage_parameters(model, stage)
