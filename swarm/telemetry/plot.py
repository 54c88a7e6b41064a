"""The loss curve as a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from swarm.telemetry.report import write_atomically


def plot_losses(
    path: Path,
    losses: Sequence[float | None],
    reference_losses: Sequence[float | None] | None = None,
    failures: Sequence[float] = (),
    *,
    title: str = "Training loss",
) -> None:
    """Write a PNG of the loss (nats per token) over steps.

    ``reference_losses``: of the same run in one process, drawn dashed on top.  ``failures``: when peers died, in steps
    from the start (fractions allowed), drawn as vertical lines.  A loss of None leaves a gap.
    Raises UsageError or RunFailed naming ``path``.
    """
    # Late: matplotlib takes half a second.  Agg and Figure rather than pyplot: no display, no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, step in enumerate(failures):
        label = f"peer died ({len(failures)})" if index == 0 else None
        axes.axvline(step, color="tab:red", alpha=0.45, linewidth=1, label=label)
    axes.plot(range(1, len(losses) + 1), _gaps(losses), color="tab:blue", linewidth=2.2, label="swarm")
    if reference_losses is not None:
        steps = range(1, len(reference_losses) + 1)
        axes.plot(steps, _gaps(reference_losses), "--", color="black", linewidth=1, label="one process")
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.legend(loc="upper right")
    picture = io.BytesIO()
    canvas.print_figure(picture, format="png")
    write_atomically(path, picture.getvalue())


def _gaps(losses: Sequence[float | None]) -> list[float]:
    return [float("nan") if loss is None else loss for loss in losses]
