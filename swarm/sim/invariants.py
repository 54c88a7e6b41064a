"""What must hold of every peer after every event, whoever has died, stalled or spoken out of turn."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from swarm.ids import MicrobatchId, PeerId, SessionId
from swarm.messages import BackwardRequest, FreezeReply, FreezeRequest, StateMark, StepKey, VoidReply, VoidRequest
from swarm.records import Lineage, PeerState, Term
from swarm.roles.seat import TORN
from swarm.roles.stepbook import StepBook
from swarm.sim.lives import LivePeer
from swarm.sim.numeric import NumericStage
from swarm.sim.truth import Truth, Violation
from swarm.sim.weather import Call


class Invariants:
    """Watches all calls, and looks at the peers after each answer.

    ``thorough``: at all of them.  Else, for long runs of many peers, at each peer as it closes a step and as it has
    applied one: its gradient is what it says, and its parameters are the single process's.
    """

    def __init__(self, peers: Mapping[PeerId, LivePeer], truth: Truth, *, thorough: bool = True) -> None:
        self.violation: Violation | None = None
        """The first one found; it is raised where it is found, and kept in case that something swallows it."""
        self._peers = peers
        self._truth = truth
        self._thorough = thorough
        self._terms: dict[SessionId, Term] = {}
        self._voided: dict[tuple[SessionId, Lineage, Term, MicrobatchId], int] = {}
        self._sent: dict[tuple[SessionId, StepKey, MicrobatchId, int], int] = {}
        """The attempt in which each try of a microbatch was sent to a life of a peer."""
        self._frozen: dict[tuple[SessionId, StepKey], tuple[int, frozenset[MicrobatchId]]] = {}
        """The last freeze that each life of a peer has answered."""

    # --- what the calls say -----------------------------------------------------------

    def before_call(self, call: Call) -> None:
        """A call is made."""
        if self._thorough and isinstance(call.request, BackwardRequest):
            sent = call.request.call
            self._sent[call.to.session, sent.key, sent.microbatch, sent.try_number] = sent.attempt
        with self._noting():
            self._truth.saw(call)

    def after_call(self, call: Call, answer: Any) -> None:
        """A call was answered."""
        if not self._thorough:
            if isinstance(answer, FreezeReply | StateMark) and (life := self._peers.get(call.to.peer)) is not None:
                with self._noting():
                    self._check_peer(life)
            return
        request = call.request
        if isinstance(request, VoidRequest) and isinstance(answer, VoidReply) and not answer.held:
            voided = (call.to.session, request.key.lineage, request.key.term, request.microbatch)
            self._voided[voided] = max(request.below_try, self._voided.get(voided, 0))
        if isinstance(request, FreezeRequest) and isinstance(answer, FreezeReply):
            held = frozenset(h.microbatch for h in answer.held)
            if request.attempt >= self._frozen.get((call.to.session, request.key), (-1, held))[0]:
                self._frozen[call.to.session, request.key] = (request.attempt, held)
        with self._noting():
            self.check()

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except Violation as violation:
            self.violation = self.violation or violation
            raise

    # --- what the peers are -------------------------------------------------------------

    def check(self) -> None:
        """Raise Violation if any guarantee is broken now."""
        for life in self._peers.values():
            self._check_peer(life)

    def _check_peer(self, life: LivePeer) -> None:
        seat, module = life.peer.seat, life.module
        session = seat.contact.session
        if seat.term < self._terms.get(session, seat.term):
            raise Violation(f"{session} follows term {seat.term} after {self._terms[session]}")
        self._terms[session] = seat.term
        if life.task.done() and not life.task.cancelled():
            raise Violation(f"{session} ended by itself")
        if not life.trusted:
            return
        if seat.book is not None and seat.book.key.lineage != seat.lineage:
            raise Violation(f"{session} collects for version {seat.book.key.step}, it is at {seat.lineage.length}")
        self._check_book(session, seat.book, module)
        if seat.lineage.chain == TORN:
            if seat.state is PeerState.READY:
                raise Violation(f"{session} serves parameters that an update left half done")
            return
        expected = self._truth.parameters(seat.lineage, seat.stage)
        if module.parameters != expected:
            version = seat.lineage.length
            raise Violation(f"{session} at version {version}: parameters {module.parameters}, not {expected}")

    def _check_book(self, session: SessionId, book: StepBook | None, module: NumericStage) -> None:
        held = Counter(book.held.keys()) if book is not None else Counter()
        if +module.added != held:
            raise Violation(f"{session} says it holds {dict(held)}, its sum contains {dict(module.added)}")
        if book is None or not self._thorough:
            return
        attempt, closed = self._frozen.get((session, book.key), (-1, frozenset[MicrobatchId]()))
        for microbatch in book.held.keys() - closed:
            if self._sent.get((session, book.key, microbatch, book.held[microbatch].try_number), 0) <= attempt:
                raise Violation(f"{session} added {microbatch} after it had closed attempt {attempt}")
        for microbatch, entry in book.held.items():
            least = self._voided.get((session, book.key.lineage, book.key.term, microbatch), 0)
            if entry.try_number < least:
                raise Violation(f"{session} added try {entry.try_number} of {microbatch} after voiding below {least}")
