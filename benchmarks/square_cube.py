"""Square-cube law from event runs of the real roles: utilisation of a device behind 500 Mb/s, by model and latency.

    python benchmarks/square_cube.py [--json FILE]

The middle one of three stages runs on the device; the others, and the trainer, cost nothing, so that what is seen is
this device and its link.  "One at a time" is what the paper's table describes: receive, compute, send.  "In flight" is
what the trainer does by default: other microbatches travel while one is computed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from swarm.sim.scenario.config import Scenario, parse
from swarm.sim.scenario.play import Policy, play

ROUND_TRIPS_MS = (0, 10, 50, 100, 200)
MBIT = 500
TFLOPS = 5.2
"""Sustained, of every model: fitted to one figure of the paper, xxlarge without latency."""
ITEM_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model's stage, and what the paper gives for it (%), by round trip."""

    name: str
    width: int
    sequence_length: int
    layers: int
    """Of the stage."""
    paper: tuple[float, ...]
    shared: bool = False


MODELS = (
    Model(name="base", width=768, sequence_length=512, layers=3, paper=(18.0, 11.8, 4.88, 2.78, 1.53)),
    Model(name="xxlarge", width=4096, sequence_length=512, layers=1, paper=(32.1, 28.9, 20.1, 14.9, 10.1)),
    Model(name="GPT-3", width=12288, sequence_length=2048, layers=1, paper=(82.1, 79.3, 70.3, 60.2, 48.5)),
    Model(
        name="48 shared", width=4096, sequence_length=512, layers=12, shared=True,
        paper=(89.5, 87.2, 79.5, 71.5, 59.2),
    ),
)  # fmt: skip


def scenario(model: Model, round_trip_ms: float, window: int | None, microbatches: int) -> Scenario:
    """Three stages of ``model.layers`` layers, the middle one on the device."""
    ideal = {"class": "ideal", "count": 2, "stages": [1, 0, 1], "forward_seconds": 1e-6, "latency_ms": 0}
    device = {
        "class": "device", "count": 1, "stages": [0, 1, 0], "tflops": TFLOPS,
        "up_mbit": MBIT, "down_mbit": MBIT, "latency_ms": round_trip_ms / 2,
    }  # fmt: skip
    trainer = {"latency_ms": 0} | ({} if window is None else {"window": window})
    return parse(
        {
            "scenario": {"name": model.name, "steps": 3},
            "model": {
                "layers": 3 * model.layers,
                "width": model.width,
                "heads": 1,
                "sequence_length": model.sequence_length,
                "stages": 3,
                "shared_layers": model.shared,
                "item_bytes": ITEM_BYTES,
            },
            "step": {"microbatches": microbatches, "microbatch_size": 1},
            "trainer": trainer,
            "overhead": {"call_ms": 0, "reduce_ms": 0},
            "peers": [ideal, device],
        },
        model.name,
    )


def utilisation(model: Model, round_trip_ms: float, window: int | None, microbatches: int = 48) -> float:
    """Share of the steps' time in which the device computed, in %."""
    result = play(scenario(model, round_trip_ms, window, microbatches), Policy(), 0)
    return 100 * result.microbatches * 3 * model.layers * _layer_seconds(model) / sum(result.step_seconds)


def _layer_seconds(model: Model) -> float:
    built = scenario(model, 0, None, 1)
    return built.layer_seconds(built.peers[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for title, window in (("one at a time", 1), ("in flight", None)):
        print(f"\nutilisation (%), {title}; in brackets the paper's")
        print(f"{'RTT ms':>7}  " + "  ".join(f"{model.name:>16}" for model in MODELS))
        for index, round_trip in enumerate(ROUND_TRIPS_MS):
            found = [utilisation(model, round_trip, window) for model in MODELS]
            cells = (f"{value:7.2f} ({model.paper[index]:5.2f})" for model, value in zip(MODELS, found, strict=True))
            print(f"{round_trip:>7}  " + "  ".join(f"{cell:>16}" for cell in cells))
            rows += [
                {"mode": title, "round_trip_ms": round_trip, "model": model.name, "utilisation": value}
                for model, value in zip(MODELS, found, strict=True)
            ]
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
