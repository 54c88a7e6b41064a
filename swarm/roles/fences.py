"""Peers that did not answer a close: they may hold anything, so they take no part until they have dropped it."""

from __future__ import annotations

from swarm.errors import Refused, Retryable
from swarm.ids import PeerId, RunHash
from swarm.messages import Contact, DropRequest, StepKey
from swarm.policy.deadlines import Limits
from swarm.ports import Journal, StageCalls
from swarm.records import Lineage, Term
from swarm.roles.ledger import Ledger, Passage
from swarm.roles.roster import Member, Roster


class Fences:
    """Fences of one step.  A fenced life of a peer comes back with weight 0, or not at all."""

    def __init__(
        self,
        *,
        run: RunHash,
        term: Term,
        lineage: Lineage,
        ledger: Ledger,
        roster: Roster,
        calls: StageCalls,
        journal: Journal,
        limits: Limits,
    ) -> None:
        self._run = run
        self._term = term
        self._lineage = lineage
        self._ledger = ledger
        self._roster = roster
        self._calls = calls
        self._journal = journal
        self._limits = limits
        self._lifting: set[tuple[int, PeerId]] = set()

    def put(self, member: Member, reason: str) -> None:
        """Fence this life of the peer."""
        self._put(member.stage, member.contact, reason)

    def holds(self, member: Member) -> bool:
        """This life of the peer is fenced."""
        return self._ledger.fenced[member.stage].get(member.peer) == member.contact.session

    def take_lost(self) -> list[tuple[Contact, int, list[Passage]]]:
        """Peers that are gone, their stage, and what they held; they are no longer credited with it.

        One that is unknown now is fenced.  Where a new life has taken its place, nobody calls the old one any more.
        """
        lost = []
        for stage, credits in enumerate(self._ledger.credits):
            members = self._roster.stages[stage]
            for holder in list(dict.fromkeys(credits.values())):
                member = members.get(holder.peer)
                if member is not None and member.contact.session == holder.session:
                    continue
                if member is None:
                    self._put(stage, holder, "gone")
                    self._ledger.attempts[stage] += 1  # should it come back, what was sent to it before is over
                passages = [self._ledger.passages[m] for m, by in credits.items() if by == holder]
                for passage in passages:
                    del credits[passage.microbatch]
                lost.append((holder, stage, passages))
        return lost

    async def lift(self, stage: int) -> None:
        """Let back in whoever is reachable again and drops what it held, or is a new life that holds nothing."""
        for peer in list(self._ledger.fenced[stage]):
            member = self._roster.stages[stage].get(peer)
            # One at a time: a second drop might meet what the peer has added since the first.
            if member is None or member.health.suspected or (stage, peer) in self._lifting:
                continue
            self._lifting.add((stage, peer))
            try:
                if not self.holds(member) or await self._dropped(member):
                    self._ledger.fenced[stage].pop(peer, None)
                    self._roster.notify()
            finally:
                self._lifting.discard((stage, peer))

    def _put(self, stage: int, life: Contact, reason: str) -> None:
        self._ledger.fenced[stage][life.peer] = life.session
        self._journal.record("fenced", peer=life.peer, stage=stage, reason=reason)

    async def _dropped(self, member: Member) -> bool:
        key = StepKey(run=self._run, stage=member.stage, term=self._term, lineage=self._lineage)
        request = DropRequest(key=key, attempt=self._ledger.over(member.stage))
        try:
            await self._calls.drop(member.contact, request, self._limits.control_seconds)
        except Retryable as error:
            self._roster.failed(member, error)
            return False
        except Refused:
            self._roster.unready(member)
            return False
        return True
