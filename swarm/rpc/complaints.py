"""Complaints: what is logged of unexpected failures, at most a line per subject and interval."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

LOG = logging.getLogger("swarm.rpc")


@dataclass(slots=True, kw_only=True)
class Complaints:
    """A hostile or broken client must not fill the disk by way of the log."""

    every_seconds: float = 10.0
    _last: dict[str, float] = field(default_factory=dict)
    _unsaid: dict[str, int] = field(default_factory=dict)

    def note(self, subject: str, error: BaseException) -> None:
        """Log ``error`` in one line with the place it came from, or count it.  Subjects are few and our own."""
        now = time.monotonic()
        if now - self._last.get(subject, float("-inf")) < self.every_seconds:
            self._unsaid[subject] = self._unsaid.get(subject, 0) + 1
            return
        self._last[subject] = now
        unsaid = self._unsaid.pop(subject, 0)
        more = f" ({unsaid} more since the last line)" if unsaid else ""
        LOG.error("%s failed: %s: %s%s%s", subject, type(error).__name__, error, _place(error), more)


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
