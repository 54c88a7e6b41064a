"""Whether anything listens at an endpoint, as seen from here."""

from __future__ import annotations

import asyncio
from contextlib import suppress

DIAL_SECONDS = 3.0


async def is_reachable(endpoint: str) -> bool:
    """True if a TCP connection to ``HOST:PORT`` opens within DIAL_SECONDS; nothing is said over it."""
    host, _, port = endpoint.rpartition(":")
    try:
        async with asyncio.timeout(DIAL_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True
