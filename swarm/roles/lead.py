"""The lead commits what all stages have reduced, and brings along whoever is one commit behind."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from swarm.config import RunConfig
from swarm.errors import Refused, Retryable
from swarm.ids import PeerId
from swarm.messages import ApplyRequest, Contact, StateMark, StepKey
from swarm.policy.deadlines import Limits, transfer_deadline
from swarm.policy.divergence import diverged
from swarm.policy.schedule import clip_factor
from swarm.policy.sizes import stage_parameters
from swarm.ports import Journal, StageCalls
from swarm.records import CommitRecord, Lineage, PeerState, Term
from swarm.roles.closing import StageResult
from swarm.roles.ledger import Ledger
from swarm.roles.roster import Member, Roster

DIGEST_EVERY = 10
"""Steps between two comparisons of digests of all parameters; their norms are compared at every step."""


class Lead:
    """Decides commits under one term."""

    def __init__(
        self, *, config: RunConfig, term: Term, roster: Roster, calls: StageCalls, journal: Journal, limits: Limits
    ) -> None:
        self._config = config
        self._term = term
        self._roster = roster
        self._calls = calls
        self._journal = journal
        self._limits = limits
        self._last: tuple[CommitRecord, Lineage, list[tuple[Contact, ...]]] | None = None
        self._applying: set[PeerId] = set()

    def decide(self, lineage: Lineage, ledger: Ledger, results: Sequence[StageResult]) -> CommitRecord:
        """The commit of a step that every stage has reduced."""
        ids = sorted(ledger.expected)
        squared_norm = sum(result.commit.squared_norm for result in results)
        losses = [ledger.passages[m].loss for m in ids]
        return CommitRecord(
            step=lineage.length,
            term=self._term,
            parent=lineage.chain,
            stages=tuple(result.commit for result in results),
            microbatches=tuple(ids),
            excluded=tuple(sorted(ledger.excluded)),
            tokens=tuple(ledger.passages[m].tokens for m in ids),
            losses=tuple(math.nan if loss is None else loss for loss in losses),
            clip_factor=clip_factor(self._config.optimizer, squared_norm),
        )

    async def commit(self, commit: CommitRecord, parent: Lineage, donors: Sequence[tuple[Contact, ...]]) -> None:
        """Have every reachable peer at ``parent`` apply ``commit``; replicas that differ then must fetch state."""
        self.adopt(commit, parent, donors)
        digest = (commit.step + 1) % DIGEST_EVERY == 0
        self._compare(await asyncio.gather(*(self._apply_stage(s, digest) for s in range(len(donors)))))

    def adopt(self, commit: CommitRecord, parent: Lineage, donors: Sequence[tuple[Contact, ...]]) -> None:
        """Take ``commit`` for the run's last: whoever is at ``parent`` is sent it, and may fetch from ``donors``."""
        self._last = (commit, parent, list(donors))
        self._roster.lineage = parent.after(commit)

    async def final_marks(self) -> list[dict[PeerId, StateMark]]:
        """By stage: norm and digest of the parameters of every peer that applied the last commit."""
        if self._last is None:
            return []
        marks = await asyncio.gather(*(self._mark_stage(stage) for stage in range(len(self._last[2]))))
        self._compare(marks)
        return marks

    def _compare(self, marks: Sequence[dict[PeerId, StateMark]]) -> None:
        for stage, found in enumerate(marks):
            for peer, reason in diverged(found).items():
                member = self._roster.stages[stage].get(peer)
                if member is not None:
                    self._roster.distrust(member, reason)

    async def help_behind(self) -> None:
        """Until cancelled: send the last commit to peers that are exactly one behind (late, or just joined)."""
        while True:
            if self._last is not None:
                await asyncio.gather(*(self._apply_stage(stage, False) for stage in range(len(self._last[2]))))
            await self._roster.changed(5.0)

    async def _apply_stage(self, stage: int, digest: bool) -> dict[PeerId, StateMark]:
        """Whoever is ready at the commit's parent applies it."""
        if self._last is None:
            return {}
        parent = self._last[1]
        ready = [m for m in self._roster.reachable(stage) if m.lineage == parent and m.state is PeerState.READY]
        return await self._apply_at([m for m in ready if m.peer not in self._applying], digest)

    async def _mark_stage(self, stage: int) -> dict[PeerId, StateMark]:
        """Whoever has applied the commit is asked again, which changes nothing."""
        return await self._apply_at(self._roster.eligible(stage), True)

    async def _apply_at(self, members: Sequence[Member], digest: bool) -> dict[PeerId, StateMark]:
        marks = await asyncio.gather(*(self._apply_one(m, digest) for m in members))
        return {m.peer: mark for m, mark in zip(members, marks, strict=True) if mark is not None}

    async def _apply_one(self, member: Member, digest: bool) -> StateMark | None:
        if self._last is None:
            return None
        commit, parent, donors = self._last
        key = StepKey(run=self._config.hash, stage=member.stage, term=self._term, lineage=parent)
        request = ApplyRequest(key=key, commit=commit, donors=donors[member.stage], digest=digest)
        nbytes = 4 * stage_parameters(self._config.model, member.stage)
        seconds = transfer_deadline(self._limits, nbytes, self._roster.patience.factor)
        self._applying.add(member.peer)
        try:
            mark = await self._calls.apply(member.contact, request, seconds)
        except Retryable as error:
            self._roster.failed(member, error)
            return None
        except Refused as error:
            self._journal.record("apply_refused", peer=member.peer, stage=member.stage, reason=str(error))
            self._roster.unready(member)
            return None
        finally:
            self._applying.discard(member.peer)
        self._roster.place(member, mark.lineage)
        member.greeted = mark.lineage
        self._roster.answered(member)
        return mark
