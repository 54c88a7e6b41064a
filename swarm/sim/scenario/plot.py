"""Draws what a scenario's policies did: throughput against the best possible, and where devices and time went."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from swarm.sim.scenario.meter import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0b6fa4", "#d1495b", "#2e8b57", "#8d6a9f", "#c77d0a", "#5c6770", "#1b998b", "#7a3b2e")


def draw(name: str, results: Sequence[Result]) -> bytes:
    """A PNG."""
    # Late: matplotlib takes half a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    labels = labels_of(results)
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 2))
    figure.suptitle(f"{name}: {results[0].peers} peers at the end, seed {results[0].seed}", fontsize=13)
    _over_time(figure.add_subplot(grid[0, :]), results, labels)
    _fractions(figure.add_subplot(grid[1, 0]), results, labels)
    _utilisation(figure.add_subplot(grid[1, 1]), results, labels)
    picture = io.BytesIO()
    canvas.print_figure(picture, format="png", dpi=110)
    return picture.getvalue()


def labels_of(results: Sequence[Result]) -> list[str]:
    """Of each result, the policies in which they differ."""
    keys = [key for key in results[0].policy if len({result.policy[key] for result in results}) > 1]
    texts = [
        ", ".join(f"{key} {r.policy[key]}" if key == "move costs" else r.policy[key] for key in keys) for r in results
    ]
    return [text or "ours" for text in texts]


def _over_time(axes: Axes, results: Sequence[Result], labels: Sequence[str]) -> None:
    hours = [point[0] for point in results[0].series]
    best = [point[2] for point in results[0].series]
    axes.fill_between(hours, best, color="#e3e7ea", step="pre", label="best assignment of those alive")
    for result, label, colour in zip(results, labels, COLOURS * len(results), strict=False):
        axes.plot([p[0] for p in result.series], [p[1] for p in result.series], color=colour, lw=1.4, label=label)
    axes.set_xlabel("virtual hours")
    axes.set_ylabel("microbatches per second")
    axes.set_xlim(0, hours[-1])
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _fractions(axes: Axes, results: Sequence[Result], labels: Sequence[str]) -> None:
    for index, result in enumerate(results):
        colour = COLOURS[index % len(COLOURS)]
        axes.barh(index, result.fraction, color=colour)
        axes.text(result.fraction + 0.01, index, f"{result.fraction:.0%}", va="center", fontsize=9)
    axes.set_yticks(range(len(results)), labels, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12)
    axes.set_xlabel("throughput, as a share of the best assignment's")
    axes.spines[["top", "right"]].set_visible(False)


def _utilisation(axes: Axes, results: Sequence[Result], labels: Sequence[str]) -> None:
    classes = list(results[0].utilisation)
    width = 0.8 / len(results)
    for index, result in enumerate(results):
        left = [position + index * width for position in range(len(classes))]
        axes.bar(left, [result.utilisation[name] for name in classes], width, color=COLOURS[index % len(COLOURS)])
    axes.set_xticks([position + 0.4 - width / 2 for position in range(len(classes))], classes)
    axes.set_ylim(0, 1)
    axes.set_ylabel("utilisation")
    axes.set_xlabel("class of peers")
    axes.spines[["top", "right"]].set_visible(False)
