"""Fields: checks of single values from the network.  Each returns the value or raises BadRequest with its name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sized
from typing import TypeVar

from swarm.endpoints import is_endpoint, is_numeric_class
from swarm.errors import BadRequest
from swarm.ids import Digest, MicrobatchId, PeerId, RunHash, SessionId

T = TypeVar("T")
V = TypeVar("V")

MAX_COUNT = 1 << 53
"""Counts stay below this: exact as a float and in JSON."""
MAX_MICROBATCHES = 1 << 16
"""Entries of a list of microbatches."""
MAX_MEMBERS = 4096
"""Entries of a list of peers."""
MAX_COMMITS = 4096
"""Entries of a list of commit records (their size is bounded by the message limit)."""
MAX_DEADLINE_SECONDS = 86400.0
MAX_REASON = 4096
"""Characters of free text."""

_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)
_SESSION = re.compile(r"[0-9a-f]{16}", re.ASCII)
_NAME = re.compile(r"[!-~]{1,128}", re.ASCII)


def count(name: str, value: int, below: int = MAX_COUNT) -> int:
    """A whole number from 0 to ``below`` - 1."""
    if not 0 <= value < below:
        raise BadRequest(f"{name}: {value} is not in [0, {below})")
    return value


def microbatch(name: str, value: int) -> MicrobatchId:
    """Index of a microbatch."""
    return MicrobatchId(count(name, value, 1 << 31))


def number(name: str, value: float) -> float:
    """A finite number."""
    if not math.isfinite(value):
        raise BadRequest(f"{name}: {value} is not finite")
    return value


def amount(name: str, value: float) -> float:
    """A finite number that is not negative."""
    if number(name, value) < 0:
        raise BadRequest(f"{name}: {value} is negative")
    return value


def deadline(name: str, value: float) -> float:
    """Seconds from now: more than 0, at most a day."""
    if not 0 < number(name, value) <= MAX_DEADLINE_SECONDS:
        raise BadRequest(f"{name}: {value} is not in (0, {MAX_DEADLINE_SECONDS:.0f}]")
    return value


def run(name: str, value: str) -> RunHash:
    """64 hex digits."""
    return RunHash(_matching(name, value, _HASH, "64 hex digits"))


def digest(name: str, value: str) -> Digest:
    """64 hex digits."""
    return Digest(_matching(name, value, _HASH, "64 hex digits"))


def session(name: str, value: str) -> SessionId:
    """16 hex digits."""
    return SessionId(_matching(name, value, _SESSION, "16 hex digits"))


def peer(name: str, value: str) -> PeerId:
    """1 to 128 printable ASCII characters without blanks."""
    return PeerId(_matching(name, value, _NAME, "a peer id"))


def endpoint(name: str, value: str) -> str:
    """HOST:PORT and nothing that gRPC would take for another kind of address ("unix:...")."""
    if not is_endpoint(value):
        raise BadRequest(f"{name}: {value[:80]!r} is not HOST:PORT")
    return value


def numeric_class(name: str, value: str) -> str:
    """Device type and torch build, as a peer says it."""
    if not is_numeric_class(value):
        raise BadRequest(f"{name}: {value[:80]!r}")
    return value


def text(name: str, value: str, most: int = MAX_REASON) -> str:
    """Free text of at most ``most`` characters."""
    if len(value) > most:
        raise BadRequest(f"{name}: {len(value)} characters, more than {most}")
    return value


def choice(name: str, value: int, of: dict[int, V]) -> V:
    """A known enum value."""
    if value not in of:
        raise BadRequest(f"{name}: unknown value {value}")
    return of[value]


def many(name: str, values: Iterable[T], most: int, check: Callable[[str, T], V]) -> tuple[V, ...]:
    """Every entry of a list of at most ``most``; the length is checked first."""
    if isinstance(values, Sized) and len(values) > most:
        raise BadRequest(f"{name}: {len(values)} entries, more than {most}")
    return tuple(check(name, value) for value in values)


def _matching(name: str, value: str, pattern: re.Pattern[str], what: str) -> str:
    if pattern.fullmatch(value) is None:
        raise BadRequest(f"{name}: {value[:80]!r} is not {what}")
    return value
