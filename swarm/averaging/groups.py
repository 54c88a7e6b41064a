"""The one service of a process that takes other members' streams, for whichever all-reduce they belong to."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing
from typing import AsyncIterator  # noqa: UP035 - hivemind reads the annotations and knows this spelling only

from hivemind.p2p import P2PContext, PeerID, ServicerBase
from hivemind.proto import averaging_pb2

from swarm.averaging.exact_allreduce import LARGEST_PART_BYTES, ExactAllReduce
from swarm.errors import ReduceFailed

PREFIX = "swarm"
"""Namespace of the service's name."""

_MOST_EARLY = 256
"""Streams that may wait for this member to begin."""
_MOST_EARLY_EACH = 4
"""Of one peer: it has one stream per attempt, and the attempts before it have ended or soon will."""
_MOST_FIRST_BYTES = LARGEST_PART_BYTES + 1024
"""A part and what is around it: the first message of a stream is kept while it waits."""
_REMEMBERED = 256
"""Groups that are over: their streams are refused at once."""


class Groups(ServicerBase):  # type: ignore[misc]  # hivemind has no types
    """Dispatches streams by group id; a stream may come before this member has begun."""

    def __init__(self, early_seconds: float) -> None:
        """A stream waits up to ``early_seconds`` for this member to begin."""
        self._early_seconds = early_seconds
        self._running: dict[bytes, ExactAllReduce] = {}
        self._over: dict[bytes, None] = {}
        self._begun = asyncio.Event()
        """Set, and replaced, whenever a group begins."""
        self._early: Counter[PeerID] = Counter()

    def begin(self, runner: ExactAllReduce) -> None:
        """Take streams for ``runner``, until :meth:`end`.  Raises ReduceFailed if its group runs, or ran, already."""
        if runner.group_id in self._running or runner.group_id in self._over:
            raise ReduceFailed("this attempt at the all-reduce was made already")
        self._running[runner.group_id] = runner
        self._begun.set()
        self._begun = asyncio.Event()

    def end(self, runner: ExactAllReduce) -> None:
        """Refuse further streams for ``runner``."""
        self._running.pop(runner.group_id, None)
        self._over[runner.group_id] = None
        while len(self._over) > _REMEMBERED:
            del self._over[next(iter(self._over))]

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """A member sends its sums of our span; the answer is that span of the mean, part by part."""
        refusal, runner, first = averaging_pb2.BAD_GROUP_ID, None, None
        try:
            async with asyncio.timeout(self._early_seconds):
                first = await anext(stream)
                if first.ByteSize() <= _MOST_FIRST_BYTES:
                    runner = await self._find(bytes(first.group_id), context.remote_id)
        except (TimeoutError, StopAsyncIteration):
            runner = None
        if runner is not None:
            refusal = averaging_pb2.PROTOCOL_VIOLATION
        # A second stream of one sender would be counted twice; a stranger's would not be counted at all.
        if runner is None or context.remote_id not in runner or context.remote_id in runner.active_senders:
            yield averaging_pb2.AveragingData(code=refusal)
            return
        async with aclosing(runner.rpc_aggregate_part(_chain(first, stream), context)) as answers:
            async for answer in answers:
                yield answer

    async def _find(self, group_id: bytes, sender: PeerID) -> ExactAllReduce | None:
        if self._unknown(group_id) and self._early.total() < _MOST_EARLY and self._early[sender] < _MOST_EARLY_EACH:
            self._early[sender] += 1
            try:
                while self._unknown(group_id):
                    await self._begun.wait()
            finally:
                self._early[sender] -= 1
                if not self._early[sender]:
                    del self._early[sender]
        return self._running.get(group_id)

    def _unknown(self, group_id: bytes) -> bool:
        return group_id not in self._running and group_id not in self._over


async def _chain(
    first: averaging_pb2.AveragingData, rest: AsyncIterator[averaging_pb2.AveragingData]
) -> AsyncIterator[averaging_pb2.AveragingData]:
    yield first
    async for message in rest:
        yield message
