"""Alive, suspect, banned: what a failed call does to a peer's standing, with back-off.

A suspect gets no work; once its back-off is over it is greeted, and one good answer makes it alive again.
A new session is a new process and starts alive.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_BACKOFF_SECONDS = 0.5
LONGEST_BACKOFF_SECONDS = 30.0
BAN_SECONDS = 300.0
"""For a peer that broke the protocol or computed what is not finite, twice in a row."""


@dataclass(slots=True, kw_only=True)
class Health:
    """Standing of one life of a peer."""

    failures: int = 0
    """In a row."""
    suspect_until: float = float("-inf")
    suspected: bool = False
    offences: int = 0
    """Answers with rubbish, in this life: good ones do not make up for them."""
    divergences: int = 0
    """In this life: an answer to a greeting does not make up for them."""
    banned_until: float = float("-inf")
    """Unlike a suspicion, no answer that comes in meanwhile ends this."""

    def failed(self, now: float) -> float:
        """A call failed; returns the seconds for which the peer is left alone.  Calls that fail together count once."""
        if now < self.suspect_until:
            return self.suspect_until - now
        backoff = min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(self.failures, 10))
        self.failures += 1
        self.suspected = True
        self.suspect_until = now + backoff
        return backoff

    def misbehaved(self, now: float) -> float:
        """A call was answered with rubbish.  Returns seconds, more from the second time on."""
        if now < self.banned_until:
            return self.banned_until - now
        self.offences += 1
        return self._ban(now, LONGEST_BACKOFF_SECONDS if self.offences == 1 else BAN_SECONDS)

    def diverged(self, now: float) -> float:
        """Its numbers were not its group's.  Once, a new state may mend it; then it is left alone.  Returns seconds."""
        self.divergences += 1
        if self.divergences == 1:
            return 0.0
        return self._ban(now, LONGEST_BACKOFF_SECONDS if self.divergences == 2 else BAN_SECONDS)

    def _ban(self, now: float, seconds: float) -> float:
        self.suspected = True
        self.banned_until = max(self.banned_until, now + seconds)
        return seconds

    def succeeded(self, now: float) -> None:
        """A call was answered."""
        self.failures = 0
        self.suspect_until = float("-inf")
        self.suspected = now < self.banned_until

    def greet_due(self, now: float) -> bool:
        """A suspect may be asked again."""
        return self.suspected and now >= max(self.suspect_until, self.banned_until)
