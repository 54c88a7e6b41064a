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
"""So much of the default text is read; of a user's text, all."""
PIECE_BYTES = 1 << 20
"""Text is read and checked in pieces: no second copy of it is ever in memory."""

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
"""Folders left out of the default text: they differ between machines, or hold text that is broken on purpose."""


class TextBatches:
    """Implements ``ports.Batches`` over a file or folder of UTF-8 text, one token a byte.

    Each row starts at an offset that is a hash of (run seed, step, microbatch, row): sampling is with replacement,
    rows may overlap, and there is no epoch.  The same text gives the same microbatches to whoever trains; two
    trainers can tell whether they read the same by ``digest``.
    """

    def __init__(self, config: RunConfig, default_cap_bytes: int = DEFAULT_CAP_BYTES) -> None:
        """Reads the text into memory: all of ``data.path``, or the first ``default_cap_bytes`` of the default text.

        Raises UsageError, one line that names the path.
        """
        self._seed = config.run.seed
        self._rows = config.step.microbatch_size
        self._columns = config.model.sequence_length
        path = config.data.path
        self.text = _read(path, config.data.glob, default_cap_bytes)
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


def _read(path: str | None, pattern: str, default_cap_bytes: int) -> bytearray:
    root = Path(sysconfig.get_paths()["stdlib"] if path is None else path)
    text = bytearray()
    try:
        for file in _files(root, pattern, default=path is None):
            if path is None and len(text) >= default_cap_bytes:
                break
            _append(file, text, default_cap_bytes - len(text) if path is None else None)
    except OSError as error:
        raise UsageError(f"{error.filename or root}: {error.strerror or error}") from None
    except MemoryError:
        raise UsageError(f"{root}: its text does not fit into memory") from None
    if not text:
        raise UsageError(f"{root}: no text in it" + (f" (glob {pattern!r})" if root.is_dir() else ""))
    return text


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


def _append(file: Path, text: bytearray, limit_bytes: int | None) -> None:
    """Add a file to ``text``, or its first ``limit_bytes``, which may cut the last character."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    before = len(text)
    with file.open("rb") as stream:
        while True:
            left = PIECE_BYTES if limit_bytes is None else limit_bytes - (len(text) - before)
            piece = stream.read(min(PIECE_BYTES, left))
            # What the decoder waits for the rest of counts to the next piece.
            start = len(text) - before - len(decoder.getstate()[0])
            try:
                decoder.decode(piece, final=not piece and left > 0)
            except UnicodeDecodeError as error:
                raise UsageError(f"{file}: not UTF-8 (byte {start + error.start})") from None
            if not piece:
                return
            text += piece
