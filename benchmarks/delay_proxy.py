"""A slow link in user space: a TCP proxy before one server, which delivers each byte late and limits the rate.

    python benchmarks/delay_proxy.py 127.0.0.1:31500 127.0.0.1:31400 --ms 20 --mbit 40

Each direction is a link of its own, shared by all connections in turns of one chunk.  A chunk first takes its time on
the wire (bytes over rate), then travels for ``ms``.  What is not imitated: a connection opens at once, nothing is ever
lost, and there is no slow start.  A connection that is half closed is closed.
"""

from __future__ import annotations

import argparse
import asyncio
import selectors
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

T = TypeVar("T")

CHUNK_BYTES = 16 << 10
"""What a connection sends before it is another's turn."""
QUEUE_BYTES = 256 << 10
"""What waits here per connection and direction, beyond what is on its way, before no more is read."""
UNLIMITED_BYTES = 16 << 20
"""The same for a link without a limit: all that is on its way."""


@dataclass(eq=False, slots=True)
class Flow:
    """One direction of one connection."""

    source: asyncio.Transport
    target: asyncio.Transport | None = None
    """None: not yet connected."""
    waiting: deque[tuple[float, memoryview | None]] = field(default_factory=deque)
    """When it was read, and what; None is the end."""
    held_bytes: int = 0
    """Read and not yet delivered."""
    blocked: bool = False
    """The target takes no more for now."""
    over: bool = False


