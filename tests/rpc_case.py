"""A server and a client on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from swarm.messages import (
    Contact,
    Greeting,
)
from tests.stage_double import (
    RUN,
    TERM,
)

T = TypeVar("T")


GREETING = Greeting(run=RUN, term=TERM)


def run(main: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(60):
            return await main

    return asyncio.run(limited())


@asynccontextmanager
async def _counting(to: Contact) -> AsyncIterator[tuple[Contact, dict[str, int]]]:
    """A relay in front of a server that counts the bytes of both directions."""
    counts = {"to server": 0, "to client": 0}
    port = int(to.endpoint.rpartition(":")[2])

    async def pump(name: str, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            counts[name] += len(data)
            sink.write(data)
            await sink.drain()
        sink.write_eof()

    async def relay(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        relays.append(task)
        upstream, downstream = await asyncio.open_connection("127.0.0.1", port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(pump("to server", source, downstream))
                group.create_task(pump("to client", upstream, sink))
        finally:
            for writer in (sink, downstream):
                writer.close()
                await writer.wait_closed()

    relays: list[asyncio.Task[Any]] = []
    async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
        yield replace(to, endpoint=f"127.0.0.1:{server.sockets[0].getsockname()[1]}"), counts
    for task in relays:
        task.cancel()
    await asyncio.gather(*relays, return_exceptions=True)
