"""Large tensors with default settings (sql-machine-learning/elasticdl#571, flwrlabs/flower#3006)."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import psutil

from swarm.config import load
from swarm.policy.sizes import stage_parameters
from swarm.telemetry.journal import read_events
from tests.fault_program import Fault
from tests.fault_swarm import FaultSwarm, Watcher, run_swarm

CONFIG = """
[run]
name = "large"
[model]
layers = {layers}
width = {width}
heads = 4
sequence_length = {length}
stages = {stages}
[optimizer]
learning_rate = 1e-4
[step]
microbatches = {microbatches}
microbatch_size = {rows}
"""
MIB = 1 << 20


def activations(folder: Path) -> None:
    """Two stages with 40 MB between them."""
    rows, length, width = 160, 256, 256
    began = time.monotonic()
    outcome = run_swarm(
        folder,
        peers=(1, 1),
        steps=2,
        text=CONFIG.format(layers=2, width=width, length=length, stages=2, microbatches=1, rows=rows),
    )
    outcome.check()
    seconds = time.monotonic() - began
    print(
        f"activations of {4 * rows * length * width / 1e6:.0f} MB: as one process computes, {seconds:.0f} s", flush=True
    )


def state(folder: Path, pace_seconds: float) -> None:
    """A newcomer fetches 600 MB from a peer that trains on."""
    peaks: dict[str, int] = {}
    slow = [Fault(point="compute is emulated", file=str(folder / "fired"), seconds=pace_seconds)]

    async def join(swarm: FaultSwarm) -> None:
        watcher = Watcher(swarm)
        await watcher.step(at_least=1, seconds=120)
        guest = swarm.start_peer(0)
        while not guest.child.process:
            await swarm._wait(swarm.children.by_name["trainer"])
        processes = {"donor": swarm.peers[0].child.process, "newcomer": guest.child.process}
        while guest.child.alive and not swarm.children.by_name["trainer"].ended.is_set():
            for name, process in processes.items():
                peaks[name] = max(peaks.get(name, 0), psutil.Process(process).memory_info().rss)
            await swarm._wait(swarm.children.by_name["trainer"])

    text = CONFIG.format(layers=4, width=1024, length=8, stages=1, microbatches=2, rows=1)
    outcome = run_swarm(folder, peers=(1,), steps=12, faults={"peer-0-0": slow}, meanwhile=join, text=text)
    outcome.check()
    fetched = [e for e in read_events(outcome.logs / "peer-0-1.jsonl") if e.kind == "state_fetched"]
    nbytes = 12 * stage_parameters(load(folder / "run.toml").model, 0)
    for event in fetched:
        print(f"fetched {int(str(event.fields['nbytes'])) / 1e6:.0f} MB in {float(str(event.fields['seconds'])):.1f} s")
    for name, peak in peaks.items():
        print(f"{name}: {peak / MIB:.0f} MiB at most, the state is {nbytes / MIB:.0f} MiB")
    joined = {str(event.fields["peer"]) for event in outcome.of("peer_joined")}
    assert len(joined) == 2, "the newcomer never caught up"


def main() -> int:
    """Raises if anything is wrong."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", choices=["activations", "state"])
    options.add_argument("--pace-seconds", type=float, default=2.0, help="of a forward of the peer that trains on")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.only != "state":
            (Path(folder) / "a").mkdir()
            activations(Path(folder) / "a")
        if given.only != "activations":
            (Path(folder) / "b").mkdir()
            state(Path(folder) / "b", given.pace_seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
