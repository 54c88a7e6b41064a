"""``swarm reference``: the same run in a single process."""

from __future__ import annotations

import argparse
import os
import time

from peers import life
from peers.steps import steps_of
from swarm.config import load
from swarm.errors import ExitCode
from swarm.telemetry.plot import plot_losses
from swarm.telemetry.progress import Pace, RunView
from swarm.telemetry.report import Microbatches, Report, ensure_writable
from swarm.telemetry.screen import Screen


def main(options: argparse.Namespace) -> ExitCode:
    """Runs until the steps are made."""
    from peers.cli import overrides

    config = load(options.run_file, overrides(options))
    steps = steps_of(config, options.steps)
    if options.report is not None:
        ensure_writable(options.report)
    life.prepare()
    import torch

    from peers.peer import pick_device
    from swarm.data.text import TextBatches
    from swarm.reference import Reference

    torch.set_num_threads(options.threads)
    began = time.monotonic()
    reference = Reference(config, TextBatches(config), device=pick_device(options.device))
    pace, losses, excluded, samples = Pace(began_seconds=time.monotonic()), [], 0, []
    with Screen(steps) as screen:
        screen.update(RunView(name=f"{config.run.name} (reference)", steps_total=steps))
        for done in range(1, steps + 1):
            result = reference.step()
            losses.append(result.loss)
            excluded += len(result.excluded)
            samples.append(result.samples)
            now = time.monotonic()
            pace.step(now, result.tokens)
            screen.update(
                RunView(
                    name=f"{config.run.name} (reference)",
                    steps_done=done,
                    steps_total=steps,
                    loss=result.loss,
                    tokens_per_second=pace.tokens_per_second,
                    eta_seconds=pace.eta_seconds(steps - done, now),
                )
            )
    cpu, stages = os.times(), reference.stages
    count = steps * config.step.microbatches
    report = Report(
        config_hash=config.hash,
        steps=steps,
        losses=tuple(losses),
        tokens_per_second=pace.tokens_per_second,
        cpu_seconds=cpu.user + cpu.system,
        wall_seconds=time.monotonic() - began,
        microbatches=Microbatches(sent=count, completed=count - excluded, excluded=excluded),
        samples_per_stage_and_step=tuple(tuple(samples) for _ in stages),
        failures=(),
        parameter_norms=tuple(stage.squared_norm() ** 0.5 for stage in stages),
        parameter_digest=tuple(stage.digest() for stage in stages),
    )
    if options.report is not None:
        report.write(options.report)
        plot_losses(options.report.with_suffix(".png"), losses, title=f"{config.run.name} (reference)")
        print(f"report: {options.report}, plot: {options.report.with_suffix('.png')}")
    return ExitCode.DONE
