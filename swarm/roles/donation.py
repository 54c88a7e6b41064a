"""What a peer gives to others of its stage: one consistent snapshot of its state, or the last averaged gradient."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence

from swarm.errors import Stale
from swarm.ids import Digest
from swarm.messages import GradientRequest, StateHead, StateRequest
from swarm.ports import Executor, Priority, StageModule
from swarm.records import CommitRecord, Lineage
from swarm.roles.seat import Seat
from swarm.tensors import Buffer

CHUNK_BYTES = 1 << 20


class Donation:
    """Answers requests for state while the peer goes on training."""

    def __init__(self, *, seat: Seat, module: StageModule, executor: Executor) -> None:
        self._seat = seat
        self._module = module
        self._executor = executor

    async def fetch_state(self, request: StateRequest) -> tuple[StateHead, AsyncIterator[Buffer]]:
        """A copy taken between two jobs of the compute thread: never a mix of two versions."""
        self._seat.check_place(request.run, request.stage)
        self._seat.check_ready()

        def copy() -> tuple[Lineage, tuple[CommitRecord, ...], str, Sequence[Buffer]]:
            layout, buffers = self._module.snapshot()
            return self._seat.lineage, tuple(self._seat.commits), layout, buffers

        lineage, commits, layout, buffers = await self._executor.run(Priority.BACKWARD, copy)
        head = StateHead(
            lineage=lineage,
            commits=commits,
            digest=await self._executor.run(Priority.BACKGROUND, lambda: _digest(buffers)),
            total_bytes=sum(len(memoryview(b).cast("B")) for b in buffers),
            layout=layout,
        )
        return head, _chunks(buffers)

    async def fetch_gradient(self, request: GradientRequest) -> AsyncIterator[Buffer]:
        """The averaged gradient of the commit on top of ``request.parent``, if it is still kept."""
        self._seat.check_place(request.run, request.stage)

        def view() -> Buffer:
            kept = self._seat.kept
            if kept is None or kept[0] != request.parent or kept[1].digest != request.digest:
                raise Stale(f"the reduced gradient of step {request.parent.length} is not kept here")
            return self._module.reduced_bytes()

        return _chunks([await self._executor.run(Priority.CONTROL, view)])


def _digest(buffers: Sequence[Buffer]) -> Digest:
    digest = hashlib.sha256()
    for buffer in buffers:
        digest.update(buffer)
    return Digest(digest.hexdigest())


async def _chunks(buffers: Sequence[Buffer]) -> AsyncIterator[Buffer]:
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]
