"""What the order of float additions alone makes of a run: two single processes, the second adds in reverse order."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from swarm.config import load
from swarm.data.text import TextBatches
from swarm.reference import Reference, relative_difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_file", type=Path, metavar="RUN.toml")
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = load(options.run_file)
    batches = TextBatches(config)
    forward = Reference(config, batches)
    backward = Reference(config, batches, order=lambda step, ids: list(reversed(ids)))
    losses = [(forward.step().loss, backward.step().loss) for _ in range(options.steps)]
    for stage in range(config.model.stage_count):
        found = relative_difference(backward.parameters(stage), forward.parameters(stage), forward.initial[stage])
        print(f"stage {stage}: {found:.1e}")
    print(f"losses: {max(abs(a - b) / abs(a) for a, b in losses):.1e} relative")
    print(f"loss {losses[0][0]:.3f} -> {losses[-1][0]:.3f}")


if __name__ == "__main__":
    main()
