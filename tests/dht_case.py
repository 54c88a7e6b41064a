"""DHT nodes on loopback, and records to put there."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from swarm.config import RunConfig
from swarm.dht.node import SwarmNode, start_node
from swarm.ids import PeerId, RunHash, SessionId
from swarm.records import LeadRecord, Lineage, PeerRecord, PeerState, Term

RUN = RunHash("a" * 64)


CONFIG = RunConfig.model_validate(
    {
        "run": {"name": "demo"},
        "model": {"layers": 2, "width": 8, "heads": 2, "sequence_length": 8},
        "optimizer": {"learning_rate": 0.1},
        "step": {"microbatches": 2, "microbatch_size": 1},
    }
)


def peer_record(peer: PeerId, **changes: Any) -> PeerRecord:
    record = PeerRecord(
        peer=peer,
        session=SessionId("0123456789abcdef"),
        run=RUN,
        protocol=1,
        stage=0,
        endpoint="127.0.0.1:4000",
        state=PeerState.READY,
        lineage=Lineage.root(RUN),
        forward_seconds=0.25,
        queue=3,
        numeric_class="cpu torch-2",
    )
    return replace(record, **changes)


def lead_record(trainer: PeerId, number: int, counter: int = 0) -> LeadRecord:
    return LeadRecord(
        trainer=trainer,
        session=SessionId("0123456789abcdef"),
        run=RUN,
        term=Term(number, trainer),
        counter=counter,
        lineage=Lineage.root(RUN),
    )


@asynccontextmanager
async def nodes(count: int) -> AsyncIterator[list[SwarmNode]]:
    started = [await start_node()]
    try:
        while len(started) < count:
            started.append(await start_node(join=started[0].addresses))
        yield started
    finally:
        for node in reversed(started):
            await node.close()


# --- joining ----------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
