"""The command ``swarm local``: options, screen, summary, report."""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

from peers import life
from peers.local.children import Children
from peers.local.launcher import LocalSwarm
from peers.local.options import LocalOptions
from peers.summary import in_words, microbatches_in_words
from swarm.errors import ExitCode, RunFailed
from swarm.telemetry.journal import Event
from swarm.telemetry.plot import plot_losses
from swarm.telemetry.report import Failure, Report, Verification
from swarm.telemetry.screen import Screen
from swarm.telemetry.words import describe


def main(options: argparse.Namespace) -> ExitCode:
    """Runs until the steps are committed (and verified)."""
    checked = LocalOptions.parse(options)
    life.prepare()
    return life.run(_run(checked), on_sigterm=ExitCode.INTERRUPTED)


async def _run(options: LocalOptions) -> None:
    async with Children(options.keep) as children:
        swarm = LocalSwarm(options, children)
        with Screen(options.steps) as screen:
            swarm.events.subscribe(lambda event: screen.event(describe(event)))
            await swarm.start()
            trained = await swarm.train(screen)
        verdict: dict[str, Any] | None = None
        if options.verify:
            with Screen(options.steps) as screen:
                verdict = await swarm.verify(trained, screen)
        await swarm.stop()
        report = _report(options, swarm, trained, verdict)
    _summarise(swarm, report, verdict)
    await asyncio.to_thread(_write, options, swarm, report, verdict)  # last: should the disk be full, the rest was said
    if report.verify is not None and not report.verify.ok:
        raise RunFailed("the swarm's result differs from a single process's")


def _report(options: LocalOptions, swarm: LocalSwarm, trained: Report, verdict: dict[str, Any] | None) -> Report:
    own = os.times()
    update: dict[str, Any] = {
        "cpu_seconds": own.user + own.system + swarm.cpu_seconds,
        "wall_seconds": swarm.trained_seconds,
        "failures": tuple(sorted([*trained.failures, *_kills(swarm)], key=lambda failure: failure.time_seconds)),
    }
    if verdict is not None:
        update["parameter_norms"] = tuple(verdict["parameter_norms"])
        update["parameter_digest"] = tuple(verdict["parameter_digest"])
        update["verify"] = Verification(
            relative_difference=verdict["relative_difference"],
            loss_difference=verdict["loss_difference"],
            tolerance=verdict["tolerance"],
            ok=verdict["ok"],
        )
    return trained.model_copy(update=update)


def _kills(swarm: LocalSwarm) -> list[Failure]:
    return [
        Failure(time_seconds=event.time_seconds, peer=str(event.fields["peer"]), stage=_stage(event), kind="killed")
        for event in swarm.events.events
        if event.kind == "kill"
    ]


def _stage(event: Event) -> int:
    return int(str(event.fields["stage"]))


def _write(options: LocalOptions, swarm: LocalSwarm, report: Report, verdict: dict[str, Any] | None) -> None:
    if options.report is None:
        return
    report.write(options.report)
    plot_losses(
        options.report.with_suffix(".png"),
        [float("nan") if loss is None else loss for loss in report.losses],
        reference_losses=verdict["reference_losses"] if verdict is not None else None,
        failures=swarm.kill_steps,
        title=options.config.run.name,
    )
    print(f"report: {options.report}, plot: {options.report.with_suffix('.png')}")


def _summarise(swarm: LocalSwarm, report: Report, verdict: dict[str, Any] | None) -> None:
    print(in_words(report))
    print(
        f"peers killed {len(swarm.kill_steps)}, started on the way {swarm.started_on_the_way}; "
        f"{microbatches_in_words(report)}"
    )
    if verdict is not None:
        same = "equals" if verdict["ok"] else "DIFFERS FROM"
        print(
            f"the result {same} a single process: parameters differ by {verdict['relative_difference']:.1e} of what "
            f"training changed (tolerance {verdict['tolerance']:.0e}), losses by {verdict['loss_difference']:.1e}"
        )
