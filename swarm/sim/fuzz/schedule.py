"""A schedule: what a run is, and a list of faults, each at one occurrence of one point of the protocol."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

CALLS = (
    "forward", "backward", "void", "greet", "freeze", "drop", "reduce", "adopt", "apply", "fetch_state",
    "fetch_gradient",
)  # fmt: skip
BESIDE = ("all-reduce", "announce", "lookup", "lease")
POINTS = (*(f"{call} {moment}" for call in CALLS for moment in ("asked", "answered")), *BESIDE)
"""Where a fault may happen: as a call's request arrives, as its answer leaves, as a member comes to an all-reduce, as a
process writes or reads the directory, as the lead renews its lease."""

OFTEN = ("forward", "backward", "greet", "announce", "lookup")
SELDOM = ("void", "drop", "adopt", "fetch_state", "fetch_gradient")


class Kind(StrEnum):
    """What happens.  The victim is the peer that is called, or whose turn it is; else one that the fault names."""

    KILL = "kill"
    """The peer dies for good."""
    RESTART = "restart"
    """It dies, and a new life of the same identity starts later."""
    VANISH = "vanish"
    """As restart, but no connection is refused or reset: the machine lost its power."""
    PAUSE = "pause"
    """It runs nothing for a while, then goes on as if nothing had happened."""
    SLOW = "slow"
    """It computes some times slower for a while."""
    CUT = "cut off"
    """Nothing goes to it or comes from it for a while."""
    HALF_OPEN = "half-open"
    """As cut off, in one direction only."""
    LOSE = "lose"
    """The message never arrives (beside calls: the next one of this process)."""
    DELAY = "delay"
    DUPLICATE = "duplicate"
    """It arrives once more, at once or when the caller has given up."""
    RESET = "reset"
    """The connection breaks under it."""
    BAD_RECORD = "bad record"
    """What the directory says of the peer is unreadable, or wrong in a way that no signature shows."""
    NAN = "nan"
    """Its next results, or the sum of its gradients, are not finite."""
    BROKEN = "broken sum"
    """Its next addition of a gradient fails half-way."""
    LOST_RESULT = "lost result"
    """It does not get the result of its next all-reduce."""
    CLOCK = "clock jump"
    """Its clock goes forward at once."""
    JOIN = "join"
    """A newcomer takes the peer's stage."""
    TRAINER_RESTART = "trainer restart"
    TRAINER_LOSS = "trainer loses disk"
    """The trainer starts again and knows nothing of what was committed."""
    TRAINER_PAUSE = "trainer pause"
    SECOND_TRAINER = "second trainer"


MESSAGES = frozenset({Kind.LOSE, Kind.DELAY, Kind.DUPLICATE, Kind.RESET})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong."""

    point: str
    nth: int
    """At which occurrence of the point, from 1."""
    kind: Kind
    seconds: float
    """How long it lasts, or until the victim is back."""
    amount: int
    """How many messages, results or times slower; which variant; which victim."""

    def __str__(self) -> str:
        return f"{self.kind} at {self.point} {self.nth} ({self.seconds:.2f} s, {self.amount})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """``seed`` decides all that is not said here; faults end after :data:`FAULTS_END_SECONDS`."""

    seed: int
    peers: tuple[int, ...]
    """Of each stage."""
    steps: int = 3
    microbatches: int = 4
    poisoned: int = 0
    """Microbatches that are not finite at any peer."""
    staleness_seconds: float = 0.0
    """How old what is read from the directory may be."""
    clock_rates: tuple[float, ...] = (1.0,)
    """Of the peers' clocks, in turn."""
    sees_lead: bool = False
    """Whether trainers find each other's leases; else each takes over by force."""
    faults: tuple[Fault, ...] = ()

    def only(self, indices: Sequence[int]) -> Schedule:
        """The same run with some of its faults."""
        return replace(self, faults=tuple(self.faults[i] for i in indices))


def draw(seed: int) -> Schedule:
    """The schedule of a seed: few faults or many, of all kinds or a few, everywhere or at a few points."""
    rng = random.Random(seed)
    points = POINTS if rng.random() < 0.5 else tuple(rng.sample(POINTS, rng.randint(1, 4)))
    kinds = tuple(Kind) if rng.random() < 0.5 else tuple(rng.sample(tuple(Kind), rng.randint(1, 4)))
    faults = [_fault(rng, rng.choice(points), rng.choice(kinds)) for _ in range(rng.choice([1, 3, 6, 12, 25, 40]))]
    if rng.random() < 0.2:
        faults += _late_messages(rng)
    for point in sorted({fault.point.split()[0] for fault in faults} & set(SELDOM)):
        faults += _leads_to(rng, point)
    rates = (1.0,) if rng.random() < 0.7 else tuple(rng.uniform(0.9, 1.1) for _ in range(5))
    return Schedule(
        seed=seed,
        peers=tuple(rng.choice([1, 2, 2, 3, 3]) for _ in range(rng.randint(2, 3))),
        steps=rng.randint(3, 4),
        microbatches=rng.randint(4, 6),
        poisoned=rng.choice([0, 0, 0, 1, 2]),
        staleness_seconds=rng.choice([0.0, 0.0, 0.5, 3.0]),
        clock_rates=rates,
        sees_lead=rng.random() < 0.3,
        faults=tuple(faults),
    )


def _fault(rng: random.Random, point: str, kind: Kind, most: int | None = None) -> Fault:
    call = point.split()[0]
    most = most or (60 if call in OFTEN else 3 if call in SELDOM else 10)
    return Fault(
        point=point,
        nth=int(math.exp(rng.uniform(0.0, math.log(most + 1)))),
        kind=kind,
        seconds=math.exp(rng.uniform(math.log(0.05), math.log(12.0))),
        amount=rng.randint(1, 4),
    )


def _late_messages(rng: random.Random) -> list[Fault]:
    """A congested link that lets go of many messages at once, when what they are about is nearly over."""
    seconds = rng.uniform(0.5, 4.0)
    call = rng.choice(["backward", "backward", "forward", "freeze", "drop", "reduce", "apply"])
    faults = [_fault(rng, f"{call} asked", rng.choice([Kind.DUPLICATE, Kind.DUPLICATE, Kind.DELAY])) for _ in range(10)]
    return [replace(fault, seconds=seconds, amount=rng.choice([2, 2, 4])) for fault in faults]


def _leads_to(rng: random.Random, call: str) -> list[Fault]:
    """Faults without which a call that is seldom made would not be made at all."""

    def some(point: str, kind: Kind, most: int = 12) -> list[Fault]:
        return [_fault(rng, point, kind, most) for _ in range(rng.randint(1, 3))]

    if call == "void":
        return some("backward answered", Kind.LOSE)
    if call == "drop":
        return [
            *some("backward answered", Kind.LOSE),
            *some("void asked", Kind.LOSE, 2),
            *some("freeze answered", Kind.LOSE, 4),
        ]
    if call in ("adopt", "fetch_gradient"):
        return some("all-reduce", Kind.LOST_RESULT, 6)
    return [*some("forward answered", Kind.JOIN), *some("backward answered", Kind.RESTART)]
