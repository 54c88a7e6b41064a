"""A private folder for the sockets between this process and its p2pd, and the removal of dead processes' ones."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path

from swarm.errors import UsageError

_LONGEST_PATH = 60
"""Characters of the folder: a unix socket's path ends at 107, and hivemind's file names take up to 30."""
_NAME = re.compile(r"swarm-([0-9]+)-\w+")
_LOCK = "owner"


class SocketFolder:
    """``swarm-<pid>-xxxxxxxx``, mode 0700, locked for the life of this process."""

    def __init__(self, root: Path | None = None) -> None:
        """Make the folder in ``root`` (by default the temporary folder).  Raises UsageError."""
        root = root or Path(tempfile.gettempdir())
        try:
            self.path = Path(tempfile.mkdtemp(prefix=f"swarm-{os.getpid()}-", dir=root))
        except OSError as error:
            raise UsageError(f"socket folder {root}: {error.strerror}") from None
        if len(str(self.path)) > _LONGEST_PATH:
            self.path.rmdir()
            raise UsageError(f"socket folder {root}: the path is too long for unix sockets; choose a shorter one")
        self._handle = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._handle, fcntl.LOCK_EX)
        _remove_dead(root)

    def close(self) -> None:
        """Remove the folder."""
        if self._handle >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._handle)
            self._handle = -1


def _remove_dead(root: Path) -> None:
    for folder in root.glob("swarm-*-*"):
        match = _NAME.fullmatch(folder.name)
        if match and _is_ours(folder) and not _is_alive(int(match[1])) and not _is_locked(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    try:
        return folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid()
    except FileNotFoundError:  # its owner just removed it
        return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _is_locked(folder: Path) -> bool:
    # A pid says nothing about a process in another container that shares the folder; a lock does.
    try:
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
