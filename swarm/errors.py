"""Every error of the project, split by what the caller must do.

SwarmError
  Retryable            ask another peer
    Unreachable          no connection, or it broke
    TimedOut             no answer before the deadline
    PeerFailed           the peer answered with an internal error
    BadReply             the answer breaks the protocol
    NotFinite            the peer computed, or was given, NaN or infinity
    ReduceFailed         an all-reduce ended without every member's weight
  Refused              the peer's own word; never counted as a fault
    Busy                 queue full: come back in ``retry_after_seconds``
    Draining             the peer is leaving
    Stale                the peer is at another version or lineage
    WrongRun             the peer serves another run, stage or protocol version
    Frozen               the step is closed for this attempt
    Voided               a higher try of this microbatch exists
    NeedsInput           the graph is gone: send the stage's input again
    BadRequest           malformed: sizes, dtype, ids or numbers out of range
  Fatal                stop the process; carries its exit code
    UsageError           2  wrong option, file or config
    CannotJoin           3  no DHT, no run, identity in use, port taken
    StateLost            4  a committed state is held by nobody any more
    RunFailed            1  the run, or its verification, failed
    Superseded           1  another trainer leads this run; peers answer a lower term with it
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the program ``swarm``."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    CANNOT_JOIN = 3
    STATE_LOST = 4
    INTERRUPTED = 130


class SwarmError(Exception):
    """Root of all errors raised by this project."""


# --- ask another peer -------------------------------------------------------------


class Retryable(SwarmError):
    """The call failed at this peer; another peer may answer."""


class Unreachable(Retryable):
    """No connection to the peer, or it broke during the call."""


class TimedOut(Retryable):
    """No answer before the deadline."""


class PeerFailed(Retryable):
    """The peer answered that it failed inside."""


class BadReply(Retryable):
    """The peer's answer breaks the protocol."""


class NotFinite(Retryable):
    """NaN or infinity.  ``where`` is 'input', 'output' or 'gradient'."""

    def __init__(self, where: str) -> None:
        super().__init__(f"not finite: {where}")
        self.where = where


class ReduceFailed(Retryable):
    """An all-reduce ended without a complete result; ``unreachable`` names the peers that were missed."""

    def __init__(self, message: str, unreachable: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.unreachable = unreachable


# --- the peer's own word ----------------------------------------------------------


class Refused(SwarmError):
    """The peer declined.  This is an answer, never a fault."""


class Busy(Refused):
    """Too much work waits already; try again in ``retry_after_seconds``."""

    def __init__(self, retry_after_seconds: float) -> None:
        super().__init__(f"busy, retry in {retry_after_seconds:.2f} s")
        self.retry_after_seconds = retry_after_seconds


class Draining(Refused):
    """The peer takes no new work because it is leaving."""


class Stale(Refused):
    """The peer is at another version or lineage than the caller."""


class WrongRun(Refused):
    """The peer serves another run, stage or protocol version."""


class Frozen(Refused):
    """The step is closed for this attempt: nothing can be added to it."""


class Voided(Refused):
    """A higher try of this microbatch was announced: this one is not added."""


class NeedsInput(Refused):
    """The autograd graph is gone; send the stage's input again."""


class BadRequest(Refused):
    """The request is malformed or out of range."""


# --- stop -------------------------------------------------------------------------


class Fatal(SwarmError):
    """The process cannot go on; it prints one line and exits with ``exit_code``."""

    exit_code: ExitCode = ExitCode.FAILED


class UsageError(Fatal):
    """A wrong option, file or config value."""

    exit_code = ExitCode.USAGE


class CannotJoin(Fatal):
    """The swarm cannot be joined: addresses, identity, port or run."""

    exit_code = ExitCode.CANNOT_JOIN


class StateLost(Fatal):
    """A committed state is not held by any peer any more."""

    exit_code = ExitCode.STATE_LOST


class RunFailed(Fatal):
    """The run or its verification failed."""


class Superseded(Fatal):
    """Another trainer leads this run.  ``followed`` is the number of the term that the peers follow, if one said so."""

    def __init__(self, message: str, followed: int = 0) -> None:
        super().__init__(message)
        self.followed = followed


Failure = Retryable | Refused | Superseded
"""What a peer may answer instead of a result."""
FAILURES = (Retryable, Refused, Superseded)
