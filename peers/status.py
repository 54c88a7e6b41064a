"""``swarm status``: who serves what, at which version, how fast; which stage has no peer."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from peers import life
from peers.reachability import is_reachable
from swarm import PROTOCOL_VERSION
from swarm.config import RunConfig
from swarm.dht.addresses import parse_join
from swarm.errors import CannotJoin, ExitCode
from swarm.ids import short
from swarm.ports import Directory
from swarm.records import PeerRecord

WATCH_SECONDS = 2.0


def main(options: argparse.Namespace) -> ExitCode:
    """One look, or (--watch) one after another until it is told to stop."""
    join = [str(address) for address in parse_join(options.join)]
    life.prepare()
    return life.run(_look(join, options), on_sigterm=ExitCode.DONE)


async def _look(join: list[str], options: argparse.Namespace) -> None:
    from swarm.dht.directory import HivemindDirectory
    from swarm.dht.node import start_node

    node = await start_node(join=join, client=True)
    try:
        directory = HivemindDirectory(node)
        while True:
            found = [await _status(directory, config) for config in await _runs(directory, options.run)]
            if options.json:
                print(json.dumps({"runs": found}, indent=2))
            else:
                _show(found, clear=options.watch)
            if not options.watch:
                return
            await asyncio.sleep(WATCH_SECONDS)
    finally:
        await node.close()


async def _runs(directory: Directory, name: str | None) -> list[RunConfig]:
    runs = [config for config in await directory.runs() if name in (None, config.run.name)]
    if name is not None and not runs:
        raise CannotJoin(f"no run '{name}' is published in this swarm")
    return runs


async def _status(directory: Directory, config: RunConfig) -> dict[str, Any]:
    lead = await directory.lead(config.hash)
    stages = []
    for stage in range(config.model.stage_count):
        peers = await asyncio.gather(*(_peer(record) for record in await directory.peers(config.hash, stage)))
        ready = [peer for peer in peers if peer["state"] == "ready" and peer["compatible"] and peer["reachable"]]
        stages.append({"stage": stage, "peers": list(peers), "empty": not ready})
    return {
        "run": config.run.name,
        "config_hash": config.hash,
        "lead": None
        if lead is None
        else {"trainer": lead.trainer, "term": lead.term.number, "committed_steps": lead.lineage.length},
        "stages": stages,
    }


async def _peer(record: PeerRecord) -> dict[str, Any]:
    rate = 1.0 / (3 * record.forward_seconds) if record.forward_seconds > 0 else None
    return {
        "peer": record.peer,
        "endpoint": record.endpoint,
        "state": str(record.state),
        "version": record.lineage.length,
        "microbatches_per_second": rate,
        "queue": record.queue,
        "numeric_class": record.numeric_class,
        "compatible": record.protocol == PROTOCOL_VERSION,
        "reachable": await is_reachable(record.endpoint),
    }


def _show(found: list[dict[str, Any]], *, clear: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if clear:
        console.clear()
    if not found:
        console.print("no run is published in this swarm yet: start `swarm train`")
    for run in found:
        lead = run["lead"]
        led = f"led by {short(lead['trainer'])}, {lead['committed_steps']} steps committed" if lead else "no trainer"
        console.print(f"run {run['run']} ({run['config_hash'][:12]}): {led}", markup=False)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("stage", "peer", "state", "version", "mb/s", "queue", "endpoint"):
            table.add_column(name, no_wrap=True)
        for stage in run["stages"]:
            for peer in stage["peers"]:
                rate = peer["microbatches_per_second"]
                state = peer["state"] if peer["reachable"] else "unreachable"
                state = state if peer["compatible"] else "other version"
                table.add_row(
                    str(stage["stage"]), Text(short(peer["peer"])), state, str(peer["version"]),
                    f"{rate:.1f}" if rate else "-", str(peer["queue"]), Text(peer["endpoint"]),
                )  # fmt: skip
            if stage["empty"]:
                table.add_row(str(stage["stage"]), "NO PEER READY", style="red")
        console.print(table)
