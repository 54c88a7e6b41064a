"""Calls whose answer is a head and then many bytes: a state or a gradient on its way from a donor."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NoReturn, TypeVar

from swarm.errors import BadReply, TimedOut, Unreachable
from swarm.messages import StateHead
from swarm.ports import StageService
from swarm.sim.links import carry
from swarm.sim.network import Network, Node
from swarm.sim.weather import Call, Fate
from swarm.tensors import Buffer

H = TypeVar("H")

STREAM_PIECES = 8
"""In so many parts a state or gradient travels; between two of them anything may happen."""


async def fetch(
    network: Network,
    caller: Node,
    call: Call,
    seconds: float,
    run: Callable[[StageService], Awaitable[tuple[H, AsyncIterator[Buffer]]]],
) -> tuple[H, Stream]:
    """Head and bytes; ``seconds`` bounds the head and the gap between two pieces."""
    fate = network.begin(call)
    node = network.nodes.get(call.to.endpoint)
    head, chunks = await network.exchange(caller, call, fate, seconds, run)
    if node is None:
        raise Unreachable("connection reset")
    total_bytes = head.total_bytes if isinstance(head, StateHead) else None
    return head, Stream(network, caller, node, call, fate, seconds, chunks, total_bytes)


class Stream(AsyncIterator[Buffer]):
    """Bytes of a donor, piece by piece.

    The donor's part runs in the donor's process: it stands still in its pauses and breaks when it dies.  The donor
    lets go of its bytes at the end, on errors and on aclose().
    """

    def __init__(
        self,
        network: Network,
        caller: Node,
        donor: Node,
        call: Call,
        fate: Fate,
        gap_seconds: float,
        chunks: AsyncIterator[Buffer],
        total_bytes: int | None,
    ) -> None:
        """``total_bytes``: how many must come, if that is known."""
        self._network = network
        self._source, self._target = donor.machine, caller.machine
        self._donor = donor
        self._call = call
        self._fate = fate
        self._gap_seconds = gap_seconds
        self._chunks = chunks
        self._total_bytes = total_bytes
        self._received_bytes = 0
        self._pieces: deque[memoryview] = deque()
        self._sent = 0
        self._asked: asyncio.Task[Buffer | None] | None = None
        self._over = False

    async def __anext__(self) -> Buffer:
        if self._over:
            raise StopAsyncIteration
        try:
            piece = await self._next()
        except BaseException:
            self._let_go()
            raise
        if piece is None:
            self._let_go()
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """End the call."""
        self._let_go()

    async def _next(self) -> Buffer | None:
        if self._fate.kill_amid_stream and self._sent >= STREAM_PIECES // 2:
            self._donor.kill()
        try:
            async with asyncio.timeout(self._gap_seconds):
                while not self._pieces:
                    chunk = await self._from_donor()
                    self._check(len(chunk) if chunk is not None else None)
                    if chunk is None:
                        return None
                    self._pieces.extend(_cut(chunk))
        except TimeoutError:
            raise TimedOut(f"nothing came for {self._gap_seconds:.1f} s") from None
        piece = self._pieces.popleft()
        await self._travel(len(piece))
        self._sent += 1
        return piece

    async def _from_donor(self) -> Buffer | None:
        """Its next chunk; None at the end."""

        async def ask() -> Buffer | None:
            with self._network.root():
                return await anext(self._chunks, None)

        if self._donor.alive:
            self._asked = self._network.spawn(self._donor, ask())
            return await self._network.outcome(self._asked, self._call.to)
        await self._broken()

    async def _travel(self, nbytes: int) -> None:
        """However slow the link, only what stands still for the gap's seconds is given up."""
        total = self._network.weights.stream(self._call.kind, self._call.request.stage)
        nbytes = max(nbytes, total // STREAM_PIECES)
        self._source.sent_bytes[self._call.kind] += nbytes
        self._target.received_bytes[self._call.kind] += nbytes
        connection = (self._source.name, self._target.name)
        await carry(nbytes, self._source.up, self._target.down, connection=connection)
        await asyncio.sleep((self._source.latency_seconds + self._target.latency_seconds) / STREAM_PIECES)
        try:
            async with asyncio.timeout(self._gap_seconds):
                await self._network.healed(self._source.name, self._target.name)
                if not self._donor.alive:
                    await self._broken()
        except TimeoutError:
            raise TimedOut(f"nothing came for {self._gap_seconds:.1f} s") from None

    async def _broken(self) -> NoReturn:
        """The donor is dead: the reader is told, unless there is nobody who would tell."""
        if self._call.to.endpoint in self._network.dark:
            await asyncio.get_running_loop().create_future()
        raise Unreachable("connection reset")

    def _check(self, nbytes: int | None) -> None:
        """``nbytes`` more have come; None: no more will.  Raises BadReply if that is not what the head said."""
        self._received_bytes += nbytes or 0
        if self._total_bytes is not None and (
            self._received_bytes > self._total_bytes or (nbytes is None and self._received_bytes != self._total_bytes)
        ):
            raise BadReply(f"{self._received_bytes} bytes of the declared {self._total_bytes}")

    def _let_go(self) -> None:
        if not self._over:
            self._over = True
            if self._donor.alive:
                self._network.spawn(self._donor, _close(self._chunks, self._asked))


def _cut(chunk: Buffer) -> list[memoryview]:
    view = memoryview(chunk).cast("B")
    size = max(1, math.ceil(len(view) / STREAM_PIECES))
    return [view[start : start + size] for start in range(0, len(view), size)]


async def _close(chunks: AsyncIterator[Buffer], asked: asyncio.Task[Buffer | None] | None) -> None:
    """End a donor's iterator, as a server does when the call is over; after its last step has ended."""
    if asked is not None:
        await asyncio.wait({asked})
    close = getattr(chunks, "aclose", None)
    if close is not None:
        await close()
