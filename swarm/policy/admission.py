"""Whether a peer takes another call: it refuses at once what it could not finish in time."""

from __future__ import annotations

MAX_WAITING = 64
"""Calls that may wait for the compute thread at all, whatever their deadlines: bounds memory."""


def retry_after(waiting: int, seconds_per_job: float, deadline_seconds: float) -> float | None:
    """None: take the call.  Else the seconds after which asking again makes sense.

    An idle peer takes any: if its estimate is what is wrong (its clock jumped, it was suspended), only work mends that.
    """
    if waiting == 0:
        return None
    expected = (waiting + 1) * seconds_per_job
    if waiting >= MAX_WAITING:
        return max(0.05, expected / 2)
    if expected > deadline_seconds:
        return max(0.05, expected - deadline_seconds)
    return None
