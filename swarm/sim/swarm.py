"""A whole swarm in one process: real roles, simulated world, and the invariants that must hold after every event."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from swarm.config import RunConfig
from swarm.ids import Digest, MicrobatchId, PeerId, SessionId
from swarm.messages import Contact, VoidReply, VoidRequest
from swarm.records import CommitRecord, Lineage, Term
from swarm.roles.peer import Peer
from swarm.roles.stepbook import StepBook
from swarm.roles.trainer import Trainer
from swarm.sim.averager import Meetings, SimulatedAverager
from swarm.sim.directory import Board, SimulatedDirectory
from swarm.sim.executor import SimulatedExecutor
from swarm.sim.loop import VirtualClock
from swarm.sim.network import Network, Node, SimulatedCalls, Weather
from swarm.sim.numeric import NumericBatches, NumericStage, reference


class Violation(AssertionError):
    """A guarantee of the protocol does not hold."""


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


class SimulatedSwarm:
    """Starts and kills peers and trainers; checks the guarantees."""

    def __init__(
        self,
        config: RunConfig,
        weather: Weather | None = None,
        poisoned: frozenset[tuple[int, MicrobatchId]] = frozenset(),
    ) -> None:
        self.config = config
        self.network = Network(weather)
        self.board = Board({}, {}, {})
        self.meetings = Meetings()
        self.journal = EventList()
        self.log = MemoryLog()
        self.peers: dict[PeerId, LivePeer] = {}
        self.trainer: Trainer | None = None
        self.poisoned = poisoned
        self._lives: Counter[str] = Counter()
        self._terms: dict[SessionId, Term] = {}
        self._states: dict[tuple[int, Digest], Digest] = {}
        self._voided: dict[tuple[SessionId, Lineage, Term, MicrobatchId], int] = {}
        self.network.after_call.append(self._after_call)

    # --- lives --------------------------------------------------------------------

    def start_peer(self, name: str, stage: int, slowness: float = 1.0) -> PeerId:
        """Start a peer, or a new life of one that died."""
        peer_id = PeerId(name)
        if peer_id in self.peers:
            raise ValueError(f"{name} lives already")
        self._lives[name] += 1
        contact = Contact(peer=peer_id, session=SessionId(f"{name}#{self._lives[name]}"), endpoint=f"{name}:1")
        module = NumericStage(stage, self.config.model.stage_count, self.poisoned)
        executor = SimulatedExecutor(slowness)
        peer = Peer(
            config=self.config,
            stage=stage,
            contact=contact,
            module=module,
            executor=executor,
            averager=SimulatedAverager(self.meetings, contact),
            calls=SimulatedCalls(self.network),
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
        if record is not None:
            key = (self.config.hash, life.peer.seat.stage, peer_id)
            life.task.add_done_callback(lambda _: self.board.peers.setdefault(key, record))

    def make_trainer(self, name: str = "trainer", state_timeout_seconds: float = 60.0) -> Trainer:
        """A trainer that is not run yet."""
        self._lives[name] += 1
        self.trainer = Trainer(
            config=self.config,
            trainer=PeerId(name),
            session=SessionId(f"{name}#{self._lives[name]}"),
            calls=SimulatedCalls(self.network),
            directory=SimulatedDirectory(self.board),
            batches=NumericBatches(),
            log=self.log,
            clock=VirtualClock(),
            journal=self.journal,
            state_timeout_seconds=state_timeout_seconds,
        )
        return self.trainer

    async def close(self) -> None:
        """End all peers and wait for their tasks."""
        lives = list(self.peers.values())
        for peer_id in list(self.peers):
            self.kill_peer(peer_id)
        for life in lives:
            with contextlib.suppress(asyncio.CancelledError):
                await life.task

    # --- invariants -----------------------------------------------------------------

    def _after_call(self, kind: str, to: Contact, request: Any, answer: Any) -> None:
        if isinstance(request, VoidRequest) and isinstance(answer, VoidReply) and not answer.held:
            key = (to.session, request.key.lineage, request.key.term, request.microbatch)
            self._voided[key] = max(request.below_try, self._voided.get(key, 0))
        self.check()

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
        if seat.book is not None:
            self._check_book(session, seat.book, module)
        known = self._states.setdefault((seat.stage, seat.lineage.chain), module.digest())
        if known != module.digest():
            raise Violation(f"{session}: two states of stage {seat.stage} at lineage {seat.lineage.chain[:8]}")

    def _check_book(self, session: SessionId, book: StepBook, module: NumericStage) -> None:
        if +module.added != Counter(book.held.keys()):
            raise Violation(f"{session} says it holds {sorted(book.held)}, its sum contains {dict(module.added)}")
        for microbatch, entry in book.held.items():
            least = self._voided.get((session, book.key.lineage, book.key.term, microbatch), 0)
            if entry.try_number < least:
                raise Violation(f"{session} added try {entry.try_number} of {microbatch} after voiding below {least}")

    def check_against_reference(self) -> None:
        """Every living peer's parameters equal the single process's at its version, and no sample is missed."""
        commits = self.log.commits
        excluded = {c.step: frozenset(c.excluded) for c in commits}
        versions = reference(
            self.config.model.stage_count, len(commits), self.config.step.microbatches, excluded
        )
        chains = {Lineage.root(self.config.hash).chain: 0}
        lineage = Lineage.root(self.config.hash)
        for commit in commits:
            lineage = lineage.after(commit)
            chains[lineage.chain] = lineage.length
            everything = frozenset(MicrobatchId(m) for m in range(self.config.step.microbatches))
            if frozenset(commit.microbatches) | frozenset(commit.excluded) != everything:
                raise Violation(f"step {commit.step} committed {commit.microbatches}, excluded {commit.excluded}")
        for peer_id, life in self.peers.items():
            version = chains.get(life.peer.seat.lineage.chain)
            if version is None:
                continue  # on a lineage that was discarded: it fetches state before it serves
            expected = versions[version][life.peer.seat.stage]
            if life.module.parameters != expected:
                raise Violation(f"{peer_id} at version {version}: {life.module.parameters}, not {expected}")
