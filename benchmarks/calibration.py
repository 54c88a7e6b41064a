"""What a real swarm with emulated compute and links does, for the simulator to be compared with: JSON rows.

    python benchmarks/calibration.py --json FILE [--only NAME] [--rounds 2]

Each setting is a whole swarm on this machine.  Its peers really compute, a small model, and sleep until a forward has
taken its seconds (``swarm peer --emulate-seconds``).  Before the gRPC server of each stands a proxy (delay_proxy.py) in
this process.  Only gRPC calls pass it: the all-reduce and the DHT, which have a port of their own, do not.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks import delay_proxy
from peers import life
from peers.local.children import Child, Children
from peers.local.launcher import LocalSwarm
from peers.local.options import LocalOptions
from swarm.config import load
from swarm.telemetry.journal import Event, read_events
from swarm.telemetry.report import Report
from swarm.telemetry.screen import Screen

HOST = "127.0.0.1"
WARM_UP_STEPS = 3
"""Left out of all figures: speeds are learnt, connections made."""
PHASES = ("seconds", "compute_seconds", "freeze_seconds", "reduce_seconds", "apply_seconds")
SAMPLE_SECONDS = 0.5

RUN = """
[run]
name = "calibration-{name}"
[model]
layers = {stages}
width = {width}
heads = 4
sequence_length = {sequence_length}
stages = {stages}
[optimizer]
learning_rate = 1e-3
[step]
microbatches = {microbatches}
microbatch_size = {microbatch_size}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A swarm and its links."""

    name: str
    forward_seconds: tuple[tuple[float, ...], ...]
    """Of each peer of each stage; a backward takes twice that, at the last stage (forward included) three times."""
    ms: float
    """Each way."""
    mbit: float | None
    """Per second, peer and direction; None: no limit."""
    width: int
    sequence_length: int
    microbatches: int
    microbatch_size: int
    """Sequences."""
    steps: int
    """The warm-up included."""

    @property
    def peers(self) -> tuple[int, ...]:
        """Per stage."""
        return tuple(len(stage) for stage in self.forward_seconds)

    @property
    def activation_bytes(self) -> int:
        """What travels between two stages, fp32."""
        return 4 * self.microbatch_size * self.sequence_length * self.width


SETTINGS = (
    Setting(
        name="fit", forward_seconds=((0.1, 0.1), (0.1, 0.1)), ms=2.0, mbit=200.0,
        width=64, sequence_length=64, microbatches=16, microbatch_size=2, steps=15,
    ),
    Setting(
        name="compute", forward_seconds=((0.1, 0.25), (0.1, 0.25), (0.1, 0.25)), ms=0.0, mbit=None,
        width=64, sequence_length=64, microbatches=24, microbatch_size=2, steps=12,
    ),
    Setting(
        # 256 KiB: 105 ms on the wire each way, against 60 ms of compute.
        name="bandwidth", forward_seconds=((0.02, 0.02), (0.02, 0.02)), ms=2.0, mbit=20.0,
        width=64, sequence_length=128, microbatches=32, microbatch_size=8, steps=15,
    ),
    Setting(
        # 16 KiB: four of them fit the first window of HTTP/2 (64 KiB), which would add round trips otherwise.
        name="latency", forward_seconds=((0.02,), (0.02,)), ms=150.0, mbit=None,
        width=64, sequence_length=32, microbatches=4, microbatch_size=2, steps=15,
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run of a setting; what is per step is of the steps after the warm-up."""

    step_seconds: tuple[float, ...]
    """The ``seconds`` of each step."""
    phases: dict[str, list[float]]
    """By name of the trainer's figure, step by step."""
    microbatches_per_second: float
    """From the end of the last step of the warm-up to the end of the last step: what lies between steps counts."""
    retried: int
    """Microbatches; not 0: something disturbed the run."""
    cpu_busy: float
    """Share of all cores that were busy, with whatever else ran on the machine."""
    proxy_busy: float
    """Share of one core that this process, the proxies above all, was busy."""
    load_before: float
    """The load average over one minute before the swarm was started: of others."""
    load_after: float


class CalibratedSwarm(LocalSwarm):
    """A local swarm whose peers are paced and stand behind proxies."""

    def __init__(self, options: LocalOptions, children: Children, extra: dict[str, list[str]]) -> None:
        super().__init__(options, children)
        self._extra = extra
        """Further options of a process, by its name."""

    def spawn(self, name: str, arguments: list[str]) -> Child:
        return super().spawn(name, [*arguments, *self._extra.get(name, ())])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """How busy the machine was in the time before."""

    unix_seconds: float
    all_cores: float
    this_process: float


