"""The lead closes one stage's step: freeze, decide once, repair, reduce (docs/protocol.md, 'Life of a step')."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from swarm.errors import BadReply, NotFinite, Refused, Retryable, RunFailed
from swarm.ids import Digest, MicrobatchId, PeerId, short
from swarm.messages import (
    AdoptRequest,
    Contact,
    DropRequest,
    FreezeReply,
    FreezeRequest,
    GroupMember,
    ReducedMark,
    ReduceReply,
    ReduceRequest,
)
from swarm.policy.closing import ClosePlan, plan_close
from swarm.policy.deadlines import Limits, control_deadline, transfer_deadline
from swarm.policy.grouping import sits_out
from swarm.policy.routing import BACKWARD_UNITS, FORWARD_UNITS
from swarm.ports import Clock, Journal, StageCalls
from swarm.records import PeerState, StageCommit
from swarm.roles.fences import Fences
from swarm.roles.ledger import Ledger
from swarm.roles.pipeline import Pipeline
from swarm.roles.roster import Member, Roster

SUSPECT_SECONDS = 2.0
"""Wait for the freeze of a peer that is suspected already."""
NOT_FINITE = ReduceReply(reduced=None, samples=0, unreachable=(), reason="its gradient is not finite")
"""Stands for the answer of a member whose sum, or whose result, is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """A stage has reduced: what goes into the commit, and who holds the result."""

    commit: StageCommit
    donors: tuple[Contact, ...]


@dataclass(slots=True, kw_only=True)
class Close:
    """What the living peers of the stage hold once every expected microbatch is held exactly once."""

    members: dict[PeerId, Member]
    held: dict[PeerId, FreezeReply]

    def tokens(self, peer: PeerId) -> int:
        """Weight of a member."""
        return sum(h.tokens for h in self.held[peer].held)


