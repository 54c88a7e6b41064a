"""The event journal: what happened, when, kept in memory and as JSON lines (words.py puts it into words)."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from swarm.errors import UsageError

Value = str | int | float | None

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened, ``time_seconds`` after the journal began."""

    time_seconds: float
    kind: str
    fields: Mapping[str, Value] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line of strict JSON; numbers that are not finite become strings."""
        fields = {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in self.fields.items()
        }
        raw = {"time_seconds": round(self.time_seconds, 6), "kind": self.kind, "fields": fields}
        return json.dumps(raw, separators=(",", ":"), allow_nan=False)

    @staticmethod
    def from_json(line: str) -> Event:
        """Inverse of :meth:`to_json`.  Raises ValueError, KeyError or TypeError on malformed text."""
        raw = json.loads(line)
        return Event(time_seconds=float(raw["time_seconds"]), kind=str(raw["kind"]), fields=dict(raw["fields"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subscriber:
    callback: Callable[[Event], None]
    loop: asyncio.AbstractEventLoop | None
    thread: int

    def tell(self, event: Event) -> None:
        if self.loop is None or threading.get_ident() == self.thread:
            self.callback(event)
            return
        try:
            self.loop.call_soon_threadsafe(self.callback, event)
        except RuntimeError:
            if not self.loop.is_closed():  # closed: the subscriber is gone with it
                raise


class EventJournal:
    """Implements :class:`swarm.ports.Journal`.  Use it from any thread.

    ``path``: JSON lines are appended there, each flushed to the kernel at once, so that SIGKILL loses nothing.  Raises
    UsageError if it cannot be opened.  If it cannot be written later (disk full), the run goes on without the file:
    that is logged once and kept in ``file_error``.
    """

    def __init__(
        self, *, path: Path | None = None, keep: int = 10_000, now_seconds: Callable[[], float] = time.monotonic
    ) -> None:
        self.file_error: str | None = None
        self._now_seconds = now_seconds
        self._began_seconds = now_seconds()
        self._events: deque[Event] = deque(maxlen=keep)
        self._subscribers: tuple[_Subscriber, ...] = ()
        self._lock = threading.Lock()
        """Held while an event gets its time and its place; never while subscribers are called."""
        self._path = path
        self._file = _open(path) if path is not None else None
        if self._file is not None:
            # The anchor of time_seconds; a file may hold several lives, each begins with this line.
            self._write(Event(time_seconds=0.0, kind="journal", fields={"unix_seconds": round(time.time(), 3)}))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def events(self) -> tuple[Event, ...]:
        """The last ``keep`` events, oldest first."""
        with self._lock:
            return tuple(self._events)

    def subscribe(self, callback: Callable[[Event], None]) -> None:
        """Have ``callback`` called with each further event.

        One that subscribes inside an event loop is called in the loop's thread: at once, in the recorder's own call,
        or in a later turn of the loop for what another thread records.  Any other is called at once by the recorder.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        subscriber = _Subscriber(callback=callback, loop=loop, thread=threading.get_ident())
        with self._lock:
            self._subscribers = (*self._subscribers, subscriber)

    def record(self, kind: str, **fields: Value) -> None:
        """Note an event of now."""
        with self._lock:
            event = Event(time_seconds=self._now_seconds() - self._began_seconds, kind=kind, fields=fields)
            self._events.append(event)
            self._write(event)
            subscribers = self._subscribers
        for subscriber in subscribers:
            subscriber.tell(event)

    def close(self) -> None:
        """Close the file; events recorded later stay in memory only."""
        with self._lock:
            self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _write(self, event: Event) -> None:
        if self._file is None:
            return
        try:
            self._file.write(event.to_json().encode() + b"\n")
        except OSError as error:
            self.file_error = f"{self._path}: {error.strerror or error}"
            _log.error("the journal goes on without its file: %s", self.file_error)
            self._close_file()


def _open(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab", buffering=0)
        if file.tell():
            with path.open("rb") as old:
                old.seek(-1, 2)
                if old.read(1) != b"\n":  # an earlier life died in the middle of a line
                    file.write(b"\n")
    except OSError as error:
        raise UsageError(f"{path}: cannot write the journal: {error.strerror or error}") from None
    return file


def read_events(path: Path) -> list[Event]:
    """All events of a journal file, of all its lives; a line torn by a full disk or power loss is left out.

    Raises UsageError if the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    events = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            events.append(Event.from_json(line))
        except (ValueError, KeyError, TypeError):
            _log.warning("%s:%d: not an event", path, number)
    return events
