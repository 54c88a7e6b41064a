"""What a peer gives to others of its stage: one consistent snapshot of its state, or the last averaged gradient."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial

from swarm.errors import Busy, Stale, TimedOut
from swarm.ids import Digest
from swarm.messages import GradientRequest, StateHead, StateRequest
from swarm.policy.deadlines import WAN, Limits, transfer_deadline
from swarm.policy.sizes import most_state_bytes
from swarm.ports import Executor, Priority, StageModule
from swarm.records import CommitRecord, Lineage
from swarm.roles.seat import Seat
from swarm.tensors import Buffer

CHUNK_BYTES = 1 << 20
DIGEST_BYTES = 4 << 20
"""Digested in one job (some milliseconds): a forward or backward waits for no more."""
MOST_COPIES = 2
"""States that are being sent at one time; each is a copy of all that the peer holds."""
RETRY_SECONDS = 2.0
"""What those are told who come while that many are."""


class Donation:
    """Answers requests for state while the peer goes on training."""

    def __init__(self, *, seat: Seat, module: StageModule, executor: Executor, limits: Limits = WAN) -> None:
        """``limits`` say how long a reader may take."""
        self._seat = seat
        self._module = module
        self._executor = executor
        self._limits = limits
        self._copies: set[Transfer] = set()
        self._copying = 0

    async def fetch_state(self, request: StateRequest) -> tuple[StateHead, AsyncIterator[Buffer]]:
        """A copy taken between two jobs of the compute thread: never a mix of two versions.

        Raises Busy while MOST_COPIES others are served.
        """
        self._seat.check_place(request.run, request.stage)
        self._seat.check_ready()
        # A reader that went away without a word holds its place until its time is over, and no longer.
        for copy in [copy for copy in self._copies if copy.expired]:
            copy.end()
        if len(self._copies) + self._copying >= MOST_COPIES:
            raise Busy(RETRY_SECONDS)
        self._copying += 1
        try:
            return await self._copy()
        finally:
            self._copying -= 1

    async def _copy(self) -> tuple[StateHead, Transfer]:
        def snapshot() -> tuple[Lineage, tuple[CommitRecord, ...], str, Sequence[Buffer]]:
            layout, buffers = self._module.snapshot()
            return self._seat.lineage, tuple(self._seat.commits), layout, buffers

        lineage, commits, layout, buffers = await self._executor.run(Priority.BACKWARD, snapshot)
        total_bytes = sum(len(memoryview(b).cast("B")) for b in buffers)
        head = StateHead(
            lineage=lineage,
            commits=commits,
            digest=await self._digest(buffers),
            total_bytes=total_bytes,
            layout=layout,
        )
        seconds = transfer_deadline(self._limits, most_state_bytes(self._module.gradient_bytes), 1.0)
        transfer = Transfer(buffers, seconds, on_end=self._copies.discard)
        self._copies.add(transfer)
        return head, transfer

    async def _digest(self, buffers: Sequence[Buffer]) -> Digest:
        """Of all bytes, a few MiB a job.  At the priority of the copy: a busy peer never gets to its background."""
        digest = hashlib.sha256()

        def update(parts: Sequence[memoryview]) -> None:
            for part in parts:
                digest.update(part)

        for parts in _batches(_pieces(buffers, DIGEST_BYTES), DIGEST_BYTES):
            await self._executor.run(Priority.BACKWARD, partial(update, parts))
        return Digest(digest.hexdigest())

    async def fetch_gradient(self, request: GradientRequest) -> AsyncIterator[Buffer]:
        """The averaged gradient of the commit on top of ``request.parent``, if it is still kept; not a copy."""
        self._seat.check_place(request.run, request.stage)

        def view() -> Buffer:
            kept = self._seat.kept
            if kept is None or kept[0] != request.parent or kept[1].digest != request.digest:
                raise Stale(f"the reduced gradient of step {request.parent.length} is not kept here")
            return self._module.reduced_bytes()

        buffer = await self._executor.run(Priority.CONTROL, view)
        return Transfer([buffer], transfer_deadline(self._limits, self._module.gradient_bytes, 1.0))


class Transfer(AsyncIterator[Buffer]):
    """Bytes on their way to one reader, for at most ``seconds``; they are let go at the end, however it comes."""

    def __init__(
        self, buffers: Sequence[Buffer], seconds: float, on_end: Callable[[Transfer], None] | None = None
    ) -> None:
        self._pieces = _pieces(buffers, CHUNK_BYTES)
        self._seconds = seconds
        self._deadline = asyncio.get_running_loop().time() + seconds
        self._on_end = on_end

    @property
    def expired(self) -> bool:
        """Whether its time is over."""
        return asyncio.get_running_loop().time() > self._deadline

    async def __anext__(self) -> Buffer:
        if self.expired:
            self.end()
            raise TimedOut(f"the reader took longer than {self._seconds:.0f} s")
        piece = next(self._pieces, None)
        if piece is None:
            self.end()
            raise StopAsyncIteration
        return piece

    def end(self) -> None:
        """Let the bytes go."""
        self._pieces = iter(())
        if self._on_end is not None:
            self._on_end(self)

    async def aclose(self) -> None:
        """As a generator's: the server calls it when the call is over."""
        self.end()


def _pieces(buffers: Sequence[Buffer], most_bytes: int) -> Iterator[memoryview]:
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        for start in range(0, len(view), most_bytes):
            yield view[start : start + most_bytes]


def _batches(pieces: Iterator[memoryview], most_bytes: int) -> Iterator[list[memoryview]]:
    """A stage has many small tensors, and each job waits its turn."""
    batch: list[memoryview] = []
    for piece in pieces:
        if batch and sum(map(len, batch)) + len(piece) > most_bytes:
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch
