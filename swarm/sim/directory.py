"""A directory in memory: what is written is seen late, by each reader at its own time, and expires."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from swarm.config import RunConfig
from swarm.ids import PeerId, RunHash
from swarm.records import LeadRecord, PeerRecord
from swarm.sim.loop import world_seconds
from swarm.sim.network import Network, Node
from swarm.sim.weights import RECORD_BYTES

R = TypeVar("R")

DHT = "dht"
"""The machine that stands for all other nodes of the DHT, when machines are cut off."""
READ_SECONDS = 0.01
VERSIONS = 8
"""Of a record that late readers may still see."""


@dataclass(frozen=True, slots=True)
class Written(Generic[R]):
    """A record as it lies on the board, by the world's clock; None: withdrawn, or damaged on the way."""

    visible: float
    expires: float
    record: R | None


@dataclass(slots=True)
class Board:
    """What all simulated directories share."""

    peers: dict[tuple[RunHash, int], dict[PeerId, deque[Written[PeerRecord]]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    leads: dict[RunHash, dict[PeerId, deque[Written[LeadRecord]]]] = field(default_factory=lambda: defaultdict(dict))
    """By trainer, as on the DHT: each renews its own."""
    configs: dict[RunHash, Written[RunConfig]] = field(default_factory=dict)
    operations: Counter[str] = field(default_factory=Counter)
    read_bytes: Counter[str] = field(default_factory=Counter)
    """By machine."""
    observers: list[Callable[[str, Node], None]] = field(default_factory=list)
    """Told of each operation, by whom, before it takes effect."""

    def used(self, operation: str, node: Node) -> None:
        """A process begins an operation."""
        self.operations[operation] += 1
        for observer in self.observers:
            observer(operation, node)

    def write(self, record: PeerRecord, delay_seconds: float, lifetime_seconds: float) -> None:
        """A peer's record, seen after ``delay_seconds``."""
        now = world_seconds()
        self._versions(record).append(Written(now + delay_seconds, now + lifetime_seconds, record))

    def withdraw(self, record: PeerRecord) -> None:
        """No record of this peer from now on; a later life's stays."""
        versions = self._versions(record)
        if not versions or versions[-1].record is None or versions[-1].record.session == record.session:
            versions.append(Written(world_seconds(), float("inf"), None))

    def damage(self, run: RunHash, stage: int, peer: PeerId, seconds: float) -> None:
        """What is stored of a peer cannot be read for so long, or until it is renewed: readers leave it out."""
        versions = self.peers[run, stage].get(peer)
        if versions:
            now = world_seconds()
            kept = versions[-1]
            versions.append(Written(now, now + seconds, None))
            versions.append(Written(now + seconds, kept.expires, kept.record))

    def of_stage(self, run: RunHash, stage: int, at: float) -> list[PeerRecord]:
        """What a reader finds who sees the board as it was ``at``; expiry is by now."""
        now = world_seconds()
        found = ((peer, _seen(versions, at, now)) for peer, versions in sorted(self.peers[run, stage].items()))
        return [record for _, record in found if record is not None]

    def lead(self, run: RunHash, at: float) -> LeadRecord | None:
        """The lease that a reader finds: of the greatest term that has not expired."""
        now = world_seconds()
        found = (_seen(versions, at, now) for versions in self.leads[run].values())
        return max((lease for lease in found if lease is not None), key=lambda lease: lease.term, default=None)

    def lease(self, record: LeadRecord, lifetime_seconds: float) -> None:
        """A trainer's own lease, seen at once."""
        now = world_seconds()
        versions = self.leads[record.run].setdefault(record.trainer, deque(maxlen=VERSIONS))
        versions.append(Written(now, now + lifetime_seconds, record))

    def publish(self, config: RunConfig, lifetime_seconds: float) -> None:
        """A run's config, as others get it."""
        known = self.configs.get(config.hash)
        public = known.record if known is not None else RunConfig.from_published(config.published(), config.hash)
        now = world_seconds()
        self.configs[config.hash] = Written(now, now + lifetime_seconds, public)

    def runs(self) -> list[RunConfig]:
        """All configs that have not expired."""
        now = world_seconds()
        found = [c.record for c in self.configs.values() if c.record is not None and c.expires > now]
        return sorted(found, key=lambda config: (config.run.name, config.hash))

    def _versions(self, record: PeerRecord) -> deque[Written[PeerRecord]]:
        return self.peers[record.run, record.stage].setdefault(record.peer, deque(maxlen=VERSIONS))


def _seen(versions: deque[Written[R]], at: float, now: float) -> R | None:
    for written in reversed(versions):
        if written.visible <= at:
            return written.record if written.expires > now else None
    return None


class SimulatedDirectory:
    """Implements :class:`swarm.ports.Directory` for one process.

    ``staleness_seconds``: how old what it reads may be.  ``sees_lead``: it finds the lease of another trainer.  A
    machine that is cut off reads what it read before, until that expires, and what it writes is lost.
    """

    def __init__(
        self,
        board: Board,
        network: Network,
        node: Node,
        *,
        delay_seconds: float = 0.2,
        lifetime_seconds: float = 30.0,
        run_lifetime_seconds: float = 300.0,
        staleness_seconds: float = 0.0,
        sees_lead: bool = True,
    ) -> None:
        self._board = board
        self._network = network
        self._node = node
        self._delay_seconds = delay_seconds
        self._lifetime_seconds = lifetime_seconds
        self._run_lifetime_seconds = run_lifetime_seconds
        self._staleness_seconds = staleness_seconds
        self._sees_lead = sees_lead
        self._current = 0.0
        """When the board could be reached last."""

    async def announce(self, record: PeerRecord) -> None:
        if self._writes("announce"):
            self._board.write(record, self._delay_seconds, self._lifetime_seconds)
        await asyncio.sleep(self._delay_seconds)

    async def withdraw(self, record: PeerRecord) -> None:
        if self._writes("withdraw"):
            self._board.withdraw(record)

    async def peers(self, run: RunHash, stage: int) -> list[PeerRecord]:
        await self._read("peers")
        found = self._board.of_stage(run, stage, self._view())
        self._board.read_bytes[self._node.machine.name] += RECORD_BYTES * len(found)
        return found

    async def lead(self, run: RunHash) -> LeadRecord | None:
        await self._read("lead")
        return self._board.lead(run, self._view()) if self._sees_lead else None

    async def renew_lead(self, record: LeadRecord) -> None:
        if self._writes("renew_lead"):
            self._board.lease(record, self._lifetime_seconds)

    async def publish_run(self, config: RunConfig) -> None:
        if self._writes("publish_run"):
            self._board.publish(config, self._run_lifetime_seconds)

    async def runs(self) -> list[RunConfig]:
        await self._read("runs")
        return self._board.runs()

    # --- reach ----------------------------------------------------------------------

    def _writes(self, operation: str) -> bool:
        """Whether anything comes of it: nothing that a dead process still tries does."""
        self._board.used(operation, self._node)
        return self._node.alive and not self._network.blocked(self._node.machine.name, DHT)

    async def _read(self, operation: str) -> None:
        self._board.used(operation, self._node)
        await asyncio.sleep(READ_SECONDS)

    def _view(self) -> float:
        name = self._node.machine.name
        if not self._network.blocked(DHT, name) and not self._network.blocked(name, DHT):
            self._current = world_seconds()
        return self._current - self._staleness_seconds
