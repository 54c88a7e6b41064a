"""The reducer's side of an all-reduce: adds the members' parts in member order and knows their weight."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from hivemind.averaging.partition import AllreduceException, BannedException
from numpy.typing import NDArray

Values = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanPart:
    """One part of the mean, and the weight of all that went into it."""

    values: Values
    weight: float


@dataclass(slots=True)
class _Slot:
    values: dict[int, Values] = field(default_factory=dict)
    present: set[int] = field(default_factory=set)
    mean: asyncio.Future[MeanPart] | None = None


class PartSums:
    """Collects each part from every sender; stands in for hivemind's TensorPartReducer.

    The mean of a part is its sum in member order, so the same parts give the same bits in whatever order they
    come, divided by the weight of the senders that it came from.  A sender of weight 0 adds nothing.
    """

    def __init__(self, part_sizes: Sequence[int], weights: Sequence[int]) -> None:
        """``weights`` are the tokens behind each sender's sums, in member order."""
        self.part_sizes = tuple(part_sizes)
        self.num_parts = len(self.part_sizes)
        self.finished = asyncio.Event()
        self._weights = tuple(weights)
        self._slots = [_Slot() for _ in self.part_sizes]
        self._failed: set[int] = set()

    async def add(self, sender: int, part: int, values: Values | None) -> MeanPart:
        """Add a part (None from a sender of weight 0) and wait for the mean.

        ``values`` is read until then and not changed.  Raises BannedException or AllreduceException.
        """
        if self.finished.is_set():
            raise AllreduceException("the all-reduce is over")
        if sender in self._failed:
            raise BannedException(f"sender {sender} was banned")
        slot = self._slots[part]
        if sender in slot.present:
            raise AllreduceException(f"sender {sender} sent part {part} twice")
        slot.present.add(sender)
        if values is not None:
            slot.values[sender] = values
        if slot.mean is None:
            slot.mean = asyncio.get_running_loop().create_future()
        self._finish_if_complete(part)
        return await asyncio.shield(slot.mean)  # one waiter's cancellation is not the others'

    def has_all_of(self, sender: int) -> bool:
        """Whether ``sender`` has sent every part."""
        return all(sender in slot.present for slot in self._slots)

    def on_sender_failed(self, sender: int) -> None:
        """Wait no longer for what ``sender`` did not send yet."""
        self._failed.add(sender)
        for part in range(self.num_parts):
            self._finish_if_complete(part)

    def finalize(self) -> None:
        """Release all values, and everyone who waits."""
        self.finished.set()
        for slot in self._slots:
            slot.values.clear()
            if slot.mean is not None and not slot.mean.done():
                slot.mean.set_exception(AllreduceException("the all-reduce is over"))
                slot.mean.exception()  # seen: nobody may be waiting any more

    def _finish_if_complete(self, part: int) -> None:
        slot = self._slots[part]
        if slot.mean is None or slot.mean.done() or len(slot.present | self._failed) < len(self._weights):
            return
        weight = float(sum(self._weights[sender] for sender in slot.present))
        total = np.zeros(self.part_sizes[part], dtype=np.float32)
        for sender in sorted(slot.values):
            total += slot.values[sender]
        if weight > 0:
            total /= np.float32(weight)
        slot.values.clear()
        slot.mean.set_result(MeanPart(values=total, weight=weight))
