"""The life of a microbatch: forward through one peer of every stage, backward the same way, retries and voids.

SWARM, section 3.2: any peer of a stage can redo a forward, or by recomputing a backward, because the trainer holds
every stage's input.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from swarm.errors import (
    BadReply,
    BadRequest,
    Busy,
    Draining,
    Frozen,
    NeedsInput,
    NotFinite,
    Refused,
    Retryable,
    RunFailed,
    Stale,
    TimedOut,
    WrongRun,
)
from swarm.ids import MicrobatchId, PeerId, RunHash
from swarm.messages import (
    BackwardReply,
    BackwardRequest,
    ForwardRequest,
    MicrobatchCall,
    StepKey,
    VoidRequest,
)
from swarm.policy.deadlines import Limits, call_deadline
from swarm.policy.routing import BACKWARD_UNITS, FORWARD_UNITS
from swarm.ports import Clock, Journal, StageCalls
from swarm.records import Lineage, Term
from swarm.roles.answers import Answers, Boundary
from swarm.roles.fences import Fences
from swarm.roles.ledger import Counts, Ledger, Passage
from swarm.roles.roster import Member, Roster
from swarm.tensors import TensorData

T = TypeVar("T")

VOID_SECONDS = 2.0
"""A void is advice: the close decides, so nobody waits long for its answer."""
FROZEN_SECONDS = 0.2
"""A peer that has closed what is sent to it is left alone for so long."""
MALFORMED_LIMIT = 3
"""Peers that may call one microbatch malformed before the run is given up: then the fault is ours."""


class Excluded(Exception):
    """The microbatch was not finite at two peers: it is left out of the step."""


class Pipeline:
    """Carries the microbatches of one step."""

    def __init__(
        self,
        *,
        run: RunHash,
        term: Term,
        lineage: Lineage,
        ledger: Ledger,
        roster: Roster,
        fences: Fences,
        calls: StageCalls,
        clock: Clock,
        journal: Journal,
        limits: Limits,
        counts: Counts,
        boundary: Boundary,
    ) -> None:
        self._run = run
        self._answers = Answers(len(roster.stages), boundary)
        self._term = term
        self._lineage = lineage
        self._ledger = ledger
        self._roster = roster
        self._fences = fences
        self._calls = calls
        self._clock = clock
        self._journal = journal
        self._limits = limits
        self._counts = counts
        self._last_stage = len(roster.stages) - 1

    def key(self, stage: int) -> StepKey:
        """The head of all messages to a stage in this step."""
        return StepKey(run=self._run, stage=stage, term=self._term, lineage=self._lineage)

    async def train(self, passage: Passage) -> None:
        """Get the microbatch into every stage's gradient, or exclude it."""
        self._counts.sent += 1
        try:
            for stage in range(self._last_stage):
                passage.inputs[stage + 1] = await self._forward(passage, stage)
            for stage in range(self._last_stage, -1, -1):
                gradient = await self._backward(passage, stage)
                if stage:
                    if gradient is None:
                        raise RunFailed(f"stage {stage} returned no gradient of its input")
                    passage.seeds[stage - 1] = gradient
        except Excluded:
            self._exclude(passage.microbatch)
        else:
            self._counts.completed += 1

    async def repair(self, passage: Passage, stage: int, attempt: int | None = None) -> None:
        """Add the microbatch at one stage that lost it, in an attempt at the close or (None) before it.

        May exclude it instead.
        """
        self._counts.repaired += 1
        try:
            await self._backward(passage, stage, attempt=attempt)
        except Excluded:
            self._exclude(passage.microbatch)

    def _exclude(self, microbatch: MicrobatchId) -> None:
        if microbatch in self._ledger.excluded:
            return  # by another stage, at the same time
        self._ledger.excluded.add(microbatch)
        self._counts.excluded += 1
        self._journal.record("excluded", step=self._lineage.length, microbatch=microbatch)

    # --- forward ------------------------------------------------------------------

    async def _forward(self, passage: Passage, stage: int) -> TensorData:
        avoid: set[PeerId] = set(passage.not_finite.get(stage, ()))
        while True:
            member = await self._pick(stage, FORWARD_UNITS + BACKWARD_UNITS, passage, avoid)
            self._ledger.placed[stage].add(passage.microbatch)
            member.lane.sent(BACKWARD_UNITS)  # what this forward will cause, given up if the backward goes elsewhere
            try:
                output = await self._forward_at(member, passage, stage)
            except NotFinite as error:
                member.lane.given_up(BACKWARD_UNITS)
                await self._not_finite(passage, stage, member, error, avoid)
            except (Retryable, Refused) as error:
                member.lane.given_up(BACKWARD_UNITS)
                self._retried(passage, stage, member, error, avoid)
            else:
                self._blame(passage, stage, member)
                passage.producers[stage] = member.peer
                return output

    async def _forward_at(self, member: Member, passage: Passage, stage: int) -> TensorData:
        async def send(seconds: float) -> TensorData:
            call = self._head(passage, stage, 0, 0, seconds)
            output = await self._calls.forward(member.contact, ForwardRequest(call=call, inputs=passage.inputs[stage]))
            self._answers.check_output(passage, output)
            return output

        return await self._call(member, FORWARD_UNITS, send)

    # --- backward -----------------------------------------------------------------

    async def _backward(self, passage: Passage, stage: int, attempt: int | None = None) -> TensorData | None:
        """Accumulate at exactly one peer, as far as can be known here; returns the gradient of the input."""
        avoid: set[PeerId] = set(passage.not_finite.get(stage, ()))
        member = self._producer(passage, stage)
        while True:
            has_graph = member is not None
            if member is None:
                member = await self._pick(stage, self._units(stage), passage, avoid)
                self._ledger.placed[stage].add(passage.microbatch)
            try_number = passage.next_try(stage)
            sent_in = self._ledger.attempts[stage] if attempt is None else attempt
            try:
                reply = await self._backward_at(member, passage, stage, try_number, sent_in, has_graph, accumulate=True)
            except NotFinite as error:
                await self._not_finite(passage, stage, member, error, avoid)
            except Retryable as error:
                self._retried(passage, stage, member, error, avoid)
                if await self._void(member, passage, stage, try_number + 1):
                    self._ledger.credit(stage, passage.microbatch, member.contact)
                    return await self._recompute(passage, stage, avoid)
            except Refused as error:
                self._retried(passage, stage, member, error, avoid)
            else:
                self._blame(passage, stage, member)
                self._ledger.credit(stage, passage.microbatch, member.contact)
                member.credited += 1
                return self._note(passage, reply)
            member = None

    async def _recompute(self, passage: Passage, stage: int, avoid: set[PeerId]) -> TensorData | None:
        """The gradient of the input (and the loss) again, anywhere, adding nothing."""
        has_gradient = stage == 0 or stage - 1 in passage.seeds
        if has_gradient and (stage < self._last_stage or passage.loss is not None):
            return passage.seeds.get(stage - 1)  # from the time before the repair
        while True:
            member = await self._pick(stage, self._units(stage), passage, avoid)
            try:
                reply = await self._backward_at(member, passage, stage, 0, 0, False, accumulate=False)
            except NotFinite as error:
                await self._not_finite(passage, stage, member, error, avoid)
            except (Retryable, Refused) as error:
                self._retried(passage, stage, member, error, avoid)
            else:
                return self._note(passage, reply)

    async def _backward_at(
        self,
        member: Member,
        passage: Passage,
        stage: int,
        try_number: int,
        attempt: int,
        has_graph: bool,
        *,
        accumulate: bool,
    ) -> BackwardReply:
        """One peer, one try; the input travels only if the peer no longer has the graph."""

        async def send(seconds: float, with_input: bool) -> BackwardReply:
            reply = await self._calls.backward(
                member.contact,
                BackwardRequest(
                    call=self._head(passage, stage, try_number, attempt, seconds),
                    inputs=passage.inputs[stage] if with_input else None,
                    seed=passage.seeds[stage],
                    tokens=passage.tokens,
                    accumulate=accumulate,
                ),
            )
            self._answers.check_reply(passage, stage, reply, accumulate)
            return reply

        units = self._units(stage)
        if has_graph:
            member.lane.given_up(BACKWARD_UNITS)  # reserved by the forward; counted as a call from here on
            try:
                return await self._call(member, units, lambda seconds: send(seconds, False))
            except NeedsInput:
                pass  # evicted: the same try goes again, with the input
        return await self._call(member, units, lambda seconds: send(seconds, True))

    async def _void(self, member: Member, passage: Passage, stage: int, below_try: int) -> bool:
        """True if the peer holds the microbatch after all; False if it never will, or cannot say."""
        request = VoidRequest(key=self.key(stage), microbatch=passage.microbatch, below_try=below_try)
        try:
            reply = await self._calls.void(member.contact, request, VOID_SECONDS)
        except (Retryable, Refused):
            return False  # it may hold it all the same: then the close finds two holders, and one drops
        self._counts.voided += 1
        self._journal.record("voided", peer=member.peer, stage=stage, microbatch=passage.microbatch)
        return reply.held

    # --- one call -----------------------------------------------------------------

    async def _pick(self, stage: int, units: float, passage: Passage, avoid: Iterable[PeerId]) -> Member:
        """Wait until a peer can take work."""
        seed = f"{self._lineage.length}/{passage.microbatch}"
        while True:
            member = self._roster.pick(
                stage,
                units,
                seed,
                avoid=avoid,
                barred=self._ledger.fenced[stage].keys(),
                waiting_units=(FORWARD_UNITS + BACKWARD_UNITS) * self._ledger.unplaced(stage),
            )
            if member is not None:
                return member
            now = self._clock.now()
            busy = [m.busy_until - now for m in self._roster.eligible(stage)]
            await self._fences.lift(stage)
            await self._roster.changed(max(0.01, min([1.0, *(b for b in busy if b > 0)])))

    async def _call(self, member: Member, units: float, call: Callable[[float], Awaitable[T]]) -> T:
        """Call, and let the peer's standing and speed learn from the outcome."""
        lane = member.lane
        lane.sent(units)
        patience = max(self._roster.patience.factor, lane.leniency)
        seconds = call_deadline(self._limits, lane.answer_expected_seconds(), lane.answers > 0, patience)
        sent_at = self._clock.now()
        try:
            answer = await call(seconds)
        except Busy as error:
            lane.given_up(units)
            member.busy_until = self._clock.now() + error.retry_after_seconds
            raise
        except (Stale, Draining, WrongRun):
            lane.given_up(units)
            self._roster.unready(member)
            raise
        except Frozen:
            lane.given_up(units)
            member.busy_until = self._clock.now() + FROZEN_SECONDS
            raise
        except BadRequest as error:
            lane.given_up(units)
            self._roster.failed(member, BadReply(str(error)), rubbish=True)
            raise
        except (NotFinite, Refused):
            lane.given_up(units)
            raise
        except TimedOut as error:
            lane.timed_out(units, sent_at, self._clock.now())
            self._roster.failed(member, error)
            raise
        except Retryable as error:
            lane.given_up(units)
            self._roster.failed(member, error, rubbish=isinstance(error, BadReply))
            raise
        lane.answered(units, sent_at, self._clock.now())
        self._roster.answered(member)
        return answer

    def _retried(
        self, passage: Passage, stage: int, member: Member, error: Retryable | Refused, avoid: set[PeerId]
    ) -> None:
        """Count and remember; a microbatch that several peers call malformed is our own fault."""
        if isinstance(error, Busy):
            return
        self._counts.retried += 1
        avoid.add(member.peer)
        self._journal.record("retried", peer=member.peer, stage=stage, microbatch=passage.microbatch, reason=str(error))
        if isinstance(error, BadRequest):
            passage.malformed += 1
            if passage.malformed >= MALFORMED_LIMIT:
                raise RunFailed(f"peers of stage {stage} refuse microbatch {passage.microbatch}: {error}")

    # --- not finite -----------------------------------------------------------------

    async def _not_finite(
        self, passage: Passage, stage: int, member: Member, error: NotFinite, avoid: set[PeerId]
    ) -> None:
        """Count who saw it; raises Excluded at the second peer (or the second time at a stage's only one).

        Whoever else was to be avoided may be asked again: what counts now is another peer's word.
        """
        avoid.clear()
        avoid.add(member.peer)
        avoid.update(passage.not_finite.get(stage, ()))
        blamed = member.peer
        if error.where == "input" and stage > 0:
            stage -= 1
            blamed = passage.producers.get(stage, blamed)
        seen = passage.not_finite.setdefault(stage, [])
        seen.append(blamed)
        self._journal.record("not_finite", peer=blamed, stage=stage, microbatch=passage.microbatch, where=error.where)
        if len(set(seen)) >= 2 or (len(seen) >= 2 and not await self._has_another(stage, blamed)):
            raise Excluded
        if error.where == "input":
            passage.inputs[stage + 1] = await self._forward(passage, stage)

    async def _has_another(self, stage: int, peer: PeerId) -> bool:
        """Another peer of the stage could be asked (of the fenced ones, whoever can be let in again)."""
        await self._fences.lift(stage)
        fenced = self._ledger.fenced[stage]
        return any(m.peer != peer and m.peer not in fenced for m in self._roster.eligible(stage))

    def _blame(self, passage: Passage, stage: int, member: Member) -> None:
        """It is finite here, so whoever said otherwise of this microbatch is at fault."""
        for peer in passage.not_finite.pop(stage, []):
            culprit = self._roster.stages[stage].get(peer)
            if peer != member.peer and culprit is not None:
                self._roster.doubt(culprit, "computed NaN or infinity where another peer did not")

    # --- small things -----------------------------------------------------------------

    def _units(self, stage: int) -> float:
        return BACKWARD_UNITS + (FORWARD_UNITS if stage == self._last_stage else 0.0)

    def _producer(self, passage: Passage, stage: int) -> Member | None:
        """The peer that ran the forward, if it can still be asked."""
        member = self._roster.stages[stage].get(passage.producers.get(stage, PeerId("")))
        if member is None:
            return None
        if member.peer not in self._ledger.fenced[stage] and self._roster.is_eligible(member):
            return member
        member.lane.given_up(BACKWARD_UNITS)  # the backward that its forward reserved goes elsewhere
        return None

    def _head(self, passage: Passage, stage: int, try_number: int, attempt: int, seconds: float) -> MicrobatchCall:
        return MicrobatchCall(
            key=self.key(stage),
            microbatch=passage.microbatch,
            try_number=try_number,
            attempt=attempt,
            deadline_seconds=seconds,
        )

    @staticmethod
    def _note(passage: Passage, reply: BackwardReply) -> TensorData | None:
        if reply.loss is not None:
            passage.loss = reply.loss
        return reply.input_gradient
