"""The peers a trainer knows: what they hold, how they stand, how fast they are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from swarm import PROTOCOL_VERSION
from swarm.config import RunConfig
from swarm.errors import Refused, Retryable, TimedOut
from swarm.ids import PeerId, SessionId
from swarm.messages import Contact, Greeting, PeerReport
from swarm.policy.deadlines import Limits, Patience
from swarm.policy.health import Health
from swarm.policy.routing import Lane, Routing, choose
from swarm.ports import Clock, Directory, Journal, StageCalls
from swarm.records import Lineage, PeerRecord, PeerState, Term

POLL_SECONDS = 1.0
"""Between two readings of the directory while the run goes on."""
JOINING_SECONDS = 0.2
"""Between two greetings of a peer that fetches state."""


@dataclass(slots=True, kw_only=True)
class Member:
    """One life of a peer as the trainer sees it."""

    contact: Contact
    stage: int
    lineage: Lineage
    state: PeerState
    numeric_class: str
    lane: Lane = field(default_factory=Lane)
    health: Health = field(default_factory=Health)
    busy_until: float = float("-inf")
    queue: int = 0
    credited: int = 0
    """Microbatches of the run that its stage owes to it; the screen shows the share."""
    distrusted: bool = False
    """It computed what others did not: told to fetch state when it is greeted next."""
    doubts: int = 0
    """How often it was found not to be what it said; tells an answer to a greeting that was overtaken."""
    greeted: Lineage | None = None
    """What its record said when it was greeted last."""
    told: Lineage | None = None
    """The run's lineage that it was told of last."""

    @property
    def peer(self) -> PeerId:
        return self.contact.peer

    def took(self, report: PeerReport) -> None:
        """The peer told what it holds."""
        self.state, self.queue = report.state, report.queue
        self.lane.start_from(report.forward_seconds)


