"""The trainer's half of 'exactly once': who is credited with which microbatch, and what a repair needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.ids import MicrobatchId, PeerId, SessionId
from swarm.messages import Contact
from swarm.tensors import TensorData


@dataclass(slots=True, kw_only=True)
class Counts:
    """Totals of a run for the report."""

    sent: int = 0
    completed: int = 0
    retried: int = 0
    voided: int = 0
    repaired: int = 0
    excluded: int = 0


@dataclass(slots=True, kw_only=True)
class Passage:
    """One microbatch of the step.

    ``inputs[s]`` is stage s's input and ``seeds[s]`` its output's gradient (the targets at the last stage); both stay
    until the commit, so that any stage can be repaired alone: about 2 x stages x (B, T, D) per microbatch.
    """

    microbatch: MicrobatchId
    tokens: int
    inputs: dict[int, TensorData] = field(default_factory=dict)
    seeds: dict[int, TensorData] = field(default_factory=dict)
    producers: dict[int, PeerId] = field(default_factory=dict)
    """Whose forward at stage s gave ``inputs[s + 1]``; it may still hold the graph."""
    tries: dict[int, int] = field(default_factory=dict)
    """Number of the next try of the backward, per stage."""
    not_finite: dict[int, list[PeerId]] = field(default_factory=dict)
    """Peers at which it was not finite, per stage."""
    loss: float | None = None
    malformed: int = 0
    """Peers that called it malformed."""

    def next_try(self, stage: int) -> int:
        """Draw the number of a new try."""
        number = self.tries.get(stage, 0)
        self.tries[stage] = number + 1
        return number


class Ledger:
    """All microbatches of one step."""

    def __init__(self, stages: int) -> None:
        self.passages: dict[MicrobatchId, Passage] = {}
        self.excluded: set[MicrobatchId] = set()
        self.fenced: list[dict[PeerId, SessionId]] = [{} for _ in range(stages)]
        """Lives of peers that did not answer a close: they hold who knows what, until they drop it."""
        self.attempts = [0] * stages
        """Attempt at closing that each stage is in; calls sent in it, and before, are over once it is closed."""
        self.computing = True
        """The step's microbatches are still on their way; False once the close has begun."""
        self.placed: list[set[MicrobatchId]] = [set() for _ in range(stages)]
        """Microbatches that a peer of the stage has been chosen for."""
        self.credits: list[dict[MicrobatchId, Contact]] = [{} for _ in range(stages)]
        """Which life of a peer said that it holds the microbatch."""

    def over(self, stage: int) -> int:
        """The last attempt in which nothing is sent any more."""
        return self.attempts[stage] - 1 if self.computing else self.attempts[stage]

    def unplaced(self, stage: int) -> int:
        """Microbatches of the step that the stage has not begun."""
        return len(self.passages) - len(self.placed[stage])

    def credit(self, stage: int, microbatch: MicrobatchId, holder: Contact) -> None:
        """The peer said that it holds the microbatch."""
        self.credits[stage][microbatch] = holder

    @property
    def expected(self) -> frozenset[MicrobatchId]:
        """What every stage's gradient must consist of."""
        return frozenset(self.passages) - self.excluded

    @property
    def tokens(self) -> int:
        """Weight of the step's gradient."""
        return sum(self.passages[m].tokens for m in self.expected)
