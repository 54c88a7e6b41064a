"""A directory in memory: records expire by the virtual clock and reach readers late."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from swarm.config import RunConfig
from swarm.ids import PeerId, RunHash
from swarm.records import LeadRecord, PeerRecord


@dataclass(slots=True)
class Board:
    """What all simulated directories share."""

    peers: dict[tuple[RunHash, int, PeerId], tuple[float, float, PeerRecord]]
    leads: dict[RunHash, tuple[float, LeadRecord]]
    configs: dict[RunHash, RunConfig]


class SimulatedDirectory:
    """Implements :class:`swarm.ports.Directory`.  ``sees_lead``: the reader finds the lease of another trainer."""

    def __init__(
        self, board: Board, *, delay_seconds: float = 0.2, lifetime_seconds: float = 30.0, sees_lead: bool = True
    ) -> None:
        self._board = board
        self._delay_seconds = delay_seconds
        self._lifetime_seconds = lifetime_seconds
        self._sees_lead = sees_lead

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    async def announce(self, record: PeerRecord) -> None:
        visible, expires = self._now() + self._delay_seconds, self._now() + self._lifetime_seconds
        await asyncio.sleep(self._delay_seconds)
        self._board.peers[(record.run, record.stage, record.peer)] = (visible, expires, record)

    async def withdraw(self, record: PeerRecord) -> None:
        self._board.peers.pop((record.run, record.stage, record.peer), None)

    async def peers(self, run: RunHash, stage: int) -> list[PeerRecord]:
        await asyncio.sleep(0.01)
        now = self._now()
        return [
            record
            for (of, at, _), (_, expires, record) in sorted(self._board.peers.items())
            if of == run and at == stage and expires > now
        ]

    async def lead(self, run: RunHash) -> LeadRecord | None:
        await asyncio.sleep(0.01)
        expires, record = self._board.leads.get(run, (0.0, None))
        return record if self._sees_lead and expires > self._now() else None

    async def renew_lead(self, record: LeadRecord) -> None:
        known = self._board.leads.get(record.run)
        if known is None or known[1].term <= record.term:
            self._board.leads[record.run] = (self._now() + self._lifetime_seconds, record)

    async def publish_run(self, config: RunConfig) -> None:
        self._board.configs[config.hash] = config

    async def runs(self) -> list[RunConfig]:
        return list(self._board.configs.values())
