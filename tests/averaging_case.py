"""A group of averagers on loopback, and requests for them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch
from hivemind.proto import averaging_pb2, runtime_pb2

from swarm.averaging.averager import ButterflyAverager
from swarm.dht.node import SwarmNode, start_node
from swarm.ids import PeerId, RunHash, SessionId
from swarm.messages import Contact, GroupMember, ReduceRequest, StepKey
from swarm.records import Lineage, Term

RUN = RunHash("a" * 64)


PATIENCE_SECONDS = 1.0


def reduce_request(peers: Sequence[PeerId], tokens: Sequence[int], attempt: int = 0) -> ReduceRequest:
    return ReduceRequest(
        key=StepKey(run=RUN, stage=0, term=Term(1, peers[0]), lineage=Lineage.root(RUN)),
        attempt=attempt,
        members=tuple(
            GroupMember(
                contact=Contact(peer=peer, session=SessionId("0" * 16), endpoint="127.0.0.1:1"),
                microbatches=(),
                tokens=count,
            )
            for peer, count in zip(peers, tokens, strict=True)
        ),
        total_tokens=sum(tokens),
        deadline_seconds=15.0,
    )


def gradients(count: int, size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(size, generator=generator) for _ in range(count)]


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


class Group:
    def __init__(self, nodes: list[SwarmNode], averagers: list[ButterflyAverager]) -> None:
        self.nodes = nodes
        self.averagers = averagers
        self.peers = [node.peer_id for node in nodes]

    async def outcomes(
        self, request: ReduceRequest, sums: Sequence[torch.Tensor], members: Sequence[int] | None = None
    ) -> list[Any]:
        indices = range(len(self.nodes)) if members is None else members
        calls = [self.averagers[index].reduce(request, sums[index]) for index in indices]
        return await asyncio.gather(*calls, return_exceptions=True)


@asynccontextmanager
async def group_of(count: int) -> AsyncIterator[Group]:
    nodes = [await start_node()]
    try:
        while len(nodes) < count:
            nodes.append(await start_node(join=nodes[0].addresses))
        yield Group(nodes, [await ButterflyAverager.start(n.p2p, patience_seconds=PATIENCE_SECONDS) for n in nodes])
    finally:
        for node in reversed(nodes):
            await node.close()


# --- hostile members --------------------------------------------------------------


def part(weight: float = 3.0, **changes: Any) -> averaging_pb2.AveragingData:
    fields: dict[str, Any] = {
        "compression": runtime_pb2.NONE,
        "dtype": "float32",
        "size": [50],
        "buffer": b"\0" * 200,
        **changes,
    }
    return averaging_pb2.AveragingData(
        code=averaging_pb2.PART_FOR_AVERAGING, weight=weight, tensor_part=runtime_pb2.Tensor(**fields)
    )
