"""Connections that are idle for long still work, and nobody hangs up (grpc/grpc#32095, llm-d/llm-d-kv-cache#359).

The only peer of the last stage dies in the first step; the trainer waits, connected to the others, for a new one.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
from pathlib import Path

from tests.fault_program import Fault
from tests.fault_swarm import FaultSwarm, run_swarm

HANG_UPS = re.compile("too_many_pings|ENHANCE_YOUR_CALM|GOAWAY|keepalive", re.IGNORECASE)


def check(folder: Path, minutes: float) -> list[str]:
    """What is wrong."""

    async def wait(swarm: FaultSwarm) -> None:
        await swarm.until(lambda: not swarm.children.by_name["peer-2-0"].alive)
        print(f"idle for {minutes:g} min ...", flush=True)
        await asyncio.sleep(60 * minutes)
        swarm.start_peer(2)

    fault = Fault(point="backward arrives", file=str(folder / "fired"))
    outcome = run_swarm(folder, peers=(1, 1, 1), steps=5, faults={"peer-2-0": [fault]}, meanwhile=wait)
    outcome.check()
    suspected = {str(event.fields["stage"]) for event in outcome.of("peer_suspected")}
    problems = [f"a peer of stage {stage} was suspected" for stage in sorted(suspected - {"2"})]
    for log in sorted(outcome.logs.glob("*.log")):
        problems += [f"{log.name}: {line}" for line in log.read_text().splitlines() if HANG_UPS.search(line)]
    return problems


def main() -> int:
    """Exit code 1 if anything is wrong."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=10.0)
    with tempfile.TemporaryDirectory() as folder:
        problems = check(Path(folder), options.parse_args().minutes)
    print("\n".join(problems) or "the first calls after the idle time succeeded, and nobody hung up")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
