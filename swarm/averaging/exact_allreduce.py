"""hivemind's butterfly all-reduce, made exact: sums instead of weighted means, and no silent failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import numpy as np
import torch
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.averaging.partition import AllreduceException, BannedException
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID, ServicerBase
from hivemind.proto import averaging_pb2

from swarm.averaging.part_sums import MeanPart, PartSums, Values
from swarm.averaging.part_wire import decode_mean, decode_part, encode_mean, encode_part
from swarm.errors import ReduceFailed

LARGEST_PART_BYTES = 512 * 1024


class ExactAllReduce(AllReduceRunner):  # type: ignore[misc]  # hivemind has no types
    """One all-reduce of flat float32 sums among a fixed group, each member the reducer of one span.

    Of hivemind's runner it keeps the cut into spans and parts, the streams and the banning of silent senders.
    It differs in that reducers send the mean itself, with its weight; that a member's own part takes
    the same way; that a missing part is an error; and that no thread reads the gradient.
    """

    def __init__(
        self,
        *,
        p2p: P2P,
        servicer_type: type[ServicerBase],
        prefix: str,
        group_id: bytes,
        members: Sequence[PeerID],
        tokens: Sequence[int],
        sums: Values,
        sender_seconds: float,
        reducer_seconds: float,
    ) -> None:
        """``sums`` (N,) is read until :meth:`reduce` ends; ``tokens`` are the weights in member order."""
        self._index = list(members).index(p2p.peer_id)
        self._tokens = tuple(tokens)
        self._total = float(sum(tokens))
        span = -(-sums.size // len(members)) * 4
        super().__init__(
            p2p=p2p,
            servicer_type=servicer_type,
            prefix=prefix,
            group_id=group_id,
            tensors=(torch.from_numpy(sums),),
            weight=float(tokens[self._index]),
            ordered_peer_ids=tuple(members),
            peer_fractions=(1.0,) * len(members),
            sender_timeout=sender_seconds,
            reducer_timeout=reducer_seconds,
            part_size_bytes=max(4, min(LARGEST_PART_BYTES, span)),
        )
        # Of hivemind's container only the cut is used: it would keep all parts and then join copies of them.
        self._spans = [
            [part.numel() for part, _ in self.tensor_part_container._input_parts_by_peer[index]]
            for index in range(len(members))
        ]
        self.tensor_part_reducer.finished.set()  # hivemind's own: it holds nothing yet
        self._part_sums = PartSums(self._spans[self._index], self._tokens)
        self.tensor_part_reducer: PartSums = self._part_sums  # where the base class looks for it
        self._sums: Values | None = sums
        self._mean: Values = np.empty(sums.size, dtype=np.float32)
        self._problems: dict[PeerID, str] = {}
        self._missed: set[PeerID] = set()
        self._filled = 0
        self._calls: dict[PeerID, asyncio.Task[None]] = {}

    async def reduce(self) -> Values:
        """The mean (N,).  Raises ReduceFailed unless every part of it holds the whole group's weight."""
        try:
            async with asyncio.TaskGroup() as group:
                if self._spans[self._index]:
                    group.create_task(self._handle_missing_senders())
                for peer, parts in zip(self.ordered_peer_ids, self._spans, strict=True):
                    if parts:
                        self._calls[peer] = group.create_task(self._communicate_with_peer(peer))
        finally:
            self._sums = None
            self.finalize()
        if self._filled != self._mean.size:
            raise self.failure("the mean is incomplete")
        return self._mean

    def failure(self, what: str) -> ReduceFailed:
        """The error that tells ``what`` happened, and who was missed until now."""
        missed = {peer.to_base58() for peer in self._missed | self.banned_senders}
        missing = {*self._problems, *self.banned_senders}
        default = "what was agreed did not come in time"
        reasons = [f"{peer.to_base58()[-4:]}: {self._problems.get(peer, default)}" for peer in missing]
        return ReduceFailed("; ".join([what, *sorted(reasons)]), unreachable=tuple(sorted(missed)))

    async def _communicate_with_peer(self, peer_id: PeerID) -> None:
        """Send one member its span of our sums, and receive that span of the mean."""
        index = self.ordered_peer_ids.index(peer_id)
        offsets = self._offsets(index)
        if peer_id == self.peer_id:
            for part, (start, end) in enumerate(offsets):
                self._put(start, await self._part_sums.add(index, part, self._own(start, end)))
            return
        try:
            async with asyncio.timeout(self.reducer_timeout):
                stream = await self._get_peer_stub(peer_id).rpc_aggregate_part(self._generate_input_for_peer(index))
            async with aclosing(stream):
                for start, end in offsets:
                    async with asyncio.timeout(self.reducer_timeout):
                        message = await anext(stream)
                    self._put(start, decode_mean(message, end - start))
                # Its handler must end by itself: closing the stream under it looks like a failure of ours.
                async with asyncio.timeout(self.reducer_timeout):
                    async for _ in stream:
                        raise AllreduceException("more parts than agreed")
        except (AllreduceException, P2PHandlerError) as error:
            self._problems[peer_id] = str(error)[:200]  # it answers: others may have failed it
        except (TimeoutError, StopAsyncIteration, OSError, EOFError, P2PDaemonError) as error:
            self._problems[peer_id] = str(error).strip()[:200] or type(error).__name__
            self._missed.add(peer_id)
            # What it did not send by now it will not send, or it cannot be complete without our part.
            await self._ban_sender(peer_id)

    async def _generate_input_for_peer(self, peer_index: int) -> AsyncIterator[averaging_pb2.AveragingData]:
        for part, (start, end) in enumerate(self._offsets(peer_index)):
            if self._part_sums.finished.is_set():
                return
            yield averaging_pb2.AveragingData(
                code=averaging_pb2.PART_FOR_AVERAGING,
                group_id=self.group_id if part == 0 else b"",
                tensor_part=encode_part(self._own(start, end)),
                weight=self.weight,
            )

    async def _accumulate_parts_streaming(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], sender_index: int
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        sizes = self._spans[self._index]
        part = 0
        try:
            async for message in stream:
                if part == len(sizes):
                    raise AllreduceException("more parts than agreed")
                try:
                    values = decode_part(message, sizes[part], self._tokens[sender_index])
                except AllreduceException as error:
                    self._problems[self.sender_peer_ids[sender_index]] = str(error)[:200]
                    raise
                try:
                    mean = await self._part_sums.add(sender_index, part, values)
                except BannedException:
                    yield averaging_pb2.AveragingData(code=averaging_pb2.CANCELLED)
                    return
                part += 1
                yield encode_mean(mean)
        finally:
            if part != len(sizes):
                await self._ban_sender(self.sender_peer_ids[sender_index])

    async def _ban_sender(self, peer_id: PeerID) -> None:
        """Wait no longer for a member that did not send all of its parts, nor for its span of the mean."""
        if self._part_sums.has_all_of(self.sender_peer_ids.index(peer_id)):
            return
        await super()._ban_sender(peer_id)
        call = self._calls.get(peer_id)
        if call is not None and call is not asyncio.current_task():
            call.cancel()

    def _own(self, start: int, end: int) -> Values | None:
        if self._tokens[self._index] == 0:
            return None
        if self._sums is None:
            raise AllreduceException("the all-reduce is over")
        return self._sums[start:end]

    def _put(self, start: int, mean: MeanPart) -> None:
        if mean.weight == self._total:
            self._mean[start : start + mean.values.size] = mean.values
            self._filled += mean.values.size

    def _offsets(self, index: int) -> list[tuple[int, int]]:
        """(start, end) of each part of a member's span."""
        start = sum(sum(sizes) for sizes in self._spans[:index])
        offsets = []
        for size in self._spans[index]:
            offsets.append((start, start + size))
            start += size
        return offsets
