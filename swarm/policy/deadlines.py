"""How long to wait: deadlines that follow what was measured.

Each is ``clamp(floor, FACTOR x expected, ceiling) x patience``.  ``patience`` grows while calls to *different* peers
time out in a row: then the trouble is more likely one's own (a loaded host, a bad uplink) than theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.ids import PeerId

FACTOR = 6.0
"""Times the expected duration."""
LONGEST_CALL_SECONDS = 3600.0
"""Before patience: whatever a peer says of its speed, nobody waits longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of the deadlines, in seconds.  LAN suits one site, WAN home links."""

    call_floor_seconds: float
    """Least deadline of a forward or backward."""
    unmeasured_seconds: float
    """Deadline of a call to a peer of which nothing was measured (it may be warming up)."""
    call_ceiling_seconds: float
    control_seconds: float
    """Deadline of greetings, voids, freezes beyond the job that they wait for."""
    reduce_floor_seconds: float
    reduce_bytes_per_second: float
    """Slowest link for which an all-reduce or a transfer is given time."""


LAN = Limits(
    call_floor_seconds=5.0,
    unmeasured_seconds=30.0,
    call_ceiling_seconds=300.0,
    control_seconds=5.0,
    reduce_floor_seconds=15.0,
    reduce_bytes_per_second=2e6,
)
WAN = Limits(
    call_floor_seconds=10.0,
    unmeasured_seconds=60.0,
    call_ceiling_seconds=600.0,
    control_seconds=10.0,
    reduce_floor_seconds=30.0,
    reduce_bytes_per_second=5e5,
)


@dataclass(slots=True, kw_only=True)
class Patience:
    """Grows from 1 to 8 while calls to different peers time out one after another."""

    timed_out: set[PeerId] = field(default_factory=set)

    def timeout(self, peer: PeerId) -> None:
        """A call to ``peer`` timed out."""
        self.timed_out.add(peer)

    def success(self) -> None:
        """Any call was answered."""
        self.timed_out.clear()

    @property
    def factor(self) -> float:
        """Multiplier of every deadline."""
        return float(min(8, 2 ** max(0, len(self.timed_out) - 1)))


def call_deadline(limits: Limits, expected_seconds: float, measured: bool, patience: float) -> float:
    """Seconds for a forward or backward that is expected to take ``expected_seconds``, queue included."""
    floor = limits.call_floor_seconds if measured else limits.unmeasured_seconds
    # The ceiling bounds the reserve, not the work: a stage that takes minutes must be waited for as well.
    ceiling = max(limits.call_ceiling_seconds, min(2.0 * expected_seconds, LONGEST_CALL_SECONDS))
    return min(ceiling, max(floor, FACTOR * expected_seconds)) * patience


def control_deadline(limits: Limits, longest_job_seconds: float, patience: float) -> float:
    """Seconds for a control call that waits for at most one running job."""
    return (limits.control_seconds + FACTOR * longest_job_seconds) * patience


def transfer_deadline(limits: Limits, nbytes: int, patience: float) -> float:
    """Seconds for an all-reduce or a transfer of ``nbytes``."""
    return (limits.reduce_floor_seconds + nbytes / limits.reduce_bytes_per_second) * patience
