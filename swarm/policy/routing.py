"""Which peer of a stage gets the next microbatch: stochastic wiring (SWARM, section 3.2 and Algorithm 1).

Interleaved weighted round robin over expected busy times.  A peer serves one job at a time, so its seconds per unit
of work can be seen from outside: an answer took from the later of its sending and the previous answer until now.
Units: a forward 1, a backward 2, so that the backward a forward will cause is counted when the forward is placed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm.ids import PeerId

FORWARD_UNITS = 1.0
BACKWARD_UNITS = 2.0
LEARNING_RATE = 0.2
"""Weight of the newest measurement in the moving average."""
PARDON = 0.7
"""What is left of a slow estimate after a step, down to what answers alone say."""
UNKNOWN_SECONDS = 1e-3
"""Assumed of a peer of which nothing is known, so that it is tried at once."""


@dataclass(slots=True, kw_only=True)
class Lane:
    """What the trainer knows of one peer's speed and load.

    Time-outs slow a peer down for routing; deadlines follow answers alone, or one lost message would make the wait for
    the next one six times as long, and so on.  What time-outs do to deadlines is :attr:`leniency`.
    """

    seconds_per_unit: float = UNKNOWN_SECONDS
    measurements: int = 0
    answer_seconds: float = UNKNOWN_SECONDS
    """Seconds per unit, from answers alone."""
    answers: int = 0
    timeouts: int = 0
    """In a row; calls that were under way together count once."""
    last_timeout: float = float("-inf")
    outstanding_units: float = 0.0
    last_answer: float = float("-inf")

    def start_from(self, forward_seconds: float) -> None:
        """Take the peer's own probe until something is measured."""
        if not self.measurements and forward_seconds > 0:
            self.seconds_per_unit = forward_seconds / FORWARD_UNITS
        if not self.answers and forward_seconds > 0:
            self.answer_seconds = forward_seconds / FORWARD_UNITS

    def begin_step(self) -> None:
        """Nothing is placed yet; and what time-outs made of the estimate wears off.

        A peer that came back after one would never be chosen again otherwise, and so never be measured.
        """
        self.outstanding_units = 0.0
        self.seconds_per_unit = max(min(self.seconds_per_unit, self.answer_seconds), PARDON * self.seconds_per_unit)

    def sent(self, units: float) -> None:
        """Work was placed on the peer."""
        self.outstanding_units += units

    def given_up(self, units: float) -> None:
        """Placed work will not be done by the peer."""
        self.outstanding_units = max(0.0, self.outstanding_units - units)

    def answered(self, units: float, sent_at: float, now: float) -> None:
        """An answer of ``units`` arrived for a call sent at ``sent_at``."""
        self.given_up(units)
        seconds = (now - max(sent_at, self.last_answer)) / units
        self._learn(seconds)
        self.answers += 1
        self.answer_seconds = _average(self.answer_seconds, seconds, self.answers)
        self.timeouts = 0
        self.last_answer = now

    def timed_out(self, units: float, sent_at: float, now: float) -> None:
        """No answer came: the peer is at least as slow as the wait says."""
        self.given_up(units)
        waited_seconds = now - sent_at
        if sent_at >= self.last_timeout:
            self.timeouts += 1
            self.last_timeout = now
        self._learn(max(self.seconds_per_unit, waited_seconds / units))

    def answer_expected_seconds(self) -> float:
        """Expected seconds until all that is placed is answered."""
        return self.outstanding_units * self.answer_seconds

    @property
    def leniency(self) -> float:
        """Multiplier of deadlines, 1 to 8: a peer that is slower than it ever was gets its answer in at last."""
        return float(min(8, 2**self.timeouts))

    def _learn(self, seconds: float) -> None:
        self.measurements += 1
        self.seconds_per_unit = _average(self.seconds_per_unit, seconds, self.measurements)


def _average(known: float, newest: float, count: int) -> float:
    """Exact over the first measurements, then moving: no bias towards the first value."""
    return known + max(LEARNING_RATE, 1.0 / count) * (max(newest, 1e-6) - known)


class Routing(Protocol):
    """Which of a stage's peers takes the next microbatch; other rules than :func:`choose` are there to be compared."""

    def __call__(
        self, lanes: Sequence[tuple[PeerId, Lane]], units: float, seed: str, waiting_units: float = 0.0
    ) -> PeerId | None:
        """One of ``lanes`` for ``units`` of work; ``seed`` is STEP/MICROBATCH.  None if there is none.

        ``waiting_units``: what the step has for the stage beyond that and has not placed yet.
        """


def choose(lanes: Sequence[tuple[PeerId, Lane]], units: float, seed: str, waiting_units: float = 0.0) -> PeerId | None:
    """Of the peers that can finish while the stage has work anyway, the one that is free first.

    So a slow peer is as busy as a fast one, with few microbatches in flight.  Towards the end of the step, when a peer
    would be waited for, the one that is expected to finish first.  Ties are broken by ``seed``.
    """
    if not lanes:
        return None
    # Plain loops: a trainer with a thousand peers comes here some hundred times a second.
    placed_units = per_second = 0.0
    for _, lane in lanes:
        placed_units += lane.outstanding_units
        per_second += 1.0 / lane.seconds_per_unit
    horizon = (waiting_units + placed_units) / per_second
    least_finish = least_start = math.inf
    first = list[PeerId]()
    for peer, lane in lanes:
        start = lane.outstanding_units * lane.seconds_per_unit
        finish = max(horizon, start + units * lane.seconds_per_unit)
        if finish < least_finish or (finish == least_finish and start < least_start):
            least_finish, least_start, first = finish, start, [peer]
        elif finish == least_finish and start == least_start:
            first.append(peer)
    return first[0] if len(first) == 1 else min(first, key=lambda peer: tie(seed, peer))


def tie(seed: str, peer: PeerId) -> str:
    """An order of peers that is another for each seed."""
    return hashlib.sha256(f"{seed}/{peer}".encode()).hexdigest()
