"""Randomness by key: the same numbers at any peer, device and cut, and in recomputation."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from swarm.ports import Draw


def keyed_generator(*key: str | int) -> torch.Generator:
    """A CPU generator seeded by the SHA-256 of ``key``; torch's global generator is not touched.

    Torch's CPU generator (mt19937) takes 32 bits of seed, so distinct keys may, rarely, give equal numbers.
    """
    digest = hashlib.sha256("\x1f".join(str(part) for part in key).encode()).digest()
    generator = torch.Generator(device="cpu")
    generator.manual_seed(int.from_bytes(digest[:4], "little"))
    return generator


class Dropout(nn.Module):
    """Dropout whose mask depends on (run seed, step, microbatch, place) and the shape alone; rate 0 draws nothing."""

    def __init__(self, rate: float, run_seed: int, place: str) -> None:
        super().__init__()
        self.rate = rate
        self.run_seed = run_seed
        self.place = place
        """Names layer and site, e.g. 'block.3.mlp'."""

    def forward(self, x: Tensor, draw: Draw) -> Tensor:
        """``x`` with elements zeroed and the rest scaled up; same shape."""
        if self.rate == 0.0:
            return x
        generator = keyed_generator("dropout", self.run_seed, draw.step, draw.microbatch, self.place)
        keep = torch.rand(x.shape, generator=generator) >= self.rate
        return x * keep.to(x.dtype).mul_(1.0 / (1.0 - self.rate)).to(x.device)