class Link:
    """One direction of a proxy: delay in seconds, rate in bytes per second (None: without a limit)."""

    def __init__(self, delay_seconds: float, bytes_per_second: float | None) -> None:
        self._delay = delay_seconds
        self._rate = bytes_per_second
        self._most_bytes = (
            UNLIMITED_BYTES if bytes_per_second is None else QUEUE_BYTES + int(delay_seconds * bytes_per_second)
        )
        self._loop = asyncio.get_running_loop()
        self._turns: deque[Flow] = deque()
        self._travelling: deque[tuple[float, Flow, memoryview | None]] = deque()
        """When it arrives; in that order."""
        self._free_at = 0.0
        """When the wire has sent what was put on it: real time, not the time at which that is noticed here."""
        self._timer: asyncio.TimerHandle | None = None

    def put(self, flow: Flow, data: memoryview | None) -> None:
        """Take what was read; None ends the flow, after all before it."""
        if not flow.waiting:
            self._turns.append(flow)
        flow.waiting.append((self._loop.time(), data))
        flow.held_bytes += 0 if data is None else len(data)
        self.steer(flow)
        if self._timer is None:
            self._advance()

    def steer(self, flow: Flow) -> None:
        """Read on, or not, from the flow's source."""
        if flow.target is None or flow.blocked or flow.held_bytes > self._most_bytes:
            flow.source.pause_reading()
        else:
            flow.source.resume_reading()

    def _advance(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._turns and self._free_at <= now:
            self._send(self._turns.popleft())
        while self._travelling and self._travelling[0][0] <= now:
            self._deliver(*self._travelling.popleft()[1:])
        due = [self._free_at] if self._turns else []
        due += [self._travelling[0][0]] if self._travelling else []
        if due:
            self._timer = self._loop.call_at(min(due), self._advance)

    def _send(self, flow: Flow) -> None:
        read_at, data = flow.waiting.popleft()
        if data is not None and self._rate is not None:
            if len(data) > CHUNK_BYTES:
                flow.waiting.appendleft((read_at, data[CHUNK_BYTES:]))
                data = data[:CHUNK_BYTES]
            self._free_at = max(self._free_at, read_at) + len(data) / self._rate
        self._travelling.append((max(self._free_at, read_at) + self._delay, flow, data))
        if flow.waiting:
            self._turns.append(flow)

    def _deliver(self, flow: Flow, data: memoryview | None) -> None:
        if flow.over or flow.target is None or flow.target.is_closing():
            return
        if data is None:
            flow.over = True
            flow.target.close()
            return
        flow.target.write(data)
        flow.held_bytes -= len(data)
        self.steer(flow)


class End(asyncio.Protocol):
    """One end of a connection: what is read goes out on ``link``; ``other`` is the end that it leaves by."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.flow: Flow | None = None
        self.other: End | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.flow = Flow(source=cast(asyncio.Transport, transport))
        self._link.steer(self.flow)

    def join(self, other: End) -> None:
        """Let what is read here leave by ``other``."""
        assert self.flow is not None
        assert other.flow is not None
        self.other = other
        self.flow.target = other.flow.source
        self._link.steer(self.flow)

    def data_received(self, data: bytes) -> None:
        assert self.flow is not None
        self._link.put(self.flow, memoryview(data))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.flow is not None:
            self._link.put(self.flow, None)
        if self.other is not None and self.other.flow is not None:
            self.other.flow.over = True  # nobody takes any more of it

    def pause_writing(self) -> None:
        self._block(True)

    def resume_writing(self) -> None:
        self._block(False)

    def _block(self, blocked: bool) -> None:
        if self.other is not None and self.other.flow is not None:
            self.other.flow.blocked = blocked
            self.other._link.steer(self.other.flow)


class DelayProxy:
    """Stands before one server; see :func:`start`."""

    def __init__(self, to: tuple[str, int], ms: float, mbit: float | None) -> None:
        rate = None if mbit is None else mbit * 1e6 / 8
        self._to = to
        self._there, self._back = Link(ms / 1000, rate), Link(ms / 1000, rate)
        self._server: asyncio.Server | None = None
        self._connecting: set[asyncio.Task[None]] = set()
        self._transports: set[asyncio.Transport] = set()

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def listen(self, host: str, port: int) -> None:
        """Take connections; port 0 is any free one.  Raises OSError."""
        proxy = self

        class Accepted(End):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                super().connection_made(transport)
                task = asyncio.ensure_future(proxy._connect(self))
                proxy._connecting.add(task)
                task.add_done_callback(proxy._connecting.discard)

        self._server = await asyncio.get_running_loop().create_server(lambda: Accepted(self._there), host, port)

    async def _connect(self, near: End) -> None:
        assert near.flow is not None
        try:
            _, far = await asyncio.get_running_loop().create_connection(lambda: End(self._back), *self._to)
        except OSError:
            near.flow.source.abort()
            return
        assert far.flow is not None
        # What was accepted long ago and has ended is forgotten here.
        self._transports = {t for t in self._transports if not t.is_closing()}
        self._transports |= {near.flow.source, far.flow.source}
        near.join(far)
        far.join(near)
        if near.flow.source.is_closing():
            far.flow.source.abort()

    async def close(self) -> None:
        """Take no more connections, and end those that are."""
        if self._server is not None:
            self._server.close()
        for task in self._connecting:
            task.cancel()
        for transport in self._transports:
            transport.abort()


async def start(listen: tuple[str, int], to: tuple[str, int], ms: float, mbit: float | None) -> DelayProxy:
    """A proxy at ``listen`` (host, port) before ``to``: ``ms`` later, at most ``mbit`` per second, each way.

    Run it in :func:`run`'s loop: timers of asyncio's default one are up to a millisecond late.
    """
    proxy = DelayProxy(to, ms, mbit)
    await proxy.listen(*listen)
    return proxy


def run(main: Coroutine[Any, Any, T]) -> T:
    """As ``asyncio.run``, but its timers are exact to some microseconds: epoll knows only milliseconds."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        return runner.run(main)


def endpoint(text: str) -> tuple[str, int]:
    """'127.0.0.1:80' -> ('127.0.0.1', 80).  Raises ValueError."""
    host, _, port = text.rpartition(":")
    return host, int(port)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("listen", type=endpoint, metavar="HOST:PORT")
    parser.add_argument("to", type=endpoint, metavar="HOST:PORT")
    parser.add_argument("--ms", type=float, default=0.0, help="later, each way")
    parser.add_argument("--mbit", type=float, help="per second, each way; default: no limit")
    options = parser.parse_args()

    async def serve() -> None:
        await start(options.listen, options.to, options.ms, options.mbit)
        await asyncio.get_running_loop().create_future()

    try:
        run(serve())
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()
