"""``swarm bootstrap``: a DHT entry point with a persistent identity."""

from __future__ import annotations

import argparse
import asyncio

from peers import life
from swarm.dht.addresses import parse_announce, parse_announce_host, parse_listen
from swarm.errors import ExitCode


def main(options: argparse.Namespace) -> ExitCode:
    """Runs until it is told to stop."""
    listen = parse_listen(options.listen)
    host, port = None, None
    if options.announce is not None:
        if ":" in options.announce.strip("[]") and not options.announce.endswith("]"):
            announce = parse_announce(options.announce)
            host, port = announce.host, announce.port
        else:
            host = parse_announce_host(options.announce)
    life.prepare()

    async def serve() -> None:
        from swarm.dht.node import start_node

        node = await start_node(
            identity_path=options.identity,
            listen_host=listen.host,
            port=listen.port,
            announce_host=host,
            announce_port=port,
        )
        try:
            for address in node.addresses:
                print(address, flush=True)
            await asyncio.get_running_loop().create_future()
        finally:
            await node.close()

    return life.run(serve(), on_sigterm=ExitCode.DONE)
