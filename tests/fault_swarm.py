"""Local swarms for tests: real processes, some of which have faults, compared with a single process."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from peers.local.children import Child, Children
from peers.local.launcher import LocalPeer, LocalSwarm
from peers.local.options import LocalOptions
from peers.local.tail import JournalTail
from swarm.config import load
from swarm.errors import RunFailed
from swarm.telemetry.journal import Event, read_events
from swarm.telemetry.report import Report
from swarm.telemetry.screen import Screen
from tests.fault_program import Fault

ENTRY = "tests.fault_program:run"

TINY = """
[run]
name = "{name}"
seed = 3
[model]
layers = 3
width = 32
heads = 4
sequence_length = 32
stages = {stages}
dropout = {dropout}
[optimizer]
{optimizer}
[step]
microbatches = {microbatches}
microbatch_size = 2
"""
ADAMW = 'name = "adamw"\nlearning_rate = 2e-3\nwarmup_steps = 2\nclip_norm = 1.0'
SGD = 'name = "sgd"\nlearning_rate = 0.5\nmomentum = 0.9\nclip_norm = 1.0'


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a swarm ended with, and what the single process says of it."""

    report: Report
    verdict: Mapping[str, Any]
    events: Sequence[Event]
    """Of the trainer, all its lives."""
    logs: Path

    def check(self) -> None:
        """Equal to the reference, and each sample in each stage's gradient once."""
        assert self.verdict["relative_difference"] <= 5e-4, self.verdict
        assert self.verdict["loss_difference"] <= 1e-4, self.verdict
        samples = self.report.samples_per_stage_and_step
        assert {s for stage in samples for s in stage} == {samples[0][0]}, samples

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]


class FaultSwarm(LocalSwarm):
    """A local swarm some of whose processes run the faulty program in their first life."""

    def __init__(self, options: LocalOptions, children: Children, faults: Mapping[str, Sequence[Fault]]) -> None:
        super().__init__(options, children)
        self.faults = {name: list(found) for name, found in faults.items()}
        self.extra: dict[str, list[str]] = {}
        """Further options of a process, by its name."""

    def spawn(self, name: str, arguments: list[str]) -> Child:
        arguments = [*arguments, *self.extra.get(name, ())]
        faults = self.faults.pop(name, None)
        if faults is None:
            return super().spawn(name, arguments)
        texts = [json.loads(fault.to_json())[0] for fault in faults]
        return self.children.spawn(name, [json.dumps(texts), *arguments], entry=ENTRY)

    async def train_through(self, screen: Screen) -> Report:
        """Train; a trainer that was killed is started again."""
        while True:
            try:
                return await self.train(screen)
            except RunFailed:
                if self.children.by_name["trainer"].exit_code != -signal.SIGKILL:
                    raise
                self.start_trainer()

    async def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Follow the trainer until ``condition`` holds."""
        screen = quiet_screen()
        async with asyncio.timeout(seconds):
            while not condition():
                self._follow_trainer(screen)
                self._follow_peers(screen)
                await self._wait(self.children.by_name["trainer"])


class Watcher:
    """Waits for what the trainer writes in its journal; reads it apart from whoever else does."""

    def __init__(self, swarm: FaultSwarm) -> None:
        self._swarm = swarm
        self._tail = JournalTail(swarm.children.logs / "trainer.jsonl")
        self._trainer = swarm.children.by_name["trainer"]
        self._unread: deque[Event] = deque()

    async def wait_for(self, matches: Callable[[Event], bool], seconds: float = 60.0) -> Event:
        """The next event that matches; those before it are skipped.  Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while True:
                while self._unread:
                    event = self._unread.popleft()
                    if matches(event):
                        return event
                self._unread.extend(self._tail.poll())
                if not self._unread:
                    assert self._trainer.alive, "the trainer has ended"
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.05):
                            await self._trainer.ended.wait()

    async def step(self, at_least: int = 0, seconds: float = 60.0) -> int:
        """Wait until a step is committed from now on, of this number or a later one."""
        event = await self.wait_for(lambda e: e.kind == "step" and _number(e, "step") >= at_least, seconds)
        return _number(event, "step")

    async def joined(self, peer: LocalPeer) -> None:
        """Wait until the trainer has taken in a peer that was started since the last wait."""
        while peer.peer is None:  # whoever follows the swarm reads it from the peer's journal
            await self._swarm._wait(self._trainer)
        await self.wait_for(lambda event: event.kind == "peer_joined" and event.fields.get("peer") == peer.peer)

    def skip(self) -> None:
        """Forget what was written until now."""
        self._tail.poll()
        self._unread.clear()


def _number(event: Event, name: str) -> int:
    return int(str(event.fields[name]))


def quiet_screen() -> Screen:
    return Screen(None, plain=True, console=Console(file=io.StringIO()))


def run_file(folder: Path, **values: object) -> Path:
    """A small run's TOML; ``text`` is another template than TINY."""
    defaults: dict[str, object] = {"name": "tiny", "stages": 3, "microbatches": 8, "dropout": 0.0, "optimizer": ADAMW}
    path = folder / "run.toml"
    path.write_text(str(values.pop("text", TINY)).format(**{**defaults, **values}))
    return path


def options_for(
    path: Path, logs: Path, peers: tuple[int, ...], steps: int, state_timeout: float = 60.0
) -> LocalOptions:
    """As `swarm local` would parse them."""
    return LocalOptions(
        run_file=path,
        overrides={},
        config=load(path),
        peers=peers,
        steps=steps,
        slowness={},
        keep=logs,
        state_timeout_seconds=state_timeout,
    )


def run_swarm(
    folder: Path,
    *,
    peers: tuple[int, ...] = (2, 2, 2),
    steps: int = 8,
    faults: Mapping[str, Sequence[Fault]] | None = None,
    meanwhile: Callable[[FaultSwarm], Awaitable[None]] | None = None,
    extra: Mapping[str, Sequence[str]] | None = None,
    **values: object,
) -> Outcome:
    """One swarm from start to verdict.  ``meanwhile`` runs beside the training; ``extra`` are options by process."""
    path = run_file(folder, **values)
    logs = folder / "logs"

    async def main() -> Outcome:
        async with Children(logs) as children:
            swarm = FaultSwarm(options_for(path, logs, peers, steps), children, faults or {})
            swarm.extra = {name: list(options) for name, options in (extra or {}).items()}
            await swarm.start()
            async with asyncio.TaskGroup() as tasks:
                training = tasks.create_task(swarm.train_through(quiet_screen()))
                if meanwhile is not None:
                    tasks.create_task(_coroutine(meanwhile(swarm)))
            verdict = await swarm.verify(training.result(), quiet_screen())
            await swarm.stop()
            events = read_events(logs / "trainer.jsonl")
            return Outcome(report=training.result(), verdict=verdict, events=events, logs=logs)

    return asyncio.run(main())


async def _coroutine(awaitable: Awaitable[None]) -> None:
    await awaitable


def fired(file: Path) -> list[str]:
    """Points at which faults fired."""
    return [json.loads(line)["point"] for line in file.read_text().splitlines()] if file.exists() else []
