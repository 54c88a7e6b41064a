"""Where a program's DHT node listens, and what it tells others to dial."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from swarm.dht.addresses import Endpoint, parse_announce, parse_listen
from swarm.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class DhtPlace:
    """Port 0 is any free one; nothing to announce means: what the node finds itself to listen on."""

    listen: Endpoint
    announce_host: str | None = None
    announce_port: int | None = None
    """None: the port that is listened on."""


def parse_dht_place(
    options: argparse.Namespace, listen: Endpoint | None = None, announce: Endpoint | None = None
) -> DhtPlace | None:
    """Read ``--dht-listen`` and ``--dht-announce``; their hosts are by default those of the program's other server.

    None if the program has no such server and was not told to listen.  Raises UsageError.
    """
    if options.dht_listen is not None:
        listen = parse_listen(options.dht_listen, "--dht-listen")
    elif options.dht_announce is not None:
        raise UsageError("--dht-announce needs --dht-listen HOST:PORT: at which port does that arrive here?")
    elif listen is not None:
        listen = Endpoint(host=listen.host, port=0)
    else:
        return None
    if options.dht_announce is not None:
        dialed = parse_announce(options.dht_announce, "--dht-announce")
        return DhtPlace(listen=listen, announce_host=dialed.host, announce_port=dialed.port)
    return DhtPlace(listen=listen, announce_host=announce.host if announce is not None else None)
