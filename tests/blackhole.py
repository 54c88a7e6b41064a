"""A userland proxy in front of a peer that can swallow all bytes, as a lost uplink does: nothing is closed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator


class Blackhole:
    """Passes TCP connections on to a port of this machine while ``passes`` is set."""

    def __init__(self, target_port: int) -> None:
        self.passes = asyncio.Event()
        self.passes.set()
        self._target_port = target_port
        self._writers: set[asyncio.StreamWriter] = set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self._writers.add(writer)
        await self.passes.wait()
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._writers.add(there_writer)
        await asyncio.gather(self._pump(reader, there_writer), self._pump(there_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self.passes.wait()
                writer.write(data)
                await writer.drain()
        writer.close()

    def close(self) -> None:
        """Close all connections."""
        for writer in self._writers:
            writer.close()


@contextlib.asynccontextmanager
async def blackhole(port: int, target_port: int) -> AsyncIterator[Blackhole]:
    """Listen on ``port`` of this machine in front of ``target_port``."""
    hole = Blackhole(target_port)
    server = await asyncio.start_server(hole.handle, "127.0.0.1", port)
    try:
        yield hole
    finally:
        hole.passes.set()
        hole.close()
        server.close()


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
