"""What may happen to a call between two processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from swarm.messages import Contact


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call, as the weather sees it."""

    kind: str
    """Name of the method of :class:`swarm.ports.StageCalls`."""
    caller: str
    """Name of the machine."""
    to: Contact
    request: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What happens to one call.  Seconds are virtual, and beside those that the links take."""

    request_seconds: float = 0.0
    reply_seconds: float = 0.0
    lose_request: bool = False
    lose_reply: bool = False
    repeat: bool = False
    """The request arrives twice at once; the first answer counts."""
    late_copy_seconds: float | None = None
    """Another copy arrives this much later, whatever has become of the caller; nobody hears its answer."""
    reset_request: bool = False
    """The connection breaks before the request arrives, and the caller is told at once."""
    reset_reply: bool = False
    """The connection breaks before the answer leaves."""
    kill_amid_stream: bool = False
    """The callee dies when half of what it streams (state, gradient) has been sent."""
    kill_before: bool = False
    """The callee dies when the request arrives."""
    kill_after: bool = False
    """The callee dies once it has computed the answer, before the answer leaves."""
    on_request: Callable[[], None] | None = None
    """Happens when the request arrives."""
    on_reply: Callable[[], None] | None = None
    """Happens once the answer is computed, before it leaves."""


class Weather(Protocol):
    """Decides the fate of each call; a test's source of faults."""

    def fate(self, call: Call) -> Fate:
        """Called once for each call, when it is made."""


FAIR = Fate()


class FairWeather:
    """Nothing is lost."""

    def fate(self, call: Call) -> Fate:
        return FAIR
