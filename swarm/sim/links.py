"""A link whose bandwidth its connections share equally at every moment (processor sharing, the fluid limit of TCP).

Within a connection messages go one after another: what a sender has written lies in order in its buffers.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from swarm.sim.loop import world_later, world_seconds


@dataclass(slots=True, eq=False)
class Transfer:
    """One message on its way through a link."""

    nbytes: int
    connection: Hashable
    done: asyncio.Future[None]
    begun: bool = False
    """False while it waits for those before it in its connection."""


class Link:
    """One direction of a machine's connection to the world.  ``bytes_per_second`` None: without limit.

    Every connection gets the same share, so all are equally far along a common count of bytes per connection; a
    transfer that begins when the count is V ends when it is V plus its size.  One timer, for whichever ends first.
    """

    def __init__(self, bytes_per_second: float | None = None) -> None:
        self.bytes_per_second = bytes_per_second
        self.carried_bytes = 0
        self._each_bytes = 0.0
        """Bytes that a connection which has been busy from the start would have carried."""
        self._at = 0.0
        self._ends: list[tuple[float, int, Transfer]] = []
        self._lines: dict[Hashable, deque[Transfer]] = {}
        """By connection: the transfer under way and those behind it."""
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def active(self) -> int:
        """Connections that carry something."""
        return len(self._lines)

    def begin(self, nbytes: int, connection: Hashable) -> Transfer | None:
        """A transfer; done once ``nbytes`` are through.  None: there is nothing to wait for."""
        self.carried_bytes += nbytes
        if self.bytes_per_second is None or nbytes <= 0:
            return None
        transfer = Transfer(nbytes, connection, asyncio.get_running_loop().create_future())
        line = self._lines.get(connection)
        if line is not None:
            line.append(transfer)
        else:
            self._advance()
            self._lines[connection] = deque([transfer])
            self._start(transfer)
            self._set_timer()
        return transfer

    def give_up(self, transfer: Transfer) -> None:
        """Whoever waited for it does so no longer; the others get its share."""
        if transfer.done.done() and not transfer.done.cancelled():
            return
        transfer.done.cancel()
        self._advance()
        if transfer.begun:
            self._next(transfer.connection)
        else:
            self._lines[transfer.connection].remove(transfer)
        self._set_timer()

    def _start(self, transfer: Transfer) -> None:
        transfer.begun = True
        heapq.heappush(self._ends, (self._each_bytes + transfer.nbytes, next(self._order), transfer))

    def _next(self, connection: Hashable) -> None:
        """The connection's first transfer is over: the one behind it begins."""
        line = self._lines[connection]
        line.popleft()
        if line:
            self._start(line[0])
        else:
            del self._lines[connection]

    def _advance(self) -> None:
        now = world_seconds()
        if self._lines and self.bytes_per_second is not None:
            self._each_bytes += (now - self._at) * self.bytes_per_second / len(self._lines)
        self._at = now

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and self._ends[0][2].done.done():
            heapq.heappop(self._ends)  # given up
        if self._ends and self.bytes_per_second is not None:
            left = max(0.0, self._ends[0][0] - self._each_bytes) * len(self._lines) / self.bytes_per_second
            self._timer = world_later(left, self._deliver)

    def _deliver(self) -> None:
        self._timer = None
        self._advance()
        slack = 0.5 + 1e-12 * self._each_bytes  # of a byte: time itself is not finer than that
        while self._ends and self._ends[0][0] <= self._each_bytes + slack:
            transfer = heapq.heappop(self._ends)[2]
            if not transfer.done.done():
                transfer.done.set_result(None)
                self._next(transfer.connection)
        self._set_timer()


async def carry(nbytes: int, *links: Link, connection: Hashable = None) -> None:
    """Return once ``nbytes`` are through all of ``links``, which carry them at the same time.

    ``connection``: what they travel in; by default one of their own.
    """
    place = object() if connection is None else connection
    begun = [(link, transfer) for link in links if (transfer := link.begin(nbytes, place)) is not None]
    try:
        for _, transfer in begun:
            await transfer.done
    except asyncio.CancelledError:
        for link, transfer in begun:
            link.give_up(transfer)
        raise
