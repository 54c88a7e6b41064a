"""Peers started at the same instant end up in one swarm, every time (learning-at-home/hivemind#624)."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

from peers.local.children import Children
from swarm.telemetry.journal import read_events
from tests.fault_swarm import FaultSwarm, options_for, quiet_screen, run_file

PEERS = (2, 2, 2)
STEPS = 20
DROPS = ("peer_suspected", "peer_lost", "peer_diverged")


async def launch(folder: Path) -> list[str]:
    """One swarm; returns what is wrong."""
    logs = folder / "logs"
    async with Children(logs) as children:
        swarm = FaultSwarm(options_for(run_file(folder), logs, PEERS, STEPS), children, {})
        await swarm.start()
        await swarm.train(quiet_screen())
        await swarm.until(lambda: all(peer.peer for peer in swarm.peers))
        expected = {str(peer.peer) for peer in swarm.peers}
        status = children.spawn("status", ["status", "--join", swarm._address, "--json"])
        await status.ended.wait()
        (run,) = json.loads(status.log.read_text())["runs"]
        await swarm.stop()
    shown = {peer["peer"] for stage in run["stages"] for peer in stage["peers"]}
    events = read_events(logs / "trainer.jsonl")
    seen = {str(event.fields["peer"]) for event in events if event.kind == "peer_joined"}
    problems = [f"{event.kind}: {dict(event.fields)}" for event in events if event.kind in DROPS]
    for name, view in (("status", shown), ("the trainer", seen)):
        if view != expected:
            problems.append(f"{name} sees {len(view & expected)} of {len(expected)} peers")
    return problems


def main() -> int:
    """Exit code 1 if any launch went wrong."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--launches", type=int, default=20)
    launches = options.parse_args().launches
    bad = 0
    for number in range(launches):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            problems = asyncio.run(launch(Path(folder)))
        bad += bool(problems)
        print(
            f"{number + 1}/{launches}: {'; '.join(problems) or 'one swarm'} ({time.monotonic() - began:.0f} s)",
            flush=True,
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
