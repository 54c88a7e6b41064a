"""Logging: one line a record on standard error, quiet libraries, and a limit on repetition."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TextIO

_COLOURS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m", logging.CRITICAL: "\033[31m"}
_RESET = "\033[0m"
_NAMES = {logging.WARNING: "WARNING"}
"""hivemind renames this level for the whole process."""

LIBRARIES = ("hivemind", "grpc", "asyncio", "matplotlib", "PIL")
"""Loggers that speak up from WARNING only."""


def configure(level: int = logging.INFO, *, stream: TextIO | None = None) -> None:
    """Send all records to ``stream`` (standard error).  Call it first thing in a program, and only there.

    hivemind installs a handler of its own when it is imported: call :func:`quiet_libraries` after that.
    """
    # Read by hivemind and by gRPC's C core when they are loaded.
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "WARNING")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    handler = _StderrHandler() if stream is None else logging.StreamHandler(stream)
    target = sys.stderr if stream is None else stream
    handler.setFormatter(LineFormatter(colours=target.isatty() and "NO_COLOR" not in os.environ))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    quiet_libraries()


def quiet_libraries() -> None:
    """Have the libraries' records go through our handler, from WARNING on.  May be called again."""
    for name in LIBRARIES:
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
        logger.propagate = True
        logger.setLevel(logging.WARNING)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what sys.stderr is now: a live screen redirects it, so that records appear above the screen."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class LineFormatter(logging.Formatter):
    """'12:34:56.789 WARNING swarm.roles.peer: text'.  Always one line, without control characters.

    Records may quote other machines: a line break or an escape sequence from there must not fake a record or move the
    cursor.  Tracebacks are folded by ' | '.
    """

    def __init__(self, *, colours: bool = False) -> None:
        super().__init__()
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        body = "".join(c if c.isprintable() else " | " if c == "\n" else f"\\x{ord(c):02x}" for c in text)
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = _NAMES.get(record.levelno, record.levelname)
        if self._colours and record.levelno in _COLOURS:
            level = f"{_COLOURS[record.levelno]}{level}{_RESET}"
        return f"{stamp}.{int(record.msecs):03d} {level} {record.name}: {body}"


class RateLimit(logging.Filter):
    """Lets ``burst`` records of one kind through per period; the next one says how many were left out.

    A kind is a logger, a level and the text before its arguments are filled in, so that text from outside makes no new
    kinds.  At most ``kinds`` of them are remembered, those seen last.
    """

    def __init__(
        self,
        *,
        burst: int = 5,
        period_seconds: float = 10.0,
        kinds: int = 1024,
        now_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._burst = burst
        self._period_seconds = period_seconds
        self._kinds = kinds
        self._now_seconds = now_seconds
        self._seen: OrderedDict[tuple[str, int, str], list[float]] = OrderedDict()
        """Per kind: when its period began, records let through in it, records left out."""

    def filter(self, record: logging.LogRecord) -> bool:
        now_seconds = self._now_seconds()
        kind = (record.name, record.levelno, str(record.msg))
        state = self._seen.setdefault(kind, [now_seconds, 0, 0])
        self._seen.move_to_end(kind)
        if len(self._seen) > self._kinds:
            self._seen.popitem(last=False)
        if now_seconds - state[0] >= self._period_seconds:
            state[0], state[1] = now_seconds, 0
        if state[1] >= self._burst:
            state[2] += 1
            return False
        state[1] += 1
        if state[2]:
            record.msg = f"{record.getMessage()} ({state[2]:.0f} like this left out)"
            record.args = None
            state[2] = 0
        return True
