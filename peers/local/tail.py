"""Follows a journal that another process writes."""

from __future__ import annotations

from pathlib import Path

from swarm.telemetry.journal import Event


class JournalTail:
    """Events of a journal file, each once, as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0

    def poll(self) -> list[Event]:
        """What was added since the last call; a line that is not whole yet waits for the next."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                data = file.read()
        except FileNotFoundError:
            return []
        whole, newline, _ = data.rpartition(b"\n")
        self._read_bytes += len(whole) + len(newline)
        return [Event.from_json(line.decode()) for line in whole.splitlines() if line.strip()]
