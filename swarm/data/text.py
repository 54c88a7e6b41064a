"""Text as bytes, and the microbatches drawn from it."""

from __future__ import annotations

import codecs
import hashlib
import sysconfig
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from swarm.config import RunConfig
from swarm.errors import UsageError
from swarm.ids import Digest, MicrobatchId
from swarm.tensors import TensorData, TensorSpec

DEFAULT_CAP_BYTES = 64 << 20

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
"""Folders left out of the default text: they differ between machines, or hold text that is broken on purpose."""


class TextBatches:
    """Implements ``ports.Batches`` over a file or folder of UTF-8 text, one token a byte.

    Each row starts at an offset that is a hash of (run seed, step, microbatch, row): sampling is with replacement,
    rows may overlap, and there is no epoch.  The same text gives the same microbatches to whoever trains; two
    trainers can tell whether they read the same by ``digest``.
    """

    def __init__(self, config: RunConfig, cap_bytes: int = DEFAULT_CAP_BYTES) -> None:
        """Reads at most ``cap_bytes`` of text into memory.  Raises UsageError, one line that names the path."""
        self._seed = config.run.seed
        self._rows = config.step.microbatch_size
        self._columns = config.model.sequence_length
        path = config.data.path
        self.text = _read(path, config.data.glob, cap_bytes)
        """All that is read, files in sorted order, one after the other."""
        if len(self.text) < self._columns + 1:
            where = path or "default text"
            raise UsageError(f"{where}: {len(self.text)} bytes of text, but a sequence needs {self._columns + 1}")
        self._tokens = np.frombuffer(self.text, dtype=np.uint8)

    @cached_property
    def digest(self) -> Digest:
        """SHA-256 of the text."""
        return Digest(hashlib.sha256(self.text).hexdigest())

    def microbatch(self, step: int, microbatch: MicrobatchId) -> tuple[TensorData, TensorData, int]:
        """Inputs (B, T) int64, targets (B, T) int64: each the byte after its input; all targets count."""
        starts = [self._offset(step, microbatch, row) for row in range(self._rows)]
        rows = np.stack([self._tokens[start : start + self._columns + 1] for start in starts]).astype("<i8")
        spec = TensorSpec(dtype="int64", shape=(self._rows, self._columns))
        inputs = TensorData(spec=spec, data=rows[:, :-1].tobytes())
        targets = TensorData(spec=spec, data=rows[:, 1:].tobytes())
        return inputs, targets, self._rows * self._columns

    def _offset(self, step: int, microbatch: int, row: int) -> int:
        key = f"text/{self._seed}/{step}/{microbatch}/{row}".encode()
        return int.from_bytes(hashlib.sha256(key).digest()[:8], "little") % (len(self.text) - self._columns)


def _read(path: str | None, pattern: str, cap_bytes: int) -> bytes:
    root = Path(sysconfig.get_paths()["stdlib"] if path is None else path)
    text = bytearray()
    try:
        for file in _files(root, pattern, default=path is None):
            text += _checked(file, cap_bytes - len(text))
            if len(text) >= cap_bytes:
                break
    except OSError as error:
        raise UsageError(f"{error.filename or root}: {error.strerror or error}") from None
    if not text:
        raise UsageError(f"{root}: no text in it" + (f" (glob {pattern!r})" if root.is_dir() else ""))
    return bytes(text)


def _files(root: Path, pattern: str, *, default: bool) -> Iterator[Path]:
    if not root.exists():
        raise UsageError(f"{root}: no such file or folder")
    if not root.is_dir():
        yield root
        return
    try:
        found = sorted((file.relative_to(root).as_posix(), file) for file in root.glob(pattern))
    except (ValueError, NotImplementedError) as error:
        raise UsageError(f"data.glob {pattern!r}: {error}") from None
    for name, file in found:
        if file.is_file() and not (default and _NOT_LIBRARY.intersection(name.split("/"))):
            yield file


def _checked(file: Path, limit_bytes: int) -> bytes:
    """The first ``limit_bytes`` of a file, which may cut the last character."""
    with file.open("rb") as stream:
        data = stream.read(limit_bytes)
        whole = not stream.read(1)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data, final=whole)
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: not UTF-8 (byte {error.start})") from None
    return data
