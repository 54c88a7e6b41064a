"""The report of a run: one JSON file, written whole or not at all."""

from __future__ import annotations

import errno
import math
import os
import tempfile
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from swarm.errors import RunFailed, UsageError


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Figure = Annotated[float | None, BeforeValidator(_finite)]
"""A number that may be NaN or infinite, and is null then: JSON has no other way to say it."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Microbatches(_Part):
    """How often what happened to the run's microbatches."""

    sent: int = 0
    completed: int = 0
    retried: int = 0
    voided: int = 0
    repaired: int = 0
    excluded: int = 0


class Failure(_Part):
    """A peer that was lost, or another thing that went wrong, ``time_seconds`` after the start."""

    time_seconds: float
    peer: str
    stage: int | None
    kind: str


class Verification(_Part):
    """The run against the same run in one process."""

    relative_difference: Figure
    """Of the parameters: norm of the difference over norm of what training changed, the worst stage's."""
    loss_difference: Figure
    """The greatest over all steps, in nats per token."""
    tolerance: float
    ok: bool


class Report(_Part):
    """What a run did."""

    config_hash: str
    steps: int
    losses: tuple[Figure, ...]
    """Mean loss per token of each step, in nats."""
    tokens_per_second: Figure
    cpu_seconds: Figure
    """Of all processes of the run that could be measured, together."""
    wall_seconds: Figure
    microbatches: Microbatches
    samples_per_stage_and_step: tuple[tuple[int, ...], ...]
    """[stage][step]: sequences in the gradient that was applied."""
    failures: tuple[Failure, ...]
    parameter_norms: tuple[Figure, ...]
    """One for each stage; null where no peer could tell."""
    parameter_digest: tuple[str, ...]
    """SHA-256 in hex, one for each stage; empty where no peer could tell."""
    verify: Verification | None = None

    def write(self, path: Path) -> None:
        """Write to ``path`` by temporary file and rename, so that it never holds half a report.

        Raises UsageError (the place cannot be written) or RunFailed (the disk is full or broken), naming the file.
        """
        write_atomically(path, (self.model_dump_json(indent=2, exclude_none=False) + "\n").encode())

    @staticmethod
    def read(path: Path) -> Report:
        """Inverse of :meth:`write`.  Raises UsageError, naming the file."""
        try:
            return Report.model_validate_json(path.read_bytes())
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror or error}") from None
        except ValidationError as error:
            raise UsageError(f"{path}: not a report: {error.errors()[0]['msg']}") from None


def ensure_writable(path: Path) -> None:
    """Fail before the run rather than after it.  Raises UsageError naming ``path``; makes missing folders."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _write_error(path, error) from None


def write_atomically(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``, whole or not at all.  Raises UsageError or RunFailed naming ``path``."""
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # NamedTemporaryFile makes it private
        temporary.replace(path)
        temporary = None
    except OSError as error:
        raise _write_error(path, error) from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


_MACHINE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG})


def _write_error(path: Path, error: OSError) -> UsageError | RunFailed:
    text = f"{path}: cannot write: {error.strerror or error}"
    return RunFailed(text) if error.errno in _MACHINE_ERRORS else UsageError(text)
