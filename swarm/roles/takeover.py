"""How a trainer becomes the lead: raise the term everywhere, read what peers hold, complete what was committed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from swarm.config import RunConfig
from swarm.errors import StateLost, Superseded
from swarm.ids import PeerId, SessionId
from swarm.messages import PeerReport
from swarm.ports import Clock, CommitLog, Directory, Journal
from swarm.records import CommitRecord, LeadRecord, Lineage, PeerState, Term
from swarm.roles.lead import Lead
from swarm.roles.roster import Roster

LEASE_RENEW_SECONDS = 3.0
LEASE_WATCH_SECONDS = 2.5 * LEASE_RENEW_SECONDS
"""How long another trainer's lease is watched: if its counter stands still on this process's own clock, it is dead."""
POLL_SECONDS = 0.5
EMPTY_SECONDS = 2.0
"""Peers get so long to appear before it is said that there are none."""


class Lease:
    """The lead's record on the DHT: a hint to others, and what a newcomer reads the term from."""

    def __init__(
        self, *, config: RunConfig, trainer: PeerId, session: SessionId, directory: Directory, clock: Clock
    ) -> None:
        self._run = config.hash
        self._config = config
        self._trainer = trainer
        self._session = session
        self._directory = directory
        self._clock = clock
        self._counter = 0

    async def predecessor(self) -> LeadRecord | None:
        """The lease of whoever led last, if it is still there.  Raises Superseded if another trainer renews it."""
        seen = await self._directory.lead(self._run)
        if seen is None:
            return None
        if seen.trainer != self._trainer:
            deadline = self._clock.now() + LEASE_WATCH_SECONDS
            while self._clock.now() < deadline:
                await self._clock.sleep(POLL_SECONDS)
                now = await self._directory.lead(self._run)
                if now is not None and (now.session, now.counter) != (seen.session, seen.counter):
                    raise Superseded(
                        f"trainer {now.trainer} leads run '{self._config.run.name}' (term {now.term.number}); stop it "
                        "first, or start this one under another run name"
                    )
        return seen

    async def renew(self, term: Term, lineage: Lineage) -> None:
        """Publish the lease once."""
        self._counter += 1
        await self._directory.renew_lead(
            LeadRecord(
                trainer=self._trainer,
                session=self._session,
                run=self._run,
                term=term,
                counter=self._counter,
                lineage=lineage,
            )
        )


