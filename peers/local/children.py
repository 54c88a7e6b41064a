"""The launcher's side of the nursery: start, signal and await the swarm's processes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm.errors import RunFailed, UsageError

CLI = "peers.cli:run"
"""What a child runs unless a test says otherwise."""
CLOSE_SECONDS = 12.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Child:
    """One process of the swarm."""

    name: str
    log: Path
    process: int = 0
    exit_code: int | None = None
    cpu_seconds: float = 0.0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def alive(self) -> bool:
        """It has not ended."""
        return self.exit_code is None

    def end(self, exit_code: int) -> None:
        """Note that it has ended."""
        self.exit_code = exit_code
        self.ended.set()

    def last_words(self) -> str:
        """The last line of what it printed."""
        try:
            lines = self.log.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1] if lines else ""


class Children:
    """All processes of a local swarm; use as an async context manager."""

    def __init__(self, logs: Path | None) -> None:
        """``logs`` is made if it is not there; raises UsageError if it cannot be."""
        try:
            if logs is not None:
                logs.mkdir(parents=True, exist_ok=True)
            # Short, for the unix sockets in it; the nursery removes it at its end, however that comes.
            self.folder = Path(tempfile.mkdtemp(prefix="swarm-local-"))
        except OSError as error:
            raise UsageError(f"{logs or tempfile.gettempdir()}: cannot make a folder: {error.strerror}") from None
        self.logs = logs or self.folder / "logs"
        self.logs.mkdir(exist_ok=True)
        self.by_name: dict[str, Child] = {}
        """The last one of each name."""
        self._spawned: list[Child] = []
        self._nursery: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Children:
        try:
            await self._start()
        except BaseException:
            # It has no children yet, and may not have come to the point from which on it clears up itself.
            if self._nursery is not None and self._nursery.returncode is None:
                self._nursery.kill()
                await self._nursery.wait()
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        return self

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        log = os.open(self.logs / "nursery.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._nursery = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "peers.local.nursery",
                str(theirs.fileno()),
                str(self.folder),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C at the terminal is the launcher's business from the beginning
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        finally:
            theirs.close()
            os.close(log)
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        line = await reader.readline()
        if not line:
            raise RunFailed(f"the swarm's processes cannot be started: {self._nursery_words()}")
        self._reader = asyncio.create_task(self._listen(reader), name="nursery")

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def spawn(self, name: str, arguments: Sequence[str], *, entry: str = CLI) -> Child:
        """Fork a child; its output goes to ``logs/NAME.log``."""
        child = Child(name=name, log=self.logs / f"{name}.log")
        self._send(do="spawn", name=name, entry=entry, arguments=list(arguments), log=str(child.log))
        self.by_name[name] = child
        self._spawned.append(child)
        return child

    def signal(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a child."""
        self._send(do="signal", name=name, signal=int(number))

    async def close(self) -> None:
        """End all children (SIGTERM, then SIGKILL) and the nursery."""
        if self._nursery is None:
            return
        if self._nursery.returncode is None:
            if not self._is_gone:
                self._send(do="close")
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._nursery.wait()
            except TimeoutError:
                self._nursery.kill()
                await self._nursery.wait()
        if self._reader is not None:
            await asyncio.wait({self._reader})
        if self._writer is not None:
            self._writer.close()
        self._nursery = None
        # The nursery has done so already, unless it was killed.
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)

    @property
    def cpu_seconds(self) -> float:
        """Of all children that have ended, and what they waited for."""
        return sum(child.cpu_seconds for child in self._spawned)

    def _send(self, **request: Any) -> None:
        if self._is_gone or self._writer is None:
            raise RunFailed(f"the process that starts the swarm's processes is gone: {self._nursery_words()}")
        self._writer.write(json.dumps(request).encode() + b"\n")

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self._note(json.loads(line))
        except (OSError, ValueError) as error:  # it died with a request unread, or in the middle of a line
            _log.warning("the process that starts the swarm's processes is gone: %s", error)
        finally:
            for child in self._spawned:
                if child.alive:
                    child.end(-signal.SIGKILL)

    def _note(self, said: dict[str, Any]) -> None:
        # By process and not by name: who is started again under a name is not ended by the end of who had it before.
        if "exit" in said:
            for child in self._spawned:
                if child.process == said["process"] and child.alive:
                    child.cpu_seconds = said["cpu_seconds"]
                    child.end(said["exit"])
        elif "process" in said:  # children are forked in the order in which they were asked for
            next(child for child in self._spawned if not child.process).process = said["process"]

    @property
    def _is_gone(self) -> bool:
        return self._writer is None or self._writer.is_closing() or self._reader is None or self._reader.done()

    def _nursery_words(self) -> str:
        return Child(name="nursery", log=self.logs / "nursery.log").last_words()
