"""What a run came to, in the last lines that a user reads."""

from __future__ import annotations

from swarm.telemetry.report import Report


def in_words(report: Report, made: int | None = None) -> str:
    """Steps, time, speed, loss.  ``made``: of the steps, those by the process whose time is told."""
    losses = [loss for loss in report.losses if loss is not None]
    own = f" ({made} of them by this process)" if made is not None and made != report.steps else ""
    fell = f", loss {losses[0]:.3f} -> {losses[-1]:.3f}" if losses else ""
    seconds, speed = report.wall_seconds or 0.0, report.tokens_per_second or 0.0
    return f"{report.steps} steps{own} in {seconds:.0f} s, {speed:.0f} tokens/s{fell}"


def microbatches_in_words(report: Report) -> str:
    """How often what happened to them."""
    counts = report.microbatches
    return (
        f"microbatches {counts.completed} completed, {counts.retried} retried, {counts.repaired} repaired, "
        f"{counts.excluded} excluded"
    )