class StageClose:
    """One stage's way from 'all acknowledged' to 'reduced'."""

    def __init__(
        self,
        *,
        stage: int,
        ledger: Ledger,
        roster: Roster,
        fences: Fences,
        pipeline: Pipeline,
        calls: StageCalls,
        clock: Clock,
        journal: Journal,
        limits: Limits,
        gradient_bytes: int,
    ) -> None:
        self.freeze_seconds = 0.0
        """Spent on freezes, drops and repairs."""
        self.reduce_seconds = 0.0
        self._stage = stage
        self._ledger = ledger
        self._roster = roster
        self._fences = fences
        self._pipeline = pipeline
        self._calls = calls
        self._clock = clock
        self._journal = journal
        self._limits = limits
        self._gradient_bytes = gradient_bytes
        self._key = pipeline.key(stage)
        self._overflows = 0

    @property
    def attempt(self) -> int:
        """The attempt that is being closed."""
        return self._ledger.attempts[self._stage]

    async def run(self) -> StageResult:
        """Close and reduce until a result with the full weight exists.  RunFailed if nothing is left to train."""
        while True:
            started = self._clock.now()
            close = await self._close()
            closed = self._clock.now()
            result = await self._reduce(close)
            self.freeze_seconds += closed - started
            self.reduce_seconds += self._clock.now() - closed
            if result is not None:
                return result
            self._ledger.attempts[self._stage] += 1

    # --- close --------------------------------------------------------------------

    async def _close(self) -> Close:
        while True:
            if self._ledger.tokens <= 0:
                raise RunFailed(f"step {self._key.step} has no finite microbatch with tokens to train on")
            await self._fences.lift(self._stage)
            close = await self._freeze()
            plan = self._plan(close)
            if plan.clean and close.held:
                return close
            await self._drop(close, plan)
            await self._repair(plan)
            self._ledger.attempts[self._stage] += 1

    async def _freeze(self) -> Close:
        """Every life of a peer that may hold something answers, or is fenced."""
        members = [
            m
            for m in self._roster.stages[self._stage].values()
            if m.lineage == self._key.lineage and m.state is PeerState.READY and not self._fences.holds(m)
        ]
        await self._fence_the_gone({m.peer for m in members})
        replies = await asyncio.gather(*(self._freeze_one(m) for m in members))
        answered = {m.peer: (m, reply) for m, reply in zip(members, replies, strict=True) if reply is not None}
        return Close(
            members={peer: member for peer, (member, _) in answered.items()},
            held={peer: reply for peer, (_, reply) in answered.items()},
        )

    async def _fence_the_gone(self, known: set[PeerId]) -> None:
        """A life that was credited and is not asked now must not come back with what it held."""
        for peer in sorted({holder.peer for holder in self._ledger.credits[self._stage].values()} - known):
            member = self._roster.stages[self._stage].get(peer)
            if member is not None and not self._fences.holds(member):
                self._fences.put(member, "not ready at the close")

    async def _freeze_one(self, member: Member) -> FreezeReply | None:
        longest_job = member.lane.answer_seconds * (FORWARD_UNITS + BACKWARD_UNITS)
        seconds = control_deadline(self._limits, longest_job, self._roster.patience.factor)
        if member.health.suspected:
            seconds = min(seconds, SUSPECT_SECONDS)
        request = FreezeRequest(key=self._key, attempt=self.attempt)
        try:
            reply = await self._calls.freeze(member.contact, request, seconds)
            if reply.session != member.contact.session:
                raise BadReply("another life of the peer answered")
        except Retryable as error:
            self._fences.put(member, str(error))
            self._roster.failed(member, error)
            return None
        except Refused as error:
            self._fences.put(member, str(error))
            self._roster.unready(member)
            return None
        self._roster.answered(member)
        return reply

    def _plan(self, close: Close) -> ClosePlan:
        """Whoever holds a microbatch with another weight than was sent holds something that is not expected."""
        passages = self._ledger.passages
        held: dict[PeerId, frozenset[MicrobatchId]] = {}
        for peer, reply in close.held.items():
            honest = all(h.microbatch in passages and h.tokens == passages[h.microbatch].tokens for h in reply.held)
            ids = frozenset(h.microbatch for h in reply.held)
            held[peer] = ids if honest else ids | {MicrobatchId(-1)}
        return plan_close(self._ledger.expected, held)

    async def _drop(self, close: Close, plan: ClosePlan) -> None:
        async def drop(member: Member) -> None:
            try:
                request = DropRequest(key=self._key, attempt=self.attempt)
                await self._calls.drop(member.contact, request, self._limits.control_seconds)
            except (Retryable, Refused) as error:
                self._fences.put(member, str(error))

        await asyncio.gather(*(drop(close.members[peer]) for peer in plan.drops))
        for peer in plan.drops:
            self._journal.record("dropped", peer=peer, stage=self._stage, microbatches=len(close.held[peer].held))

    async def _repair(self, plan: ClosePlan) -> None:
        if not plan.repairs:
            return
        credits = self._ledger.credits[self._stage]
        lost_by = {m: credits[m].peer if m in credits else None for m in plan.repairs}
        async with asyncio.TaskGroup() as tasks:
            for microbatch in plan.repairs:
                passage = self._ledger.passages[microbatch]
                tasks.create_task(self._pipeline.repair(passage, self._stage, self.attempt + 1))
        done_by = {m: credits[m].peer if m in credits else None for m in plan.repairs}
        for (lost, by), count in Counter((lost_by[m], done_by[m]) for m in plan.repairs).items():
            self._journal.record("repaired", peer=lost, stage=self._stage, by=by, microbatches=count)

    # --- reduce -------------------------------------------------------------------

    async def _reduce(self, close: Close) -> StageResult | None:
        """One attempt; None if nobody has the full weight, and then whoever is to blame is fenced."""
        total = self._ledger.tokens
        group = tuple(
            GroupMember(
                contact=close.members[peer].contact,
                microbatches=tuple(h.microbatch for h in close.held[peer].held),
                tokens=close.tokens(peer),
            )
            for peer in sorted(close.members)
        )
        seconds = transfer_deadline(self._limits, 2 * self._gradient_bytes, self._roster.patience.factor)
        request = ReduceRequest(
            key=self._key, attempt=self.attempt, members=group, total_tokens=total, deadline_seconds=seconds
        )
        replies = await asyncio.gather(*(self._reduce_one(m, request) for m in close.members.values()))
        answered = {p: r for p, r in zip(close.members, replies, strict=True) if r is not None}
        complete = {p: r.reduced for p, r in answered.items() if r.reduced is not None}
        if not complete:
            self._attempt_failed(close, answered)
            self._not_finite(close, {p for p, r in answered.items() if r is NOT_FINITE}, set(answered))
            return None
        result = self._agree(complete)
        donors = tuple(close.members[p].contact for p, mark in complete.items() if mark.digest == result.digest)
        await self._hand_over(close, complete, result, donors)
        return StageResult(
            commit=StageCommit(
                members=tuple(sorted(close.members)),
                attempt=self.attempt,
                digest=result.digest,
                squared_norm=result.squared_norm,
                samples=sum(h.samples for reply in close.held.values() for h in reply.held),
            ),
            donors=donors,
        )

    async def _reduce_one(self, member: Member, request: ReduceRequest) -> ReduceReply | None:
        try:
            seconds = request.deadline_seconds + self._limits.control_seconds
            reply = await self._calls.reduce(member.contact, request, seconds)
        except NotFinite:
            self._journal.record("gradient_not_finite", peer=member.peer, stage=self._stage)
            return NOT_FINITE
        except Retryable as error:
            self._roster.failed(member, error)
            return None
        except Refused as error:
            self._journal.record("reduce_refused", peer=member.peer, stage=self._stage, reason=str(error))
            return None
        self._roster.answered(member)
        return reply

    def _attempt_failed(self, close: Close, answered: dict[PeerId, ReduceReply]) -> None:
        silent = frozenset(close.members) - frozenset(answered)
        missed = {p: frozenset(r.unreachable) & frozenset(close.members) for p, r in answered.items()}
        weights = {p: close.tokens(p) for p in close.members}
        out, reason = sits_out(missed, silent, weights, self.attempt)
        detail = "; ".join(sorted(f"{short(p)}: {r.reason}" for p, r in answered.items() if r.reason))
        self._journal.record(
            "attempt_failed", stage=self._stage, attempt=self.attempt, left_out=len(out), reason=f"{reason} ({detail})"
        )
        for peer in sorted(out):
            self._fences.put(close.members[peer], reason)

    def _not_finite(self, close: Close, found: set[PeerId], answered: set[PeerId]) -> None:
        """Whoever has it drops what it holds.  If it is so at all of them, twice, the run itself diverges."""
        for peer in sorted(found):
            self._fences.put(close.members[peer], "its gradient is not finite")
            if found < answered:
                self._roster.doubt(close.members[peer], "its gradient is not finite where others' are")
        self._overflows += bool(found) and found == answered
        if self._overflows >= 2:
            raise RunFailed(
                f"stage {self._stage}: the gradient of step {self._key.step} is not finite, though each microbatch's is"
            )

    def _agree(self, complete: dict[PeerId, ReducedMark]) -> ReducedMark:
        """The result that most members have; the others differ by numeric class and take it over."""
        votes: Counter[Digest] = Counter(mark.digest for mark in complete.values())
        digest = max(votes, key=lambda d: (votes[d], d))
        return next(mark for mark in complete.values() if mark.digest == digest)

    async def _hand_over(
        self, close: Close, complete: dict[PeerId, ReducedMark], result: ReducedMark, donors: tuple[Contact, ...]
    ) -> None:
        """Give the result to members without it.  Who fails here gets another chance at the apply."""
        request = AdoptRequest(key=self._key, attempt=self.attempt, digest=result.digest, donors=donors)
        seconds = transfer_deadline(self._limits, self._gradient_bytes, self._roster.patience.factor)

        async def adopt(member: Member) -> None:
            try:
                await self._calls.adopt(member.contact, request, seconds)
            except Retryable as error:
                self._roster.failed(member, error)
            except Refused:
                self._roster.unready(member)

        lacking = [
            m for p, m in close.members.items() if _digest(complete.get(p)) != result.digest and not m.health.suspected
        ]
        await asyncio.gather(*(adopt(m) for m in lacking))


def _digest(mark: ReducedMark | None) -> Digest | None:
    """Norms of the same bits may differ by the order in which they were summed."""
    return None if mark is None else mark.digest
