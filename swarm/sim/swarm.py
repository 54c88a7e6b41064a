"""A whole swarm in one process: real roles, simulated world, and the invariants that must hold after every event."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from swarm.config import RunConfig
from swarm.ids import MicrobatchId, PeerId, SessionId
from swarm.messages import BackwardRequest, Contact, FreezeReply, FreezeRequest, StepKey, VoidReply, VoidRequest
from swarm.records import CommitRecord, Lineage, PeerState, Term
from swarm.roles.peer import Peer
from swarm.roles.seat import TORN
from swarm.roles.stepbook import StepBook
from swarm.roles.trainer import Trainer
from swarm.sim.averager import Meetings, SimulatedAverager
from swarm.sim.directory import Board, SimulatedDirectory
from swarm.sim.executor import SimulatedExecutor
from swarm.sim.loop import VirtualClock
from swarm.sim.network import Call, Network, Node, SimulatedCalls, Weather
from swarm.sim.numeric import NumericBatches, NumericStage, Poison
from swarm.sim.truth import Truth, Violation


class EventList:
    """Implements :class:`swarm.ports.Journal` with virtual times."""

    def __init__(self) -> None:
        self.events: list[tuple[float, str, dict[str, Any]]] = []

    def record(self, kind: str, **fields: str | int | float | None) -> None:
        self.events.append((asyncio.get_running_loop().time(), kind, fields))


@dataclass(slots=True)
class MemoryLog:
    """Implements :class:`swarm.ports.CommitLog`; survives the simulated trainer."""

    commits: list[CommitRecord] = field(default_factory=list)

    def read(self) -> list[CommitRecord]:
        return list(self.commits)

    def append(self, commit: CommitRecord) -> None:
        self.commits.append(commit)


@dataclass(slots=True)
class LivePeer:
    """One life of a simulated peer."""

    peer: Peer
    module: NumericStage
    executor: SimulatedExecutor
    node: Node
    task: asyncio.Task[None]
    trusted: bool = True
    """False: a test has damaged its parameters, so they are not compared until it is made true again."""


class SimulatedSwarm:
    """Starts and kills peers and trainers; checks the guarantees."""

    def __init__(
        self,
        config: RunConfig,
        weather: Weather | None = None,
        poisons: frozenset[Poison] = frozenset(),
        sick: frozenset[Poison] = frozenset(),
    ) -> None:
        """``poisons`` are microbatches not finite at any peer, ``sick`` ones only at peers started as sick."""
        self.config = config
        self.network = Network(weather)
        self.board = Board({}, {}, {})
        self.meetings = Meetings()
        self.journal = EventList()
        self.log = MemoryLog()
        self.peers: dict[PeerId, LivePeer] = {}
        self.trainer: Trainer | None = None
        self.poisons = poisons
        self.sick = sick
        self.truth = Truth(config, poisons, sick)
        self.violation: Violation | None = None
        """The first one found; it is raised where it is found, and kept in case that something swallows it."""
        self._lives: Counter[str] = Counter()
        self._terms: dict[SessionId, Term] = {}
        self._voided: dict[tuple[SessionId, Lineage, Term, MicrobatchId], int] = {}
        self._sent: dict[tuple[SessionId, StepKey, MicrobatchId], int] = {}
        """The greatest attempt in which each microbatch was sent to each life of a peer."""
        self._frozen: dict[tuple[SessionId, StepKey], tuple[int, frozenset[MicrobatchId]]] = {}
        """The last freeze that each life of a peer has answered."""
        self._ended: list[asyncio.Task[None]] = []
        self.network.before_call.append(self._before_call)
        self.network.after_call.append(self._after_call)

    # --- lives --------------------------------------------------------------------

    def start_peer(self, name: str, stage: int, slowness: float = 1.0, sick: bool = False) -> PeerId:
        """Start a peer, or a new life of one that died."""
        peer_id = PeerId(name)
        if peer_id in self.peers:
            raise ValueError(f"{name} lives already")
        self._lives[name] += 1
        contact = Contact(peer=peer_id, session=SessionId(f"{name}#{self._lives[name]}"), endpoint=f"{name}:1")
        poisons = self.poisons | self.sick if sick else self.poisons
        module = NumericStage(stage, self.config.model.stage_count, poisons)
        executor = SimulatedExecutor(slowness)
        peer = Peer(
            config=self.config,
            stage=stage,
            contact=contact,
            module=module,
            executor=executor,
            averager=SimulatedAverager(self.meetings, contact),
            calls=SimulatedCalls(self.network, name),
            directory=SimulatedDirectory(self.board),
            clock=VirtualClock(),
            journal=self.journal,
            numeric_class="simulated",
        )
        node = self.network.join(contact, peer, lambda: self.kill_peer(peer_id))
        task = asyncio.create_task(peer.run(), name=f"peer {name}")
        self.peers[peer_id] = LivePeer(peer, module, executor, node, task)
        return peer_id

    def kill_peer(self, peer_id: PeerId) -> None:
        """As SIGKILL: nothing is withdrawn, its record stays until it expires."""
        life = self.peers.pop(peer_id, None)
        if life is None:
            return
        record = self.board.peers.get((self.config.hash, life.peer.seat.stage, peer_id))
        life.executor.close()
        self.network.leave(life.node)
        life.task.cancel()
        self._ended.append(life.task)
        if record is not None:
            key = (self.config.hash, life.peer.seat.stage, peer_id)
            life.task.add_done_callback(lambda _: self.board.peers.setdefault(key, record))

    def may_kill(self, peer_id: PeerId) -> bool:
        """Another living peer of the stage holds all that this one holds of what is, or may soon be, committed."""
        victim = self.peers[peer_id].peer.seat
        for life in self.peers.values():
            seat = life.peer.seat
            if life.node.contact.peer == peer_id or seat.stage != victim.stage or seat.state is not PeerState.READY:
                continue
            if seat.lineage.rank() < victim.lineage.rank() or not life.trusted:
                continue
            if seat.lineage != victim.lineage or victim.kept is None or victim.kept[0] != victim.lineage:
                return True
            if seat.kept is not None and seat.kept[0] == seat.lineage and seat.kept[1].digest == victim.kept[1].digest:
                return True
        return False

    def make_trainer(
        self,
        name: str = "trainer",
        state_timeout_seconds: float = 60.0,
        log: MemoryLog | None = None,
        sees_lead: bool = True,
    ) -> Trainer:
        """A trainer that is not run yet.

        ``log`` becomes the swarm's log, by default the one that is there.  A trainer that does not see the lead's
        lease takes over without waiting for it to lapse.
        """
        if log is not None:
            self.log = log
        self._lives[name] += 1
        self.trainer = Trainer(
            config=self.config,
            trainer=PeerId(name),
            session=SessionId(f"{name}#{self._lives[name]}"),
            calls=SimulatedCalls(self.network, name),
            directory=SimulatedDirectory(self.board, sees_lead=sees_lead),
            batches=NumericBatches(),
            log=self.log,
            clock=VirtualClock(),
            journal=self.journal,
            state_timeout_seconds=state_timeout_seconds,
            boundary=lambda ids: ids,
        )
        return self.trainer

    async def close(self) -> None:
        """End all peers and wait for their tasks.  Raises what a peer's own task died of, if any did."""
        for peer_id in list(self.peers):
            self.kill_peer(peer_id)
        for task in self._ended:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    # --- invariants -----------------------------------------------------------------

    def _before_call(self, call: Call) -> None:
        if isinstance(call.request, BackwardRequest):
            sent = call.request.call
            key = (call.to.session, sent.key, sent.microbatch)
            self._sent[key] = max(sent.attempt, self._sent.get(key, 0))
        with self._noting():
            self.truth.saw(call)

    def _after_call(self, call: Call, answer: Any) -> None:
        request = call.request
        if isinstance(request, VoidRequest) and isinstance(answer, VoidReply) and not answer.held:
            key = (call.to.session, request.key.lineage, request.key.term, request.microbatch)
            self._voided[key] = max(request.below_try, self._voided.get(key, 0))
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

    def check(self) -> None:
        """Raise Violation if any guarantee is broken now."""
        for life in self.peers.values():
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
        expected = self.truth.parameters(seat.lineage, seat.stage)
        if module.parameters != expected:
            version = seat.lineage.length
            raise Violation(f"{session} at version {version}: parameters {module.parameters}, not {expected}")

    def _check_book(self, session: SessionId, book: StepBook | None, module: NumericStage) -> None:
        held = Counter(book.held.keys()) if book is not None else Counter()
        if +module.added != held:
            raise Violation(f"{session} says it holds {dict(held)}, its sum contains {dict(module.added)}")
        if book is None:
            return
        attempt, closed = self._frozen.get((session, book.key), (-1, frozenset[MicrobatchId]()))
        for microbatch in book.held.keys() - closed:
            if self._sent.get((session, book.key, microbatch), 0) <= attempt:
                raise Violation(f"{session} added {microbatch} after it had closed attempt {attempt}")
        for microbatch, entry in book.held.items():
            least = self._voided.get((session, book.key.lineage, book.key.term, microbatch), 0)
            if entry.try_number < least:
                raise Violation(f"{session} added try {entry.try_number} of {microbatch} after voiding below {least}")

    def check_finished(self, steps: int) -> None:
        """The log holds all steps in one chain, every stage has a peer at its end, and peers agree with the truth."""
        if self.violation is not None:
            raise self.violation
        self.check()
        lineage = Lineage.root(self.config.hash)
        for commit in self.log.commits:
            if commit.parent != lineage.chain:
                raise Violation(f"the log breaks at step {commit.step}: its parent is {commit.parent[:8]}")
            lineage = lineage.after(commit)
        if lineage.length != steps:
            raise Violation(f"the log has {lineage.length} steps, not {steps}")
        there = {life.peer.seat.stage for life in self.peers.values() if life.peer.seat.lineage == lineage}
        if len(there) != self.config.model.stage_count:
            raise Violation(f"only stages {sorted(there)} are at the end of the log")
