"""The fuzzer can fail: each of these bugs, put into the protocol, is caught by some of its random schedules.

Some guards are not here because another one catches what they let through: an attempt that is frozen and a contribution
that is compared with the lead's list guard each other, and a fence only saves attempts.  Those have tests of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from swarm.errors import Frozen, Voided
from swarm.ids import Digest, MicrobatchId, PeerId
from swarm.messages import (
    ApplyRequest,
    DropRequest,
    HeldMicrobatch,
    MicrobatchCall,
    PeerReport,
    ReduceRequest,
    StateMark,
    StepKey,
)
from swarm.policy.closing import ClosePlan, plan_close
from swarm.ports import Gradient
from swarm.records import CommitRecord, Lineage, Term
from swarm.roles import closing
from swarm.roles.closing import StageClose, StageResult
from swarm.roles.committing import Committing
from swarm.roles.ledger import Ledger
from swarm.roles.pipeline import Pipeline
from swarm.roles.reducing import Reducing
from swarm.roles.seat import KEPT_COMMITS, Seat
from swarm.roles.serving import Serving
from swarm.roles.stepbook import StepBook
from swarm.roles.takeover import Takeover
from swarm.roles.trainer import Trainer
from swarm.sim import averager
from swarm.sim.arithmetic import ZERO, add, mean
from swarm.sim.averager import SimulatedAverager
from swarm.sim.fuzz.run import try_schedule
from swarm.sim.fuzz.schedule import draw

pytestmark = pytest.mark.simulated

MOST_SCHEDULES = 500
SHORT_SECONDS = 120.0
"""Instead of the bound for an honest swarm, for bugs that show as no progress."""

Bug = Callable[[pytest.MonkeyPatch], None]
BUGS: dict[str, Bug] = {}


def bug(name: str) -> Callable[[Bug], Bug]:
    """Enter a bug."""

    def enter(function: Bug) -> Bug:
        BUGS[name] = function
        return function

    return enter


# --- the peer's book ------------------------------------------------------------------


@bug("no deduplication")
def _(patch: pytest.MonkeyPatch) -> None:
    def holds(self: StepBook, call: MicrobatchCall) -> bool:
        if call.attempt <= self.frozen_attempt:
            raise Frozen("closed")
        if call.try_number < self._least_try.get(call.microbatch, 0):
            raise Voided("voided")
        return False

    patch.setattr(StepBook, "holds", holds)


@bug("voids are ignored")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepBook, "void", lambda self, microbatch, below_try: microbatch in self.held)


@bug("a drop forgets the sum")
def _(patch: pytest.MonkeyPatch) -> None:
    async def drop(self: Reducing, request: DropRequest) -> None:
        await self._reach(request.key)
        await self.reopen(request.key, request.attempt + 1)
        self._seat.open_book(request.key, self._module.drop_gradient).drop(request.attempt)

    patch.setattr(Reducing, "drop", drop)


@bug("a new term's book starts with the old gradient")
def _(patch: pytest.MonkeyPatch) -> None:
    def open_book(self: Seat, key: StepKey, drop_gradient: Callable[[], None]) -> StepBook:
        self.confirm(key)
        if self.book is None or self.book.key != key:
            self.book = StepBook(key)
        return self.book

    patch.setattr(Seat, "open_book", open_book)


@bug("what a failed addition left behind is kept")
def _(patch: pytest.MonkeyPatch) -> None:
    def add_half(self: Serving, book: StepBook, call: MicrobatchCall, tokens: int, gradient: Gradient) -> None:
        self._module.accumulate(gradient)
        book.add(call, tokens, gradient.samples)

    patch.setattr(Serving, "_add", add_half)


@bug("a gradient that is not finite is added")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Gradient, "finite", property(lambda self: True, lambda self, value: None))


# --- terms and versions ---------------------------------------------------------------


@bug("terms are not compared")
def _(patch: pytest.MonkeyPatch) -> None:
    def follow(self: Seat, term: Term) -> None:
        self.term = max(term, self.term)

    def confirm(self: Seat, key: StepKey) -> None:
        if key.lineage != self.lineage:
            raise Frozen("moved on")

    patch.setattr(Seat, "follow", follow)
    patch.setattr(Seat, "confirm", confirm)


@bug("a peer follows whoever spoke last")
def _(patch: pytest.MonkeyPatch) -> None:
    def follow(self: Seat, term: Term) -> None:
        self.term = term

    patch.setattr(Seat, "follow", follow)


@bug("a gradient for an older version is added")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Seat, "confirm", lambda self, key: None)


@bug("a peer told to fetch state keeps its book")
def _(patch: pytest.MonkeyPatch) -> None:
    def replace(self: Seat, lineage: Lineage, commits: tuple[CommitRecord, ...]) -> None:
        self.lineage = lineage
        self.commits.clear()
        self.commits.extend(commits[-KEPT_COMMITS:])
        self.kept = None

    patch.setattr(Seat, "replace", replace)


# --- commits ---------------------------------------------------------------------------


@bug("any kept gradient is applied")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Committing, "_keeps", lambda self, request, wanted: True)


@bug("a commit is applied twice")
def _(patch: pytest.MonkeyPatch) -> None:
    real = Committing._apply

    def apply(self: Committing, request: ApplyRequest) -> StateMark:
        if self._was_last(request):
            self._module.apply(request.commit.step, request.commit.clip_factor)
        return real(self, request)

    patch.setattr(Committing, "_apply", apply)


@bug("stages that had closed keep an excluded microbatch")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(closing, "plan_close", lambda expected, held: plan_close(expected, _all_expected(expected, held)))


def _all_expected(
    expected: frozenset[MicrobatchId], held: Mapping[PeerId, frozenset[MicrobatchId]]
) -> dict[PeerId, frozenset[MicrobatchId]]:
    return {peer: ids & expected for peer, ids in held.items()}


@bug("two holders of a microbatch both keep it")
def _(patch: pytest.MonkeyPatch) -> None:
    def decide(expected: frozenset[MicrobatchId], held: Mapping[PeerId, frozenset[MicrobatchId]]) -> ClosePlan:
        there = frozenset(m for ids in held.values() for m in ids)
        return ClosePlan(drops=(), repairs=tuple(sorted(expected - there)), reason="")

    patch.setattr(closing, "plan_close", decide)


@bug("of what nobody holds, one is not repaired")
def _(patch: pytest.MonkeyPatch) -> None:
    def decide(expected: frozenset[MicrobatchId], held: Mapping[PeerId, frozenset[MicrobatchId]]) -> ClosePlan:
        plan = plan_close(expected, held)
        return ClosePlan(drops=plan.drops, repairs=plan.repairs[1:], reason="")

    patch.setattr(closing, "plan_close", decide)


@bug("a member's missing part is not noticed")
def _(patch: pytest.MonkeyPatch) -> None:
    async def reduce(self: SimulatedAverager, request: ReduceRequest, gradient_sum: Any) -> Any:
        meeting = self._meetings.begin(request)
        mine = next(m for m in request.members if m.contact == self._node.contact)
        meeting.parts[mine.contact.peer] = (gradient_sum, mine.tokens)
        await asyncio.sleep(averager.MEETING_SECONDS)
        total = ZERO
        for part, _ in meeting.parts.values():
            total = add(total, tuple(part))
        return mean(total, request.total_tokens)

    patch.setattr(SimulatedAverager, "reduce", reduce)


# --- the trainer -----------------------------------------------------------------------


@bug("a step is committed before all stages have reduced")
def _(patch: pytest.MonkeyPatch) -> None:
    async def close(self: Trainer, ledger: Ledger, closes: list[StageClose]) -> list[StageResult]:
        first = await closes[0].run()
        unknown = replace(first, commit=replace(first.commit, digest=Digest("0" * 64)), donors=())
        return [first] + [unknown] * (len(closes) - 1)

    patch.setattr(Trainer, "_close", close)


@bug("an excluded microbatch stays expected")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "expected", property(lambda self: frozenset(self.passages)))


@bug("one peer's word excludes a microbatch everywhere")
def _(patch: pytest.MonkeyPatch) -> None:
    real = Pipeline._retried

    def retried(self: Pipeline, passage: Any, stage: int, *rest: Any) -> None:
        real(self, passage, stage, *rest)
        self._ledger.excluded.add(passage.microbatch)

    patch.setattr(Pipeline, "_retried", retried)


@bug("a takeover goes on from the oldest state")
def _(patch: pytest.MonkeyPatch) -> None:
    async def greet_all(self: Takeover) -> list[PeerReport]:
        members = [m for stage in self._roster.stages for m in stage.values()]
        reports = [r for r in await asyncio.gather(*(self._roster.greet(m) for m in members)) if r is not None]
        least = min((r.lineage.length for r in reports), default=0)
        return [r for r in reports if r.lineage.length == least]

    patch.setattr(Takeover, "_greet_all", greet_all)


@bug("the reply to a repeated backward says nothing is held")
def _(patch: pytest.MonkeyPatch) -> None:
    def held(self: StepBook, attempt: int) -> tuple[HeldMicrobatch, ...]:
        self.frozen_attempt = max(self.frozen_attempt, attempt)
        return tuple(self.held[m] for m in sorted(self.held) if self.held[m].try_number == 0)

    patch.setattr(StepBook, "freeze", held)


# --- the test ---------------------------------------------------------------------------


def schedules_until_caught(name: str) -> tuple[int, str]:
    """How many schedules it took, and what caught the bug; the same schedule must pass without it."""
    for seed in range(MOST_SCHEDULES):
        with pytest.MonkeyPatch.context() as patch:
            BUGS[name](patch)
            outcome = try_schedule(draw(seed), SHORT_SECONDS)
        if outcome.error is not None and try_schedule(draw(seed), SHORT_SECONDS).error is None:
            return seed + 1, outcome.what
    return MOST_SCHEDULES, ""


@pytest.mark.parametrize("name", BUGS)
def test_bug_is_caught(name: str) -> None:
    schedules, what = schedules_until_caught(name)
    assert what, f"{schedules} schedules did not notice: {name}"
