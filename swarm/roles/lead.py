"""The lead commits what all stages have reduced, and brings along whoever is one commit behind."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from swarm.config import RunConfig
from swarm.errors import Refused, Retryable, StaleTerm, Superseded
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

    async def apply(
        self, commit: CommitRecord, parent: Lineage, donors: Sequence[tuple[Contact, ...]]
    ) -> list[dict[PeerId, StateMark]]:
        """Have every reachable peer at ``parent`` apply ``commit``; what each says its parameters are then."""
        self._last = (commit, parent, list(donors))
        self._roster.lineage = parent.after(commit)
        marks = await asyncio.gather(*(self._apply_stage(stage) for stage in range(len(donors))))
        for stage, found in enumerate(marks):
            for peer, reason in diverged(found).items():
                member = self._roster.stages[stage].get(peer)
                if member is not None:
                    self._roster.distrust(member, reason)
        return marks

    async def help_behind(self) -> None:
        """Until cancelled: send the last commit to peers that are exactly one behind (late, or just joined)."""
        while True:
            if self._last is not None:
                await asyncio.gather(*(self._apply_stage(stage) for stage in range(len(self._last[2]))))
            await self._roster.changed(5.0)

    async def _apply_stage(self, stage: int) -> dict[PeerId, StateMark]:
        if self._last is None:
            return {}
        commit, parent, donors = self._last
        behind = [
            m
            for m in self._roster.stages[stage].values()
            if m.lineage == parent
            and m.state is PeerState.READY
            and not m.health.suspected
            and m.peer not in self._applying
        ]
        marks = await asyncio.gather(*(self._apply_one(m, commit, parent, donors[stage]) for m in behind))
        return {m.peer: mark for m, mark in zip(behind, marks, strict=True) if mark is not None}

    async def _apply_one(
        self, member: Member, commit: CommitRecord, parent: Lineage, donors: tuple[Contact, ...]
    ) -> StateMark | None:
        key = StepKey(run=self._config.hash, stage=member.stage, term=self._term, lineage=parent)
        request = ApplyRequest(key=key, commit=commit, donors=donors)
        nbytes = 4 * stage_parameters(self._config.model, member.stage)
        seconds = transfer_deadline(self._limits, nbytes, self._roster.patience.factor)
        self._applying.add(member.peer)
        try:
            mark = await self._calls.apply(member.contact, request, seconds)
        except StaleTerm as error:
            raise Superseded(f"another trainer leads this run: {error}") from None
        except Retryable as error:
            self._roster.failed(member, error)
            return None
        except Refused as error:
            self._journal.record("apply_refused", peer=member.peer, stage=member.stage, reason=str(error))
            self._roster.unready(member)
            return None
        finally:
            self._applying.discard(member.peer)
        member.lineage = mark.lineage
        member.greeted = mark.lineage
        self._roster.answered(member)
        return mark
