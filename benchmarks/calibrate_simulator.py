"""How well the simulator predicts a real local swarm: constants fitted on one setting, the others predicted unseen.

    python benchmarks/calibration.py --json measured.json
    python benchmarks/calibrate_simulator.py measured.json

The first measures real processes whose compute is emulated by sleeping, behind proxies that delay and limit; the second
simulates the same settings.  From the setting "fit" it takes two constants: the time that each call and each all-reduce
costs beside link and device.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from swarm.sim.scenario.config import Scenario, parse
from swarm.sim.scenario.play import Policy, play

TOLERANCE = 0.15
STEPS = 6
FIRST_STEPS = 3
"""Left out: peers are measured for the first time."""
SEEDS = 3


def scenario(row: dict[str, Any], call_ms: float, reduce_ms: float) -> Scenario:
    """The setting as a scenario; ``row`` is one of the measurement's."""
    speeds = sorted({seconds for stage in row["forward_seconds"] for seconds in stage})
    counts = [Counter(stage) for stage in row["forward_seconds"]]
    link = {} if row["mbit"] is None else {"up_mbit": row["mbit"], "down_mbit": row["mbit"]}
    stages = len(counts)
    return parse(
        {
            "scenario": {"name": row["name"], "steps": STEPS},
            "model": {
                "layers": stages,
                "width": row["width"],
                "heads": 1,
                "sequence_length": row["sequence_length"],
                "stages": stages,
            },
            "step": {"microbatches": row["microbatches"], "microbatch_size": row["microbatch_size"]},
            "trainer": {"latency_ms": 0.0},
            "overhead": {"call_ms": call_ms, "reduce_ms": reduce_ms, "reduce_over_links": False},
            "peers": [
                {
                    "class": f"{seconds}s",
                    "count": sum(count[seconds] for count in counts),
                    "stages": [count[seconds] for count in counts],
                    "forward_seconds": seconds,
                    "latency_ms": row["ms"],
                    **link,
                }
                for seconds in speeds
            ],
        },
        row["name"],
    )


def predict(row: dict[str, Any], call_ms: float, reduce_ms: float) -> float:
    """Seconds of a step: the mean over steps after the first few, over some seeds."""
    seconds: list[float] = []
    for seed in range(SEEDS):
        seconds += play(scenario(row, call_ms, reduce_ms), Policy(), seed).step_seconds[FIRST_STEPS:]
    return sum(seconds) / len(seconds)


def fit(row: dict[str, Any]) -> tuple[float, float]:
    """Milliseconds a call and an all-reduce cost, from one measured setting."""
    reduce_ms = 1e3 * row["reduce_seconds"] - 2 * row["ms"]
    low, high = 0.0, 50.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if predict(row, middle, reduce_ms) < row["seconds"] else (low, middle)
    return (low + high) / 2, reduce_ms


def compare(rows: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """Name, measured and predicted seconds of a step, of each setting but the one that is fitted."""
    call_ms, reduce_ms = fit(next(row for row in rows if row["name"] == "fit"))
    print(f"fitted: {call_ms:.2f} ms a call, {reduce_ms:.1f} ms an all-reduce")
    return [(row["name"], row["seconds"], predict(row, call_ms, reduce_ms)) for row in rows if row["name"] != "fit"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("measured", type=Path, help="the JSON file of benchmarks/calibration.py")
    rows = json.loads(parser.parse_args().measured.read_text())
    worst = 0.0
    for name, measured, predicted in compare(rows):
        error = predicted / measured - 1
        worst = max(worst, abs(error))
        print(f"{name:12} measured {measured:7.3f} s a step, predicted {predicted:7.3f} s: {error:+.1%}")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
