"""Channels: one connection per endpoint, made at the first call, kept while it is of use."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass, field

import grpc

from swarm.errors import BadRequest, Unreachable
from swarm.rpc.options import CHANNEL_OPTIONS, Options
from swarm.wire import fields

MAX_CHANNELS = 512
"""Over this, channels without calls are closed, least recently used first: peers come and go for weeks."""


@dataclass(slots=True)
class _Entry:
    channel: grpc.aio.Channel
    calls: weakref.WeakSet[grpc.aio.Call] = field(default_factory=weakref.WeakSet)

    @property
    def idle(self) -> bool:
        return all(call.done() for call in self.calls)


class Channels:
    """Channels by endpoint.  Made in the loop that uses them, never before."""

    def __init__(self, options: Options = CHANNEL_OPTIONS, most: int = MAX_CHANNELS) -> None:
        self._options = options
        self._most = most
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._closed = False

    async def get(self, endpoint: str) -> grpc.aio.Channel:
        """The channel to ``endpoint`` ("HOST:PORT").  Raises Unreachable if it is malformed, or after close()."""
        if endpoint not in self._entries and len(self._entries) >= self._most:
            await self._evict()
        # Nothing is awaited from here on: what is returned is open, and only its user's turn can close it.
        if self._closed:
            raise Unreachable("the client is closed")
        entry = self._entries.get(endpoint)
        if entry is None:
            try:
                # Explicitly DNS: gRPC would read "unix:1" as a socket's name.
                target = f"dns:///{fields.endpoint('endpoint', endpoint)}"
            except BadRequest as error:
                raise Unreachable(str(error)) from None
            entry = self._entries[endpoint] = _Entry(grpc.aio.insecure_channel(target, options=self._options))
        self._entries.move_to_end(endpoint)
        return entry.channel

    def watch(self, endpoint: str, call: grpc.aio.Call) -> None:
        """Keep the channel to ``endpoint`` open while ``call`` runs."""
        if endpoint in self._entries:
            self._entries[endpoint].calls.add(call)

    async def close(self) -> None:
        """Close all; their calls end as Unreachable."""
        self._closed = True
        while self._entries:
            _, entry = self._entries.popitem()
            await entry.channel.close()

    async def _evict(self) -> None:
        victim = next((key for key, entry in self._entries.items() if entry.idle), None)
        if victim is not None:
            await self._entries.pop(victim).channel.close()
