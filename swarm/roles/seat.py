"""A peer's position: the stage it serves, the parameters it holds, and whose word it follows.

``lineage``, ``book`` and ``commits`` change on the compute thread only; the event loop reads them and waits on
:meth:`Seat.reach`.  ``term`` is raised at once, wherever a higher one is seen.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from swarm.errors import Draining, Stale, Superseded, TimedOut, WrongRun
from swarm.ids import Digest, RunHash
from swarm.messages import Contact, PeerReport, ReducedMark, StepKey
from swarm.ports import Clock
from swarm.records import NO_TERM, CommitRecord, Lineage, PeerState, Term
from swarm.roles.stepbook import StepBook

TORN = Digest("f" * 64)
"""Chain of parameters that an update left half done; it ranks below every other of its length."""
KEPT_COMMITS = 8
"""Commit records that a peer keeps, for a lead that restarts and for peers that missed one."""


class Seat:
    """Where a peer stands in the run."""

    def __init__(self, *, run: RunHash, stage: int, contact: Contact, clock: Clock) -> None:
        self.run = run
        self.stage = stage
        self.contact = contact
        self.state = PeerState.JOINING
        self.term: Term = NO_TERM
        self.lineage = Lineage.root(run)
        self.commits: deque[CommitRecord] = deque(maxlen=KEPT_COMMITS)
        self.book: StepBook | None = None
        self.kept: tuple[Lineage, ReducedMark] | None = None
        """The averaged gradient that the module keeps, and the parameters it was computed on."""
        self.behind: Lineage | None = None
        """A lineage that a lead spoke of and this peer does not have."""
        self.changed = asyncio.Event()
        """Set whenever something that the peer's record shows has changed; cleared by whoever announces."""
        self._clock = clock
        self._moved = asyncio.Event()

    # --- on the event loop --------------------------------------------------------

    def follow(self, term: Term) -> None:
        """Adopt a higher term; raise Superseded on a lower one."""
        if term < self.term:
            raise Superseded(f"another trainer leads this run: term {term.number} is over", self.term.number)
        self.term = term

    def check_place(self, run: RunHash, stage: int) -> None:
        """Raise WrongRun unless the message is for this run and stage."""
        if run != self.run:
            raise WrongRun(f"this peer serves run {self.run[:12]}, not {run[:12]}")
        if stage != self.stage:
            raise WrongRun(f"this peer serves stage {self.stage}, not {stage}")

    async def reach(self, key: StepKey, deadline: float) -> None:
        """Return once this peer is at ``key``'s lineage.  A call for the next version waits for the apply.

        Raises WrongRun, Superseded, Draining, Stale, or TimedOut at ``deadline`` (the clock's seconds).
        """
        self.check_place(key.run, key.stage)
        self.follow(key.term)
        while not self._here(key):
            kept = self.kept  # read once: the compute thread writes it
            pending = kept is not None and kept[0] == self.lineage
            if not pending or key.step != self.lineage.length + 1:
                self._refuse_stale(key)
            try:
                async with asyncio.timeout(max(0.0, deadline - self._clock.now())):
                    await self._moved.wait()
            except TimeoutError:
                raise TimedOut(f"the apply of step {self.lineage.length} did not come in time") from None

    def check_ready(self) -> None:
        """Raise unless new work is taken."""
        if self.state is PeerState.JOINING:
            raise Stale("no usable parameters yet")
        if self.state is PeerState.DRAINING:
            raise Draining("leaving")

    def _here(self, key: StepKey) -> bool:
        self.check_ready()
        return key.lineage == self.lineage

    def _refuse_stale(self, key: StepKey) -> None:
        if key.step >= self.lineage.length:
            self.fall_behind(key.lineage)
        raise Stale(f"at version {self.lineage.length} ({self.lineage.chain[:8]}), not {key.step}")

    def fall_behind(self, lineage: Lineage) -> None:
        """Stop serving until the state of ``lineage``, or of one beyond it, is fetched."""
        self.behind = lineage
        self.set_state(PeerState.JOINING)

    def has_outrun(self, term: Term, lineage: Lineage) -> bool:
        """The lead of ``term`` has committed beyond ``lineage`` itself: what it said of it comes late."""
        return bool(self.commits) and self.commits[-1].term == term and lineage.length < self.lineage.length

    def set_state(self, state: PeerState) -> None:
        """Change state and tell whoever announces.  Draining is final."""
        if self.state is not PeerState.DRAINING:
            self.state = state
        self.touch()

    async def wait_moved(self) -> None:
        """Return at the next change of state or lineage."""
        await self._moved.wait()

    def touch(self) -> None:
        """Wake whoever waits for a change."""
        self.changed.set()
        self._moved.set()
        self._moved = asyncio.Event()

    def report(self, queue: int, forward_seconds: float) -> PeerReport:
        """What this peer is and holds, for a lead."""
        return PeerReport(
            peer=self.contact.peer,
            session=self.contact.session,
            stage=self.stage,
            state=self.state,
            term=self.term,
            lineage=self.lineage,
            reduced=self.book.reduced if self.book is not None else None,
            commits=tuple(self.commits),
            queue=queue,
            forward_seconds=forward_seconds,
        )

    # --- on the compute thread ----------------------------------------------------

    def confirm(self, key: StepKey) -> None:
        """Check again, where nothing can change in between, that ``key`` still holds."""
        if key.term < self.term:
            raise Superseded(f"another trainer leads this run: term {key.term.number} is over", self.term.number)
        if key.lineage != self.lineage:
            raise Stale(f"moved to version {self.lineage.length} meanwhile")

    def open_book(self, key: StepKey, drop_gradient: Callable[[], None]) -> StepBook:
        """The book of this step under this lead; an older one is closed unread and its gradient dropped."""
        self.confirm(key)
        if self.book is None or self.book.key != key:
            drop_gradient()
            self.book = StepBook(key)
        return self.book

    def keep_reduced(self, mark: ReducedMark) -> None:
        """The module now keeps a complete averaged gradient for the open step."""
        self.kept = (self.lineage, mark)
        if self.book is not None:
            self.book.reduced = mark

    def advance(self, commit: CommitRecord) -> None:
        """The parameters moved on by ``commit``."""
        self.lineage = self.lineage.after(commit)
        self.commits.append(commit)
        self.book = None

    def torn(self) -> None:
        """The parameters are neither those of this version nor of the next: no message fits them any more."""
        self.lineage = Lineage(generation=self.lineage.generation, length=self.lineage.length, chain=TORN)
        self.book = None
        self.kept = None

    def replace(self, lineage: Lineage, commits: tuple[CommitRecord, ...]) -> None:
        """The parameters are those of another lineage now (a snapshot was loaded)."""
        self.lineage = lineage
        self.commits = deque(commits, maxlen=KEPT_COMMITS)
        self.book = None
        self.kept = None
