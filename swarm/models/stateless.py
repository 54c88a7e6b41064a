"""Forward must change no state: any peer may serve it, and may serve it twice."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from swarm.errors import UsageError


def check_stateless(module: nn.Module, probe: Callable[[], object] | None = None) -> None:
    """Raise UsageError, naming the module, if its training forward changes buffers.

    Norms with running statistics are known by their class.  Other modules that own buffers are tried:
    ``probe`` runs one forward, on inputs that the caller makes; a module without buffers is not run.
    """
    for name, part in module.named_modules():
        if isinstance(part, _NormBase) and part.track_running_stats:
            raise UsageError(f"model: {_called(name, part)} keeps running statistics, which peers cannot share")
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    if not before or probe is None:
        return
    with torch.no_grad(), torch.random.fork_rng():
        probe()
    for name, buffer in module.named_buffers():
        if name not in before or not torch.equal(before[name], buffer):
            owner = name.rpartition(".")[0]
            raise UsageError(f"model: {_called(owner, module.get_submodule(owner))} changes its buffers in forward")


def _called(name: str, part: nn.Module) -> str:
    return f"{type(part).__name__} '{name}'" if name else type(part).__name__
