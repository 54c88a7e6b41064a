"""A link whose bandwidth all transfers share equally at every moment (processor sharing, the fluid limit of TCP)."""

from __future__ import annotations

import asyncio
import heapq
import itertools

from swarm.sim.loop import world_later, world_seconds


class Link:
    """One direction of a machine's connection.  ``bytes_per_second`` None: without limit.

    Every transfer gets the same share, so all are equally far along a common count of bytes per transfer; one that
    begins when the count is V ends when it is V plus its size.  One timer, for whichever ends first.
    """

    def __init__(self, bytes_per_second: float | None = None) -> None:
        self.bytes_per_second = bytes_per_second
        self.carried_bytes = 0
        self._each_bytes = 0.0
        """Bytes that a transfer which has been there from the start would have got."""
        self._at = 0.0
        self._transfers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._active = 0
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def active(self) -> int:
        """Transfers under way."""
        return self._active

    def begin(self, nbytes: int) -> asyncio.Future[None] | None:
        """A transfer; done once ``nbytes`` are through.  None: there is nothing to wait for."""
        self.carried_bytes += nbytes
        if self.bytes_per_second is None or nbytes <= 0:
            return None
        self._advance()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._active += 1
        heapq.heappush(self._transfers, (self._each_bytes + nbytes, next(self._order), done))
        self._set_timer()
        return done

    def give_up(self, transfer: asyncio.Future[None]) -> None:
        """Whoever waited for it does so no longer; the others get its share."""
        if transfer.done() and not transfer.cancelled():
            return
        transfer.cancel()
        self._advance()
        self._active -= 1
        self._set_timer()

    def _advance(self) -> None:
        now = world_seconds()
        if self._active and self.bytes_per_second is not None:
            self._each_bytes += (now - self._at) * self.bytes_per_second / self._active
        self._at = now

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._transfers and self._transfers[0][2].done():
            heapq.heappop(self._transfers)  # given up
        if self._transfers and self.bytes_per_second is not None:
            left = max(0.0, self._transfers[0][0] - self._each_bytes) * self._active / self.bytes_per_second
            self._timer = world_later(left, self._deliver)

    def _deliver(self) -> None:
        self._timer = None
        self._advance()
        slack = 0.5 + 1e-12 * self._each_bytes  # of a byte: time itself is not finer than that
        while self._transfers and self._transfers[0][0] <= self._each_bytes + slack:
            done = heapq.heappop(self._transfers)[2]
            if not done.done():
                self._active -= 1
                done.set_result(None)
        self._set_timer()


async def carry(nbytes: int, *links: Link) -> None:
    """Return once ``nbytes`` are through all of ``links``, which carry them at the same time."""
    begun = [(link, transfer) for link in links if (transfer := link.begin(nbytes)) is not None]
    try:
        for _, transfer in begun:
            await transfer
    except asyncio.CancelledError:
        for link, transfer in begun:
            link.give_up(transfer)
        raise
