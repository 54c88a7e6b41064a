"""A whole swarm in one process: real roles in a simulated world, whose guarantees are checked after every event."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable

from swarm.config import RunConfig
from swarm.ids import PeerId, SessionId
from swarm.messages import Contact
from swarm.policy.deadlines import LAN, Limits
from swarm.records import Lineage, PeerState
from swarm.roles.peer import Peer
from swarm.roles.trainer import Trainer
from swarm.sim.arithmetic import WIDTH, NumericBatches
from swarm.sim.averager import Meetings, SimulatedAverager
from swarm.sim.calls import SimulatedCalls
from swarm.sim.directory import Board, SimulatedDirectory
from swarm.sim.executor import SimulatedExecutor
from swarm.sim.invariants import Invariants
from swarm.sim.lives import EventList, LivePeer, MemoryLog
from swarm.sim.loop import Process, VirtualClock
from swarm.sim.machine import Device, Machine
from swarm.sim.network import Network, Node
from swarm.sim.numeric import NumericStage, Poison
from swarm.sim.truth import Truth, Violation
from swarm.sim.weather import Weather
from swarm.sim.weights import Overheads, Weights


class SimulatedSwarm:
    """Starts and kills peers and trainers; checks the guarantees."""

    def __init__(
        self,
        config: RunConfig,
        weather: Weather | None = None,
        poisons: frozenset[Poison] = frozenset(),
        sick: frozenset[Poison] = frozenset(),
        *,
        weights: Weights | None = None,
        overheads: Overheads | None = None,
        graph_bytes: int = 0,
        limits: Limits = LAN,
        staleness_seconds: float = 0.0,
        thorough: bool = True,
    ) -> None:
        """``poisons`` are microbatches not finite at any peer, ``sick`` ones only at peers started as sick.

        ``weights``, ``overheads`` and ``graph_bytes`` are those of the model that is stood for; ``staleness_seconds``
        is how old what the directory's readers see may be; ``thorough`` as in :class:`swarm.sim.invariants.Invariants`.
        """
        self.config = config
        self.network = Network(weather, weights, overheads)
        self.board = Board()
        self.meetings = Meetings()
        self.journal = EventList()
        self.log = MemoryLog()
        self.peers: dict[PeerId, LivePeer] = {}
        self.trainer: Trainer | None = None
        self.poisons = poisons
        self.sick = sick
        self.truth = Truth(config, poisons, sick)
        self.invariants = Invariants(self.peers, self.truth, thorough=thorough)
        self._recomputed = 0
        self._graph_bytes = graph_bytes
        self._limits = limits
        self._staleness_seconds = staleness_seconds
        self._lives: Counter[str] = Counter()
        self._ended: list[asyncio.Task[None]] = []
        self.network.before_call.append(self.invariants.before_call)
        self.network.after_call.append(self.invariants.after_call)

    # --- peers --------------------------------------------------------------------

    def start_peer(
        self,
        name: str,
        stage: int,
        slowness: float = 1.0,
        sick: bool = False,
        *,
        machine: Callable[[], Machine] | None = None,
        clock_rate: float = 1.0,
        work: float = 1.0,
    ) -> PeerId:
        """Start a peer, or a new life of one that died; its machine, by default one of ``slowness``, stays the same.

        ``work``: what a forward at this stage takes, in the units of the machine's device.
        """
        peer_id = PeerId(name)
        if peer_id in self.peers:
            raise ValueError(f"{name} lives already")
        self._lives[name] += 1
        contact = Contact(peer=peer_id, session=SessionId(f"{name}#{self._lives[name]}"), endpoint=f"{name}:1")
        place = self.network.machine(name, machine or (lambda: Machine(name=name, device=Device(slowness=slowness))))
        place.device.slowness = slowness
        process = Process(contact.session, clock_rate=clock_rate)
        node = Node(machine=place, process=process, contact=contact, kill=lambda: self.kill_peer(peer_id))
        gradient_bytes = self.network.weights.gradient(stage) or 8 * WIDTH
        module = NumericStage(
            stage,
            self.config.model.stage_count,
            self.poisons | self.sick if sick else self.poisons,
            device=place.device,
            work=work,
            gradient_bytes=gradient_bytes,
            graph_bytes=self._graph_bytes,
        )
        module.on_sick = lambda draw: self.truth.may_miss(draw.step, draw.microbatch)
        executor = SimulatedExecutor()
        peer = Peer(
            config=self.config,
            stage=stage,
            contact=contact,
            module=module,
            executor=executor,
            averager=SimulatedAverager(self.meetings, self.network, node),
            calls=SimulatedCalls(self.network, node),
            directory=self._directory(node),
            clock=VirtualClock(),
            journal=self.journal,
            numeric_class="simulated",
            limits=self._limits,
        )
        node.service = peer
        self.network.join(node)
        self.peers[peer_id] = LivePeer(peer, module, executor, node, process.spawn(peer.run(), f"peer {name}"))
        return peer_id

    def kill_peer(self, peer_id: PeerId, *, silently: bool = False) -> None:
        """As SIGKILL: nothing is withdrawn, its record stays until it expires.  ``silently``: as a power failure."""
        life = self.peers.pop(peer_id, None)
        if life is not None:
            self.network.leave(life.node, silently=silently)
            self._end(life)

    def stop_peer(self, peer_id: PeerId) -> None:
        """As SIGTERM: it withdraws its record and leaves at once."""
        life = self.peers.pop(peer_id)
        self.board.withdraw(life.peer.record())
        self.network.leave(life.node)
        self._end(life)

    def _end(self, life: LivePeer) -> None:
        self._recomputed += life.module.recomputed
        life.node.process.resume()
        life.executor.die()
        life.task.cancel()
        self._ended.append(life.task)

    @property
    def recomputed(self) -> int:
        """Backwards so far whose forward had to be run again."""
        return self._recomputed + sum(life.module.recomputed for life in self.peers.values())

    def may_kill(self, peer_id: PeerId) -> bool:
        """Another living peer of the stage holds all that this one holds of what is, or may soon be, committed."""
        victim = self.peers[peer_id].peer.seat
        for life in self.peers.values():
            seat = life.peer.seat
            if life.node.contact == victim.contact or seat.stage != victim.stage or seat.state is not PeerState.READY:
                continue
            if seat.lineage.rank() < victim.lineage.rank() or not life.trusted:
                continue
            if seat.lineage != victim.lineage or victim.kept is None or victim.kept[0] != victim.lineage:
                return True
            if seat.kept is not None and seat.kept[0] == seat.lineage and seat.kept[1].digest == victim.kept[1].digest:
                return True
        return False

    # --- trainers -------------------------------------------------------------------

    def make_trainer(
        self,
        name: str = "trainer",
        state_timeout_seconds: float = 60.0,
        log: MemoryLog | None = None,
        sees_lead: bool = True,
        *,
        node: Node | None = None,
        **settings: object,
    ) -> Trainer:
        """A trainer that is not run yet.

        ``log`` becomes the swarm's log, by default the one that is there.  A trainer that does not see the lead's
        lease takes over without waiting for it to lapse.  ``node`` is its process, by default one of its own;
        ``settings`` are those of :class:`swarm.roles.trainer.Trainer`.
        """
        if log is not None:
            self.log = log
        node = node or self.trainer_node(name)
        self.trainer = Trainer(
            config=self.config,
            trainer=PeerId(name),
            session=SessionId(node.process.name),
            calls=SimulatedCalls(self.network, node),
            directory=self._directory(node, sees_lead=sees_lead),
            batches=NumericBatches(),
            log=self.log,
            clock=VirtualClock(),
            journal=self.journal,
            state_timeout_seconds=state_timeout_seconds,
            boundary=lambda ids: ids,
            limits=self._limits,
            **settings,  # type: ignore[arg-type]
        )
        return self.trainer

    def trainer_node(self, name: str = "trainer", machine: Callable[[], Machine] | None = None) -> Node:
        """A new life of a trainer's process."""
        self._lives[name] += 1
        return Node(machine=self.network.machine(name, machine), process=Process(f"{name}#{self._lives[name]}"))

    def _directory(self, node: Node, *, sees_lead: bool = True) -> SimulatedDirectory:
        return SimulatedDirectory(
            self.board, self.network, node, sees_lead=sees_lead, staleness_seconds=self._staleness_seconds
        )

    # --- the end ----------------------------------------------------------------------

    async def close(self) -> None:
        """End all peers and wait for their tasks.  Raises what a peer's own task died of, if any did."""
        for peer_id in list(self.peers):
            self.kill_peer(peer_id)
        for task in self._ended:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def check_finished(self, steps: int) -> None:
        """The log holds all steps in one chain, every stage has a peer at its end, and peers agree with the truth."""
        if self.invariants.violation is not None:
            raise self.invariants.violation
        self.invariants.check()
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