async def sample(samples: list[Sample]) -> None:
    """Until cancelled."""
    psutil.cpu_percent()
    while True:
        wall, cpu = time.monotonic(), time.process_time()
        await asyncio.sleep(SAMPLE_SECONDS)
        busy = (time.process_time() - cpu) / (time.monotonic() - wall)
        samples.append(Sample(unix_seconds=time.time(), all_cores=psutil.cpu_percent() / 100, this_process=busy))


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((HOST, 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


async def measure(setting: Setting, folder: Path) -> Measured:
    """Run the setting once; all processes have ended when it returns or raises."""
    run = folder / "run.toml"
    values = {name: value for name, value in asdict(setting).items() if name != "forward_seconds"}
    run.write_text(RUN.format(stages=len(setting.peers), **values))
    options = LocalOptions(
        run_file=run, overrides={}, config=load(run), peers=setting.peers, steps=setting.steps, slowness={}, keep=folder
    )
    load_before = os.getloadavg()[0]
    samples: list[Sample] = []
    async with AsyncExitStack() as stack:
        extra: dict[str, list[str]] = {}
        ports = iter(free_ports(sum(setting.peers)))
        for stage, peers in enumerate(setting.forward_seconds):
            for index, seconds in enumerate(peers):
                port = next(ports)
                proxy = await delay_proxy.start((HOST, 0), (HOST, port), setting.ms, setting.mbit)
                stack.push_async_callback(proxy.close)
                places = ["--listen", f"{HOST}:{port}", "--announce", f"{HOST}:{proxy.port}"]
                extra[f"peer-{stage}-{index}"] = [*places, "--device", "cpu", "--emulate-seconds", str(seconds)]
        children = await stack.enter_async_context(Children(folder / "logs"))
        swarm = CalibratedSwarm(options, children, extra)
        await swarm.start()
        sampling = asyncio.create_task(sample(samples))
        try:
            report = await swarm.train(Screen(None, plain=True, console=Console(file=io.StringIO())))
        finally:
            sampling.cancel()
        load_after = os.getloadavg()[0]
        await swarm.stop()
    return figures(setting, read_events(folder / "logs" / "trainer.jsonl"), report, samples, (load_before, load_after))


def figures(
    setting: Setting, events: Sequence[Event], report: Report, samples: Sequence[Sample], loads: tuple[float, float]
) -> Measured:
    """What the trainer's journal says of the steps after the warm-up."""
    steps = [event for event in events if event.kind == "step"]
    warm, first = steps[WARM_UP_STEPS:], steps[WARM_UP_STEPS - 1].time_seconds
    began = next(float(str(event.fields["unix_seconds"])) for event in events if event.kind == "journal")
    within = [s for s in samples if began + first <= s.unix_seconds <= began + warm[-1].time_seconds]
    phases = {phase: [float(str(step.fields[phase])) for step in warm] for phase in PHASES}
    return Measured(
        step_seconds=tuple(phases["seconds"]),
        phases=phases,
        microbatches_per_second=setting.microbatches * len(warm) / (warm[-1].time_seconds - first),
        retried=report.microbatches.retried,
        cpu_busy=statistics.mean(s.all_cores for s in within),
        proxy_busy=statistics.mean(s.this_process for s in within),
        load_before=loads[0],
        load_after=loads[1],
    )


def row(setting: Setting, rounds: Sequence[Measured]) -> dict[str, Any]:
    """The setting and its figures: medians and standard deviations over the steps of all rounds, and per round."""
    rates = [measured.microbatches_per_second for measured in rounds]
    said: dict[str, Any] = {**asdict(setting), "peers": setting.peers, "activation_bytes": setting.activation_bytes}
    said["warm_up_steps"] = WARM_UP_STEPS
    said["microbatches_per_second"] = statistics.median(rates)
    for phase in PHASES:
        steps = [seconds for measured in rounds for seconds in measured.phases[phase]]
        said[phase] = statistics.median(steps)
        said[f"{phase}_sd"] = statistics.stdev(steps)
    said["rounds"] = [
        {name: rounded(value) for name, value in asdict(measured).items() if name != "phases"} for measured in rounds
    ]
    return {name: rounded(value) for name, value in said.items()}


def rounded(value: Any) -> Any:
    """Floats, and floats in tuples, to a tenth of a millisecond."""
    if isinstance(value, tuple):
        return [rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--only", choices=names, help="this setting only")
    parser.add_argument("--rounds", type=int, default=2, help="how often each setting runs; they take turns")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    life.prepare()
    settings = [setting for setting in SETTINGS if options.only in (None, setting.name)]
    found: dict[str, list[Measured]] = {setting.name: [] for setting in settings}
    with tempfile.TemporaryDirectory(prefix="swarm-calibration-") as name:
        for number in range(options.rounds):
            for setting in settings:
                folder = Path(name) / f"{setting.name}-{number}"
                folder.mkdir()
                measured = delay_proxy.run(measure(setting, folder))
                found[setting.name].append(measured)
                print(
                    f"{setting.name}: {measured.microbatches_per_second:.2f} microbatches/s, "
                    f"{statistics.median(measured.step_seconds):.3f} s a step, "
                    f"cores {measured.cpu_busy:.0%} busy, load {measured.load_before:.2f} before",
                    flush=True,
                )
    if options.json is not None:
        rows = [row(setting, found[setting.name]) for setting in settings]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
