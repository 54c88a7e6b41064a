"""The screen of a run: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from swarm.telemetry.progress import PeerRow, RunView, StageRow, line

REFRESH_SECONDS = 0.25
"""The screen is drawn at most this often: 4 Hz."""

EVENT_LINES = 6
_FIXED_LINES = 8
"""Lines of the screen that are not peers or events."""

_STYLES = {
    "ready": "green",
    "joining": "yellow",
    "draining": "yellow",
    "suspect": "red",
    "banned": "red",
    "lost": "red",
}


class Screen:
    """Shows views of a run.  ``plain`` (by default: the output is no terminal) writes lines instead.

    Nothing runs in the background: a view that comes sooner than 4 Hz after the last is drawn with the next one or at
    the close.  In plain form there is one line per finished step, per event, and per new reason to wait.
    """

    def __init__(
        self,
        total_steps: int | None,
        plain: bool | None = None,
        *,
        console: Console | None = None,
        now_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(highlight=False)
        self._plain = not self._console.is_terminal if plain is None else plain
        self._now_seconds = now_seconds
        self._view = RunView(steps_total=total_steps)
        self._events: deque[str] = deque(maxlen=EVENT_LINES)
        self._drawn_seconds = float("-inf")
        self._live: Live | None = None
        if not self._plain:
            self._live = Live(console=self._console, auto_refresh=False, transient=False, vertical_overflow="ellipsis")

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, view: RunView) -> None:
        """Show ``view``; its total, if it has none, is that of the constructor."""
        before = self._view
        if view.steps_total is None:
            view = dataclasses.replace(view, steps_total=before.steps_total)
        self._view = view
        if self._plain:
            if view.waiting and view.waiting != before.waiting:
                self._print(f"waiting: {view.waiting}")
            if view.steps_done > before.steps_done:
                self._print(line(view))
        else:
            self._draw(force=False)

    def event(self, text: str) -> None:
        """Show an event: among the last ones on the live screen, below those of the view; in plain form as a line."""
        if self._plain:
            self._print(text)
        else:
            self._events.append(text)
            self._draw(force=False)

    def close(self) -> None:
        """Draw the last view and give the terminal back.  May be called twice."""
        if self._live is not None:
            self._draw(force=True)
            self._live.stop()
            self._live = None

    def _print(self, text: str) -> None:
        # Not through rich: it would wrap at 80 columns, and read [brackets] as markup.
        self._console.file.write(text + "\n")
        self._console.file.flush()

    def _draw(self, *, force: bool) -> None:
        now_seconds = self._now_seconds()
        if self._live is None or (not force and now_seconds - self._drawn_seconds < REFRESH_SECONDS):
            return
        self._drawn_seconds = now_seconds
        events = (*self._view.events, *self._events)[-EVENT_LINES:]
        self._live.update(picture(self._view, events, height=self._console.height), refresh=True)


def picture(view: RunView, events: Sequence[str] = (), *, height: int = 24) -> RenderableType:
    """The whole screen; peers that do not fit into ``height`` lines are counted instead."""
    parts: list[RenderableType] = [_head(view), *_bar(view), Text()]
    if view.stages:
        rows = max(1, (height - _FIXED_LINES - len(events)) // len(view.stages))
        parts.append(_table(view.stages, rows))
    if view.waiting:
        parts.append(Text(f"waiting: {view.waiting}", style="yellow", no_wrap=True, overflow="ellipsis"))
    parts.extend(Text(text, style="dim", no_wrap=True, overflow="ellipsis") for text in events)
    return Group(*parts)


def _head(view: RunView) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    if view.name:
        text.append(f"{view.name}  ", style="bold")
    return text.append(line(view))


def _bar(view: RunView) -> list[RenderableType]:
    if view.steps_total is None:
        return []
    # A bar does not end its line: the empty text does.
    return [ProgressBar(total=max(1, view.steps_total), completed=view.steps_done), Text()]


def _table(stages: Sequence[StageRow], rows_each: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("stage", justify="right")
    for name in ("peer", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("version", "mb/s", "share", "queue"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in stages:
        if not row.peers:
            table.add_row(str(row.stage), Text("no peer", style="red"))
        shown = row.peers if len(row.peers) <= rows_each else row.peers[: max(0, rows_each - 1)]
        for index, peer in enumerate(shown):
            table.add_row("" if index else str(row.stage), *_cells(peer))
        hidden = len(row.peers) - len(shown)
        if hidden:
            table.add_row("" if shown else str(row.stage), Text(f"+{hidden}", style="dim"), Text("more", style="dim"))
    return table


def _cells(peer: PeerRow) -> list[RenderableType]:
    return [
        Text(peer.name),
        Text(peer.state, style=_STYLES.get(peer.state, "")),
        str(peer.version),
        "-" if peer.rate is None else f"{peer.rate:.2f}",
        "-" if peer.share is None else f"{peer.share:.0%}",
        str(peer.queue),
    ]
