"""The trainer's own memory of what was committed: one JSON line a commit, appended and flushed."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

from swarm.config import RunConfig
from swarm.errors import RunFailed, Superseded, UsageError
from swarm.records import CommitRecord

_log = logging.getLogger(__name__)


class TrainerFolder:
    """A folder for one run's trainer, used by one process at a time: identity, commit log, lock."""

    def __init__(self, path: Path, config: RunConfig) -> None:
        """Make or open it.  Raises UsageError (cannot be written) or Superseded (another process trains from it)."""
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(f"{path}: cannot keep the trainer's state there: {error.strerror}") from None
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Superseded(f"{path}: another process trains run '{config.run.name}' from this folder") from None

    @property
    def identity(self) -> Path:
        """The trainer's key file."""
        return self.path / "identity"

    @property
    def commits(self) -> Path:
        """The commit log."""
        return self.path / "commits.jsonl"


def default_folder(config: RunConfig) -> Path:
    """Where a trainer keeps its state if nothing else is said (XDG base directory specification)."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "swarm" / f"{config.run.name}-{config.hash[:12]}"


class FileCommitLog:
    """Implements :class:`swarm.ports.CommitLog`.  A line torn by a crash is cut off: its commit is with the peers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._commits: list[CommitRecord] = []
        if path.exists():
            self._load()

    def read(self) -> list[CommitRecord]:
        return list(self._commits)

    def append(self, commit: CommitRecord) -> None:
        """Raises RunFailed naming the file if it cannot be written; then nothing of the record is in it."""
        line = commit.to_json().encode() + b"\n"
        try:
            with self._path.open("ab", buffering=0) as file:
                size = file.tell()
                try:
                    written = file.write(line)
                    if written != len(line):
                        raise OSError(28, os.strerror(28))
                except OSError:
                    file.truncate(size)
                    raise
        except OSError as error:
            raise RunFailed(f"{self._path}: cannot note the commit of step {commit.step}: {error.strerror}") from None
        self._commits.append(commit)

    def _load(self) -> None:
        """Raises UsageError naming the file if more of it is damaged than a crash in the middle of a line explains."""
        good = 0
        try:
            lines = self._path.read_bytes().splitlines(keepends=True)
        except OSError as error:
            raise UsageError(f"{self._path}: cannot be read: {error.strerror}") from None
        for number, line in enumerate(lines, 1):
            try:
                commit = CommitRecord.from_json(line.decode())
            except (ValueError, KeyError, TypeError) as error:
                if number < len(lines) or line.endswith(b"\n"):
                    raise UsageError(f"{self._path}: line {number} is damaged: {error}; move the file away") from None
                _log.warning("%s: the last line was torn by a crash; its commit is with the peers", self._path)
                os.truncate(self._path, good)
                return
            if not line.endswith(b"\n"):  # whole, but for the end of the line
                with self._path.open("ab") as file:
                    file.write(b"\n")
            good += len(line)
            self._commits.append(commit)
