"""`swarm simulate`: the real roles on a virtual clock, under random faults or in a scenario from a file."""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from swarm.errors import ExitCode, UsageError
from swarm.sim.fuzz.campaign import Failure, Tally, campaign, table
from swarm.sim.fuzz.schedule import draw
from swarm.telemetry.report import write_atomically

SHOWN_EVENTS = 30
BATCH = 50
"""Schedules between two words on the progress, and per piece of work of a parallel campaign."""


def main(options: argparse.Namespace) -> ExitCode:
    """Run what the options ask for."""
    if options.fuzz is None and options.scenario is None:
        raise UsageError("name a scenario file, or give --fuzz N (see 'swarm simulate --help')")
    if options.fuzz is not None and options.scenario is not None:
        raise UsageError(f"--fuzz draws its own runs: leave {options.scenario} or --fuzz away")
    if options.fuzz is not None and (options.report is not None or options.plot is not None):
        raise UsageError("--report and --plot belong to a scenario; of --fuzz, --journal writes what a failure did")
    if options.fuzz is None:
        from peers.scenario import simulate

        return simulate(options)
    return _fuzz(options)


# --- fuzzing ---------------------------------------------------------------------------


def _fuzz(options: argparse.Namespace) -> ExitCode:
    only = options.only
    if only is not None:
        faults = len(draw(options.seed).faults)
        if options.fuzz != 1:
            raise UsageError("--only picks faults of one seed: use --fuzz 1 --seed S")
        if only and max(only) >= faults:
            raise UsageError(f"--only {max(only)}: seed {options.seed} has faults 0 to {faults - 1}")
    started = time.monotonic()
    tally = Tally()
    seeds = range(options.seed, options.seed + options.fuzz)
    batches = [seeds[i : i + BATCH] for i in range(0, len(seeds), BATCH)]
    if options.jobs == 1 or len(batches) == 1:
        for batch in batches:
            _count(tally, campaign(batch, only=only), options)
    else:
        with ProcessPoolExecutor(min(options.jobs, os.cpu_count() or 1)) as pool:
            for found in pool.map(campaign, batches):
                _count(tally, found, options)
    _conclude(tally, time.monotonic() - started)
    return ExitCode.FAILED if tally.failures else ExitCode.DONE


def _count(tally: Tally, found: Tally, options: argparse.Namespace) -> None:
    for failure in found.failures:
        _show(failure, options.journal)
    tally.merge(found)
    if options.fuzz > BATCH:
        print(f"\r{tally.schedules} of {options.fuzz} schedules, {len(tally.failures)} failed", end="", file=sys.stderr)


def _show(failure: Failure, journal: Path | None) -> None:
    schedule = failure.schedule
    print(f"\nseed {failure.seed} failed: {failure.what}")
    print(f"  peers per stage {schedule.peers}, {schedule.steps} steps of {schedule.microbatches} microbatches")
    print(f"  {len(failure.needed)} of {len(schedule.faults)} faults are needed:")
    for number in failure.needed:
        print(f"    {number}: {schedule.faults[number]}")
    print(f"  replay: {failure.replay}")
    if journal is not None:
        write_atomically(journal, ("\n".join(failure.events) + "\n").encode())
        print(f"  journal: {journal}")
        return
    print(f"  the end of its journal (all of it: --journal FILE), {min(SHOWN_EVENTS, len(failure.events))} events:")
    for event in failure.events[-SHOWN_EVENTS:]:
        print(f"    {event}")


def _conclude(tally: Tally, seconds: float) -> None:
    if tally.schedules > BATCH:
        print(file=sys.stderr)
        print(table(tally.happened))
        if tally.missing:
            print(f"{len(tally.missing)} of these faults have not happened at their point: run more schedules")
    verdict = f"{len(tally.failures)} failed" if tally.failures else "all kept the guarantees"
    print(
        f"{tally.schedules} schedules, {sum(tally.happened.values())} faults, {tally.calls} calls, "
        f"{tally.virtual_seconds:.0f} virtual seconds in {seconds:.0f} s: {verdict}"
    )
