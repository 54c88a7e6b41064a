"""A peer that falls silent while it holds work: the work goes to its twin in time, and the peer may come back.

grpc/grpc#32095, llm-d/llm-d-kv-cache#359.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from peers.local.launcher import LocalPeer
from swarm.policy.deadlines import LAN
from swarm.telemetry.journal import Event
from tests.blackhole import blackhole, free_port
from tests.fault_program import Fault
from tests.fault_swarm import FaultSwarm, Watcher, run_swarm

pytestmark = pytest.mark.swarm

TIMEOUT_SECONDS = LAN.call_floor_seconds
"""Of a call to a peer whose calls take milliseconds."""


def test_a_silent_peer(tmp_path: Path) -> None:
    """First a network that swallows everything, then a process that is stopped."""
    inner, outer = free_port(), free_port()
    # Each forward takes a while, so that at any moment the peer holds some.
    slow = [Fault(point="compute is emulated", file=str(tmp_path / "fired"), seconds=0.04)]
    waits: dict[str, float] = {}

    async def silence(swarm: FaultSwarm) -> None:
        watcher = Watcher(swarm)
        async with blackhole(outer, inner) as hole:
            await watcher.step(at_least=3)
            await swarm.until(lambda: all(peer.peer for peer in swarm.peers))
            lost, stopped = (next(p for p in swarm.peers if p.child.name == n) for n in ("peer-1-0", "peer-2-0"))
            watcher.skip()
            hole.passes.clear()
            waits["blackhole"] = await retried(watcher, lost)
            hole.passes.set()
            await watcher.wait_for(lambda event: event.kind == "step" and back(swarm, lost))
            watcher.skip()
            swarm.children.signal(stopped.child.name, signal.SIGSTOP)
            waits["stop"] = await retried(watcher, stopped)
            swarm.children.signal(stopped.child.name, signal.SIGCONT)
            # The connection through the proxy is needed until the end.
            while swarm.children.by_name["trainer"].alive:
                await swarm._wait(swarm.children.by_name["trainer"])

    outcome = run_swarm(
        tmp_path,
        peers=(1, 2, 2),
        steps=14,
        faults={"peer-1-0": slow, "peer-1-1": slow, "peer-2-0": slow, "peer-2-1": slow},
        extra={"peer-1-0": ["--listen", f"127.0.0.1:{inner}", "--announce", f"127.0.0.1:{outer}"]},
        meanwhile=silence,
    )
    print({name: round(seconds, 1) for name, seconds in waits.items()})
    outcome.check()
    assert set(waits) == {"blackhole", "stop"}


async def retried(watcher: Watcher, peer: LocalPeer) -> float:
    """Wait until the peer's work was taken from it and the step has ended; seconds until the first."""
    began = time.monotonic()

    def taken(event: Event) -> bool:
        return event.kind in ("retried", "repaired") and event.fields.get("peer") == peer.peer

    await watcher.wait_for(taken, TIMEOUT_SECONDS + 5)
    seconds = time.monotonic() - began
    await watcher.step(seconds=TIMEOUT_SECONDS + 15)
    return seconds


def back(swarm: FaultSwarm, peer: LocalPeer) -> bool:
    """The trainer's screen shows it as ready again, at the version of the run."""
    rows = [row for stage in swarm.view.stages for row in stage.peers]
    return any(
        str(peer.peer).endswith(row.name) and row.state == "ready" and row.version >= swarm.view.steps_done
        for row in rows
    )