class Takeover:
    """Finds the lineage to go on from, and brings one peer of every stage to it."""

    def __init__(
        self,
        *,
        config: RunConfig,
        trainer: PeerId,
        roster: Roster,
        log: CommitLog,
        clock: Clock,
        journal: Journal,
        state_timeout_seconds: float,
        predecessor: LeadRecord | None,
        first_peers: Sequence[int] | None = None,
    ) -> None:
        logged = log.read()
        self._config = config
        self._trainer = trainer
        self._roster = roster
        self._logged = logged
        self._last_term = max(
            [c.term.number for c in logged] + ([predecessor.term.number] if predecessor else []) + [0]
        )
        self._first_peers = first_peers
        """Peers of each stage to wait for before the very first step."""
        self._committed = max(logged[-1].step + 1 if logged else 0, predecessor.lineage.length if predecessor else 0)
        """Steps that are known to be committed, whatever the peers that are found say."""
        self._clock = clock
        self._journal = journal
        self._state_timeout_seconds = state_timeout_seconds

    async def raise_term(self) -> tuple[Term, list[PeerReport]]:
        """A term that every reachable peer follows, and what they hold, once each stage has an answer.

        The first one that nobody refuses may be one that peers follow already, on the word of an earlier life of this
        trainer: so the next one is taken.  Whoever missed the first greeting also hears the second.
        Raises StateLost if a stage has no peer for the state time-out although steps were committed.
        """
        number = self._last_term + 1
        raised = False
        told: set[int] = set()
        began = self._clock.now()
        while True:
            self._roster.term = Term(number, self._trainer)
            try:
                await self._roster.refresh()
                reports = await self._greet_all()
            except Superseded as error:
                number = max(number, error.followed) + 1  # the lease was lost or old; peers know better
                await self._clock.sleep(POLL_SECONDS)
                continue
            missing = self._missing(reports)
            if not missing and raised:
                return self._roster.term, reports
            if not missing:
                raised, number = True, number + 1
                continue
            waited = self._clock.now() - began
            if waited >= EMPTY_SECONDS:
                for stage in sorted(missing - told):
                    self._journal.record("stage_empty", stage=stage)
                told |= missing
            if self._committed and waited > self._state_timeout_seconds:
                raise StateLost(
                    f"stage {min(missing)} has had no peer for {waited:.0f} s: the state after "
                    f"step {self._committed - 1} of run '{self._config.run.name}' is held by nobody that can be reached"
                )
            await self._clock.sleep(POLL_SECONDS)

    def _missing(self, reports: list[PeerReport]) -> set[int]:
        """Stages that have too few peers to begin; once anything is committed one is enough."""
        counts = Counter(report.stage for report in reports)
        fresh = not self._committed and not any(report.lineage.length for report in reports)
        return {
            stage
            for stage in range(len(self._roster.stages))
            if counts[stage] < (self._first_peers[stage] if fresh and self._first_peers else 1)
        }

    async def _greet_all(self) -> list[PeerReport]:
        members = [m for stage in self._roster.stages for m in stage.values() if self._roster.may_greet(m)]
        reports = await asyncio.gather(*(self._roster.greet(m) for m in members))
        return [report for report in reports if report is not None]

    async def settle(self, lead: Lead, reports: list[PeerReport]) -> tuple[Lineage, list[CommitRecord]]:
        """The lineage that the run goes on from and all commits known of it.

        If any peer has applied a step, that commit is completed at the others.  Raises StateLost if a committed
        state is not brought together again within the state time-out.
        """
        deadline = self._clock.now() + self._state_timeout_seconds
        while True:
            best = max((report.lineage for report in reports), key=lambda lineage: lineage.rank())
            if self._logged and self._logged[-1].parent == best.chain:
                best = best.after(self._logged[-1])  # decided, noted, and applied by nobody yet: it still can be
            history = self._history(best, reports)
            current = best.length >= self._committed and not self._contradicts(best)
            if history and current:
                await self._complete(lead, best, history[-1])
            self._roster.lineage = best
            await self._greet_all()
            empty = self._roster.empty_stages()
            if not empty and current:
                return best, history
            step = max(best.length, self._committed)
            if step and self._clock.now() > deadline:
                stage = empty[0] if empty else min(r.stage for r in reports)
                raise StateLost(
                    f"stage {stage}: no peer holds the state after step {step - 1} of run '{self._config.run.name}' "
                    f"(best found: {best.length} of {step} committed steps)"
                )
            self._roster.lineage = None
            await self._clock.sleep(POLL_SECONDS)
            await self._roster.refresh()
            reports = await self._greet_all() or reports

    async def _complete(self, lead: Lead, best: Lineage, last: CommitRecord) -> None:
        """Apply the last commit at whoever is one behind; whoever applied it may still keep its gradient."""
        parent = Lineage(generation=best.generation, length=last.step, chain=last.parent)
        if parent.after(last) != best:
            return
        donors = [
            tuple(m.contact for m in stage.values() if m.lineage in (best, parent) and m.state is PeerState.READY)
            for stage in self._roster.stages
        ]
        await lead.commit(last, parent, donors)

    def _contradicts(self, best: Lineage) -> bool:
        """These parameters are as old as the log, and made by other commits than it knows of."""
        if not self._logged or self._logged[-1].step + 1 != best.length:
            return False
        last = self._logged[-1]
        return Lineage(generation=best.generation, length=last.step, chain=last.parent).after(last) != best

    def _history(self, best: Lineage, reports: list[PeerReport]) -> list[CommitRecord]:
        """Commits in order of step: the log's, and after them what peers still know."""
        known = {commit.step: commit for commit in self._logged}
        for report in reports:
            if report.lineage == best:
                known.update({commit.step: commit for commit in report.commits})
        return [known[step] for step in sorted(known) if step < best.length]
