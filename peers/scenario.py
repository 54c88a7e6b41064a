"""`swarm simulate SCENARIO.toml`: one simulated run for each combination of policies, and a table of what they did."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from swarm.errors import ExitCode, UsageError
from swarm.sim.scenario.config import Scenario, load
from swarm.sim.scenario.meter import Result
from swarm.sim.scenario.play import play, policies
from swarm.telemetry.report import write_atomically


def simulate(options: argparse.Namespace) -> ExitCode:
    """Play the scenario of ``options.scenario``."""
    if options.only is not None or options.journal is not None or options.jobs != 1:
        raise UsageError("--only, --journal and --jobs belong to --fuzz")
    scenario = load(options.scenario)
    for path in (options.report, options.plot):
        _check_folder(path)
    if options.plot is not None and options.plot.suffix != ".png":
        raise UsageError(f"--plot {options.plot}: the name must end in .png")
    # Millions of short-lived objects and few cycles: the collector would look at all peers again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 50, 100)
    chosen = list(policies(scenario))
    results = []
    for number, policy in enumerate(chosen, 1):
        print(f"{number} of {len(chosen)}: {policy}", file=sys.stderr)
        results.append(play(scenario, policy, options.seed))
    _show(scenario, results)
    if options.report is not None:
        text = json.dumps({"scenario": scenario.scenario.name, "runs": [asdict(r) for r in results]}, indent=1)
        write_atomically(options.report, (text + "\n").encode())
    if options.plot is not None:
        from swarm.sim.scenario.plot import draw

        write_atomically(options.plot, draw(scenario.scenario.name, results))
    return ExitCode.DONE


def _check_folder(path: Path | None) -> None:
    """Before hours of simulation, not after."""
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}")


def _show(scenario: Scenario, results: list[Result]) -> None:
    console = Console(width=max(120, Console().width), highlight=False, soft_wrap=True)
    table = Table(title=f"{scenario.scenario.name}, seed {results[0].seed}", title_justify="left", box=None)
    keys = [key for key in results[0].policy if len({result.policy[key] for result in results}) > 1] or ["wiring"]
    for key in keys:
        table.add_column(key, no_wrap=True)
    for name in ("microbatches/s", "of the best", "first hour", "last hour", "useful", "moves", "deaths", "s longer"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        table.add_row(
            *(r.policy[key] for key in keys),
            f"{r.microbatches_per_second:.3f}",
            *(f"{share:.1%}" for share in (r.fraction, r.fraction_first_hour, r.fraction_last_hour, r.useful)),
            str(r.moves),
            str(r.deaths),
            f"{r.recovery_seconds:.0f}",
        )
    console.print(table)
    for r in results:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in r.utilisation.items())
        trainer = sum(value for kind, value in r.bytes_by_role["trainer"].items() if kind.startswith("sent"))
        console.print(
            f"{', '.join(r.policy[key] for key in keys)}: {r.steps} steps, {r.seconds:.0f} virtual seconds in "
            f"{r.real_seconds:.0f} s; utilisation {shares}; {r.repaired} repaired, {r.retried} retried, "
            f"{r.recomputed} recomputed; the trainer sends {trainer / 1e6:.1f} MB/s"
        )
    console.print("useful: share of all computing that is in a commit; s longer: a step in which peers died")