class Roster:
    """All members by stage, kept current by :meth:`watch`; waits for changes by :meth:`changed`."""

    def __init__(
        self,
        *,
        config: RunConfig,
        calls: StageCalls,
        directory: Directory,
        clock: Clock,
        journal: Journal,
        limits: Limits,
        routing: Routing = choose,
    ) -> None:
        self.stages: list[dict[PeerId, Member]] = [{} for _ in range(config.model.stage_count)]
        self.patience = Patience()
        self.term: Term | None = None
        self.lineage: Lineage | None = None
        """The run's, once known; peers are told of it."""
        self._run = config.hash
        self._calls = calls
        self._directory = directory
        self._clock = clock
        self._journal = journal
        self._limits = limits
        self._routing = routing
        self._left_out: set[SessionId] = set()
        self._changed = asyncio.Event()
        self._wake = asyncio.Event()

    # --- what is known ------------------------------------------------------------

    def eligible(self, stage: int) -> list[Member]:
        """Peers of the stage that can take work on the run's lineage."""
        return [m for m in self.stages[stage].values() if self.is_eligible(m)]

    def is_eligible(self, member: Member) -> bool:
        """The peer can take work on the run's lineage."""
        # Mostly the same object (see place): this is asked of every peer of a stage for every microbatch.
        there = member.lineage is self.lineage or member.lineage == self.lineage
        return there and member.state is PeerState.READY and not member.health.suspected

    def place(self, member: Member, lineage: Lineage) -> None:
        """Note what a peer holds."""
        member.lineage = self.lineage if lineage == self.lineage and self.lineage is not None else lineage

    def reachable(self, stage: int) -> list[Member]:
        """Peers of the stage that answered last, whatever they hold."""
        return [m for m in self.stages[stage].values() if not m.health.suspected]

    def empty_stages(self) -> list[int]:
        """Stages without an eligible peer."""
        return [stage for stage in range(len(self.stages)) if not self.eligible(stage)]

    def pick(
        self,
        stage: int,
        units: float,
        seed: str,
        *,
        avoid: Iterable[PeerId],
        barred: Iterable[PeerId],
        waiting_units: float = 0.0,
    ) -> Member | None:
        """The peer that takes ``units`` of work; one in ``avoid`` only if there is no other, one in ``barred`` never.

        ``waiting_units`` as in :class:`swarm.policy.routing.Routing`.  None if there is none, or all are busy.
        """
        shunned, never = frozenset(avoid), frozenset(barred)
        now = self._clock.now()
        members = self.stages[stage]
        free = [
            (peer, member.lane)
            for peer, member in members.items()
            if member.busy_until <= now and peer not in never and self.is_eligible(member)
        ]
        preferred = ([item for item in free if item[0] not in shunned] or free) if shunned else free
        peer = self._routing(preferred, units, seed, waiting_units)
        return None if peer is None else members[peer]

    async def changed(self, timeout_seconds: float) -> None:
        """Return when anything changed, or after ``timeout_seconds``."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    # --- what is learned from calls ---------------------------------------------------

    def failed(self, member: Member, error: Retryable, *, rubbish: bool = False) -> None:
        """A call failed: the peer is left alone for a while, then greeted."""
        now = self._clock.now()
        if isinstance(error, TimedOut):
            self.patience.timeout(member.peer)
        first = not member.health.suspected
        if rubbish:
            member.health.misbehaved(now)
        else:
            member.health.failed(now)
        if first:
            self._journal.record("peer_suspected", peer=member.peer, stage=member.stage, reason=str(error))
        self.notify()

    def answered(self, member: Member) -> None:
        """A call was answered."""
        self.patience.success()
        member.health.succeeded(self._clock.now())

    def doubt(self, member: Member, reason: str) -> None:
        """The peer computed what another did not: left alone for a while from the second time on.

        Its parameters are not known to differ.  It keeps them: it may be the only one that has them.  What it was sent
        before it is left alone says nothing new.
        """
        if self._clock.now() < member.health.banned_until:
            return
        self._journal.record("peer_diverged", peer=member.peer, stage=member.stage, reason=reason)
        member.health.diverged(self._clock.now())
        self.notify()

    def distrust(self, member: Member, reason: str) -> None:
        """Its parameters differ from its group's: no work until it has fetched state; none for long if in vain."""
        if member.distrusted:
            return
        self._journal.record("peer_diverged", peer=member.peer, stage=member.stage, reason=reason)
        member.distrusted = True
        member.health.diverged(self._clock.now())
        self.unready(member)

    def unready(self, member: Member) -> None:
        """The peer refused as stale or draining: greeted again before it gets work."""
        member.state = PeerState.JOINING
        member.greeted = None
        member.doubts += 1
        self.notify()
        self._wake.set()

    def notify(self) -> None:
        """Wake whoever waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    # --- keeping current ------------------------------------------------------------

    async def watch(self) -> None:
        """Read the directory and greet, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_directory(), name="read the directory")
            tasks.create_task(self._watch_joining(), name="take newcomers in")

    async def _watch_joining(self) -> None:
        """Greet whoever fetches state until it has it: seen by the directory only, it would be behind again by then."""
        while True:
            await self._clock.sleep(JOINING_SECONDS)
            if self.empty_stages():
                continue  # nothing moves on meanwhile
            joining = [
                m
                for members in self.stages
                for m in members.values()
                if m.state is PeerState.JOINING and m.greeted is not None and not m.health.suspected
            ]
            await asyncio.gather(*(self.greet(m) for m in joining))
            if any(m.state is PeerState.READY for m in joining):
                self.notify()

    async def _watch_directory(self) -> None:
        while True:
            self._wake.clear()
            await self.refresh()
            # An idle trainer that waits for an empty stage need not look as often.
            gap = POLL_SECONDS if not self.empty_stages() else 1.5 * POLL_SECONDS
            try:
                async with asyncio.timeout(gap):
                    await self._wake.wait()
                await self._clock.sleep(0.1)
            except TimeoutError:
                continue

    async def refresh(self) -> None:
        """One reading of the directory; whoever is new, changed or due is greeted."""
        stages = range(len(self.stages))
        records = await asyncio.gather(*(self._directory.peers(self._run, stage) for stage in stages))
        for stage, found in zip(stages, records, strict=True):
            self._take_records(stage, found)
        if self.term is not None:
            due = [m for members in self.stages for m in members.values() if self._greet_due(m)]
            await asyncio.gather(*(self.greet(m) for m in due))
        self.notify()

    def _take_records(self, stage: int, records: list[PeerRecord]) -> None:
        members = self.stages[stage]
        for record in records:
            if record.protocol != PROTOCOL_VERSION:
                self._leave_out(record)
                continue
            known = members.get(record.peer)
            contact = Contact(peer=record.peer, session=record.session, endpoint=record.endpoint)
            if known is None or known.contact != contact:
                members[record.peer] = known = Member(
                    contact=contact,
                    stage=stage,
                    lineage=record.lineage,
                    state=PeerState.JOINING,
                    numeric_class=record.numeric_class,
                )
                known.lane.start_from(record.forward_seconds)
            elif known.greeted != record.lineage and record.lineage != known.lineage:
                known.greeted = None
            if record.state is PeerState.DRAINING:
                known.state = PeerState.DRAINING
            elif known.state is PeerState.JOINING and record.state is PeerState.READY:
                known.greeted = None
            known.queue = record.queue
        present = {record.peer for record in records}
        for peer in [p for p in members if p not in present and members[p].state is not PeerState.READY]:
            del members[peer]
        for peer in [p for p in members if p not in present and members[p].health.suspected]:
            self._journal.record("peer_lost", peer=peer, stage=stage)
            del members[peer]

    def _leave_out(self, record: PeerRecord) -> None:
        """Say once that a peer cannot take part."""
        if record.session in self._left_out:
            return
        self._left_out.add(record.session)
        reason = f"it speaks protocol version {record.protocol}, this program {PROTOCOL_VERSION}"
        self._journal.record("other_version", peer=record.peer, stage=record.stage, reason=reason)

    def may_greet(self, member: Member) -> bool:
        """It is not left alone for a while."""
        return not member.health.suspected or member.health.greet_due(self._clock.now())

    def _greet_due(self, member: Member) -> bool:
        if member.health.suspected:
            return member.health.greet_due(self._clock.now())
        # Whoever is left behind by a commit must hear of it, or it would wait for work for ever.
        left_behind = member.lineage != self.lineage and member.told != self.lineage
        return member.greeted is None or left_behind

    async def greet(self, member: Member) -> PeerReport | None:
        """Ask a peer what it holds; None if it did not answer.  Raises Superseded if it follows a higher term."""
        if self.term is None:
            raise AssertionError("no term to greet with")
        doubts = member.doubts
        greeting = Greeting(run=self._run, term=self.term, lineage=self.lineage, distrust=member.distrusted)
        was = (member.state, member.health.suspected)
        try:
            report = await self._calls.greet(member.contact, greeting, self._limits.control_seconds)
        except (Retryable, Refused) as error:
            first = not member.health.suspected
            member.health.failed(self._clock.now())
            if first:
                self._journal.record("peer_suspected", peer=member.peer, stage=member.stage, reason=str(error))
            return None
        self.answered(member)
        if member.doubts != doubts:
            return report  # what it answered is older than the doubt about it: it is greeted again
        member.distrusted = False
        member.told = greeting.lineage
        self.place(member, report.lineage)
        member.took(report)
        member.greeted = member.lineage
        if self.lineage is not None and member.lineage.length > self.lineage.length + 1:
            self._journal.record(
                "peer_ahead", peer=member.peer, stage=member.stage, version=member.lineage.length,
                reason=f"this trainer leads version {self.lineage.length}; to go on from there, start it again",
            )  # fmt: skip
        if was[0] is not PeerState.READY and member.state is PeerState.READY:
            self._journal.record("peer_joined", peer=member.peer, stage=member.stage, version=member.lineage.length)
        return report
