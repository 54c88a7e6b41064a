"""What a swarm costs over one process: tokens/s, CPU time per token, phases of a step, time to the first step.

Each figure is a median over ``--rounds`` rounds in which single process and swarms take turns, since machines drift.
CPU time per token is the difference between a long and a short run, so that starting up does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUN = """
[run]
name = "bench"
[model]
layers = {layers}
width = {width}
heads = 8
sequence_length = 128
stages = {stages}
[optimizer]
learning_rate = 3e-4
[step]
microbatches = {microbatches}
microbatch_size = 2
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One arm of one round."""

    tokens_per_second: float
    cpu_ms_per_token: float
    phases: dict[str, float]
    first_step_seconds: float


def swarm(*arguments: str) -> None:
    """Run the program; its screen is not shown."""
    done = subprocess.run([sys.executable, "-m", "peers", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"swarm {' '.join(arguments)} failed:\n{done.stderr}")


def measure(folder: Path, run: Path, peers: str | None, options: argparse.Namespace) -> Measured:
    """One short and one long run.  ``peers`` None: a single process."""
    figures: list[tuple[int, float, float]] = []
    first = 0.0
    for steps in (options.short, options.long):
        report = folder / "report.json"
        keep = Path(tempfile.mkdtemp(dir=folder))
        began = time.time()
        common = (str(run), "--steps", str(steps), "--report", str(report))
        if peers is None:
            swarm("reference", *common)
        else:
            swarm("local", *common, "--peers", peers, "--keep", str(keep))
        said: dict[str, Any] = json.loads(report.read_text())
        figures.append((steps, said["cpu_seconds"], said["wall_seconds"]))
    tokens = options.microbatches * 2 * 128 * (options.long - options.short)
    cpu_ms = 1000 * (figures[1][1] - figures[0][1]) / tokens
    if peers is None:
        return Measured(
            tokens_per_second=said["tokens_per_second"], cpu_ms_per_token=cpu_ms, phases={}, first_step_seconds=0.0
        )
    events = [json.loads(line) for line in (keep / "trainer.jsonl").read_text().splitlines()]
    begun = next(e["fields"]["unix_seconds"] for e in events if e["kind"] == "journal")
    steps_done = [e for e in events if e["kind"] == "step"]
    first = begun + steps_done[0]["time_seconds"] - began
    warm = [e["fields"] for e in steps_done[2:]]
    seconds = statistics.median(f["seconds"] for f in warm)
    names = [name for name in warm[0] if name.endswith("_seconds")]
    return Measured(
        tokens_per_second=options.microbatches * 2 * 128 / seconds,
        cpu_ms_per_token=cpu_ms,
        phases={name: statistics.median(f[name] for f in warm) for name in names},
        first_step_seconds=first,
    )


def median(values: list[float]) -> float:
    return statistics.median(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--short", type=int, default=3, help="steps of the short run")
    parser.add_argument("--long", type=int, default=13, help="steps of the long run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    arms = {
        "one process": (1, None),
        "2 stages x 1": (2, "1,1"),
        "3 stages x 1": (3, "1,1,1"),
        "3 stages x 2": (3, "2,2,2"),
    }
    found: dict[str, list[Measured]] = {name: [] for name in arms}
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as name:
        folder = Path(name)
        for _ in range(options.rounds):
            for arm, (stages, peers) in arms.items():
                run = folder / "run.toml"
                run.write_text(
                    RUN.format(stages=stages, **{k: getattr(options, k) for k in ("layers", "width", "microbatches")})
                )
                found[arm].append(measure(folder, run, peers, options))
    rows = []
    single = [m.tokens_per_second for m in found["one process"]]
    for arm, measured in found.items():
        ratios = [m.tokens_per_second / one for m, one in zip(measured, single, strict=True)]
        row: dict[str, Any] = {
            "arm": arm,
            "tokens_per_second": median([m.tokens_per_second for m in measured]),
            "ratio_to_single_process": median(ratios),
            "cpu_ms_per_token": median([m.cpu_ms_per_token for m in measured]),
            "first_step_seconds": median([m.first_step_seconds for m in measured]),
        }
        for phase in measured[0].phases:
            row[phase] = median([m.phases[phase] for m in measured])
        rows.append(row)
        print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{v}:" for k, v in row.items()), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
