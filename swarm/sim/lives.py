"""What the simulated world keeps of a process beside its role: journal, commit log, and one life of a peer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from swarm.records import CommitRecord
from swarm.roles.peer import Peer
from swarm.sim.executor import SimulatedExecutor
from swarm.sim.loop import world_seconds
from swarm.sim.network import Node
from swarm.sim.numeric import NumericStage


class EventList:
    """Implements :class:`swarm.ports.Journal` with the world's virtual times."""

    def __init__(self) -> None:
        self.events: list[tuple[float, str, dict[str, Any]]] = []

    def record(self, kind: str, **fields: str | int | float | None) -> None:
        self.events.append((world_seconds(), kind, fields))


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
