"""What a screen shows of a run, as a value, and the moving figures in it.  Pure: time is an argument."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow:
    """One peer as the trainer sees it."""

    name: str
    """Its short id."""
    state: str
    """Its own word (ready, joining, draining) or the trainer's (suspect, banned)."""
    version: int
    rate: float | None = None
    """Microbatches per second, as routing expects them."""
    share: float | None = None
    """Part of its stage's microbatches of late, 0 to 1."""
    queue: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One stage and its peers."""

    stage: int
    peers: tuple[PeerRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run at one moment."""

    name: str = ""
    steps_done: int = 0
    steps_total: int | None = None
    loss: float | None = None
    """Mean loss per token of the last step, in nats."""
    tokens_per_second: float | None = None
    eta_seconds: float | None = None
    stages: tuple[StageRow, ...] = ()
    events: tuple[str, ...] = ()
    """The last ones, in words, oldest first."""
    waiting: str = ""
    """What the run waits for beyond its usual work; empty if nothing."""


class Pace:
    """Speed over the last ``window`` steps, and the time that is left."""

    def __init__(self, *, began_seconds: float, window: int = 20) -> None:
        self._steps: deque[tuple[float, int]] = deque([(began_seconds, 0)], maxlen=window + 1)

    def step(self, now_seconds: float, tokens: int) -> None:
        """A step of so many tokens was committed now."""
        self._steps.append((now_seconds, tokens))

    @property
    def seconds_per_step(self) -> float | None:
        """Mean over the window; none before the first step."""
        if len(self._steps) < 2:
            return None
        return (self._steps[-1][0] - self._steps[0][0]) / (len(self._steps) - 1)

    @property
    def tokens_per_second(self) -> float | None:
        """Mean over the window; none before the first step."""
        elapsed_seconds = self._steps[-1][0] - self._steps[0][0]
        if elapsed_seconds <= 0:
            return None
        return sum(tokens for _, tokens in list(self._steps)[1:]) / elapsed_seconds

    def eta_seconds(self, steps_left: int, now_seconds: float) -> float | None:
        """Time until the end; while a step takes long, only its usual duration is counted off."""
        each = self.seconds_per_step
        if each is None:
            return None
        return max(0.0, steps_left * each - min(each, now_seconds - self._steps[-1][0]))


def in_words(seconds: float | None) -> str:
    """'0:42', '12:05', '3:07:00', '2d 5h'; '-' if unknown."""
    if seconds is None:
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def line(view: RunView) -> str:
    """The run in one line: step, loss, tokens/s, ETA."""
    total = f"/{view.steps_total}" if view.steps_total is not None else ""
    parts = [f"step {view.steps_done}{total}"]
    if view.loss is not None:
        parts.append(f"loss {view.loss:.4f}")
    if view.tokens_per_second is not None:
        parts.append(f"{view.tokens_per_second:.0f} tokens/s")
    if view.eta_seconds is not None:
        parts.append(f"ETA {in_words(view.eta_seconds)}")
    return "  ".join(parts)
