"""How many steps a run is to make."""

from __future__ import annotations

from swarm.config import RunConfig
from swarm.errors import UsageError


def steps_of(config: RunConfig, asked: int | None) -> int:
    """``--steps``, or the optimizer's total_steps.  Raises UsageError if neither is given."""
    steps = asked if asked is not None else config.optimizer.total_steps
    if steps is None:
        raise UsageError("how many steps? give --steps N, or total_steps in [optimizer]")
    return steps
