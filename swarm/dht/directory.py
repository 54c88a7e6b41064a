"""The swarm's directory on the DHT: implements ports.Directory."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hivemind.utils import get_dht_time

from swarm.config import RunConfig
from swarm.dht.node import SwarmNode
from swarm.dht.payload import RUNS_KEY, Gone, decode, encode, key_of, lead_key, owner_of, peers_key
from swarm.ids import RunHash
from swarm.records import LeadRecord, PeerRecord

RECORD_TTL_SECONDS = 30.0
"""Life of peers' and leads' records; renew them three times as often."""
RUN_TTL_SECONDS = 300.0
"""Life of a published config."""
REQUEST_SECONDS = 10.0
"""Longest that one look-up or store may take."""

_LOG_PERIOD_SECONDS = 30.0

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Entry:
    text: str
    expiration: float


class HivemindDirectory:
    """Announces and looks up signed records through ``node``.

    A look-up merges what the responsible nodes answer with what they answered before and is still valid:
    of two records of one owner the later expiration wins.  A look-up that nobody answers gives the last view.
    """

    def __init__(
        self,
        node: SwarmNode,
        *,
        record_ttl_seconds: float = RECORD_TTL_SECONDS,
        run_ttl_seconds: float = RUN_TTL_SECONDS,
    ) -> None:
        self._node = node
        self._record_ttl = record_ttl_seconds
        self._run_ttl = run_ttl_seconds
        self._expirations: dict[tuple[str, str], float] = {}
        self._views: dict[str, dict[str, _Entry]] = {}
        self._logged_at = -math.inf

    async def announce(self, record: PeerRecord) -> None:
        await self._store(key_of(record), record.peer, encode(record), self._record_ttl)

    async def withdraw(self, record: PeerRecord) -> None:
        gone = Gone(peer=record.peer, session=record.session, run=record.run, stage=record.stage)
        # It must outlive the record that it replaces, and needs no longer life.
        await self._store(key_of(record), record.peer, encode(gone), 0.0)

    async def peers(self, run: RunHash, stage: int) -> list[PeerRecord]:
        key = peers_key(run, stage)
        found = await self._read(key, lambda _, text: decode(text))
        return [
            payload
            for owner, payload in sorted(found.items())
            if isinstance(payload, PeerRecord) and payload.peer == owner and key_of(payload) == key
        ]

    async def lead(self, run: RunHash) -> LeadRecord | None:
        found = await self._read(lead_key(run), lambda _, text: decode(text))
        leases = [
            payload
            for owner, payload in found.items()
            if isinstance(payload, LeadRecord) and owner_of(payload) == owner and payload.run == run
        ]
        return max(leases, key=lambda lease: lease.term, default=None)

    async def renew_lead(self, record: LeadRecord) -> None:
        await self._store(key_of(record), record.trainer, encode(record), self._record_ttl)

    async def publish_run(self, config: RunConfig) -> None:
        # Every peer renews it: one that comes second is not taken, and nothing is amiss.
        await self._store(RUNS_KEY, f"{config.run.name}:{config.hash}", config.published(), self._run_ttl, shared=True)

    async def runs(self) -> list[RunConfig]:
        found = await self._read(RUNS_KEY, _config)
        return [config for _, config in sorted(found.items())]

    async def _store(self, key: str, subkey: str, text: str, ttl_seconds: float, *, shared: bool = False) -> None:
        # The DHT keeps the record with the later expiration: each of ours must be later than the one before.
        before = self._expirations.get((key, subkey), -math.inf)
        expiration = max(get_dht_time() + ttl_seconds, before + 1e-3)
        self._expirations[key, subkey] = expiration
        # Own word is believed at once, whatever the network does.
        self._views.setdefault(key, {})[subkey] = _Entry(text, expiration)
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                stored = await self._node.dht.store(key, text, expiration, subkey=subkey)
        except TimeoutError:
            stored = False
        if not stored and not shared:
            self._log(f"the DHT did not take the record {key}; it is sent again at the next renewal")

    async def _read(self, key: str, parse: Callable[[str, str], T]) -> dict[str, T]:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                answer = await self._node.dht.get(key, latest=True)
        except TimeoutError:
            self._log(f"the DHT did not answer for {key}; the last view stands until its records expire")
            answer = None
        view = self._views.setdefault(key, {})
        if answer is not None and isinstance(answer.value, dict):
            for subkey, (text, expiration) in answer.value.items():
                known = view.get(subkey)
                if known is None or expiration > known.expiration:
                    view[subkey] = _Entry(text, expiration)
        now = get_dht_time()
        for subkey in [name for name, entry in view.items() if entry.expiration < now]:
            del view[subkey]
        found: dict[str, T] = {}
        for subkey, entry in view.items():
            try:
                found[subkey] = parse(subkey, entry.text)
            except ValueError as error:
                self._log(f"left out a record of {key}: {error}")
        return found

    def _log(self, message: str) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._logged_at >= _LOG_PERIOD_SECONDS:
            logger.warning(message)
            self._logged_at = now


def _config(subkey: str, text: str) -> RunConfig:
    return RunConfig.from_published(text, RunHash(subkey.rpartition(":")[2]))
