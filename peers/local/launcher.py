"""A local swarm: which processes there are, who is killed and started when, and what is told of it."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.local.children import Child, Children
from peers.local.options import LocalOptions
from peers.local.tail import JournalTail
from peers.train import QUIET, view_from_json
from swarm.errors import ExitCode, RunFailed
from swarm.ids import PeerId, short
from swarm.telemetry.journal import EventJournal
from swarm.telemetry.progress import RunView
from swarm.telemetry.report import Report
from swarm.telemetry.screen import Screen
from swarm.telemetry.words import describe

POLL_SECONDS = 0.2
BOOTSTRAP_SECONDS = 20.0
STOP_SECONDS = 10.0


@dataclass(slots=True)
class LocalPeer:
    """A peer's process, and its id once it has said it."""

    child: Child
    stage: int
    tail: JournalTail
    peer: PeerId | None = None


class LocalSwarm:
    """Bootstrap, peers and trainer as children."""

    def __init__(self, options: LocalOptions, children: Children) -> None:
        self.options = options
        self.children = children
        self.events = EventJournal()
        self.view = RunView()
        self.peers: list[LocalPeer] = []
        self.kill_steps: list[float] = []
        """Steps done when a peer was killed; for the plot."""
        self.started_on_the_way = 0
        self.trained_seconds = 0.0
        self._address = ""
        self._began = time.monotonic()
        self._random = random.Random(options.config.run.seed)
        self._trainer_tail = JournalTail(self._journal("trainer"))

    # --- processes ------------------------------------------------------------------

    async def start(self) -> None:
        """Start everybody; returns when the processes exist, not when they serve."""
        bootstrap = self.children.spawn("bootstrap", ["bootstrap"])
        self._address = await self._first_address(bootstrap)
        for stage, count in enumerate(self.options.peers):
            for index in range(count):
                self.start_peer(stage, self.options.slowness.get((stage, index), 1.0))
        self.start_trainer()

    def start_peer(self, stage: int, slowness: float = 1.0) -> LocalPeer:
        """Start another peer of ``stage``."""
        name = f"peer-{stage}-{sum(peer.stage == stage for peer in self.peers)}"
        journal = self._journal(name)
        arguments = ["peer", "--join", self._address, "--stage", str(stage), "--journal", str(journal)]
        arguments += ["--device", "cpu"] if slowness > 1 else []
        arguments += ["--emulate-slowness", str(slowness)] if slowness > 1 else []
        peer = LocalPeer(self.spawn(name, arguments), stage, JournalTail(journal))
        self.peers.append(peer)
        return peer

    def start_trainer(self) -> Child:
        """Start the trainer, or start it again."""
        options = self.options
        arguments = ["train", str(options.run_file), "--join", self._address, "--steps", str(options.steps)]
        arguments += ["--state-dir", str(self.children.logs / "trainer")]
        arguments += ["--state-timeout", str(options.state_timeout_seconds)]
        arguments += ["--report", str(self._trainer_report), "--journal", str(self._journal("trainer"))]
        arguments += ["--journal-views", *self._override_flags()]
        arguments += ["--first-peers", ",".join(map(str, options.peers))]
        return self.spawn("trainer", arguments)

    def spawn(self, name: str, arguments: list[str]) -> Child:
        """Start one process; a test may start another program in its place."""
        return self.children.spawn(name, arguments)

    async def stop(self) -> None:
        """Tell peers and bootstrap to stop, and wait for them."""
        living = [child for child in self.children.by_name.values() if child.alive]
        for child in living:
            self.children.signal(child.name, signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await asyncio.gather(*(child.ended.wait() for child in living))
        except TimeoutError:
            return  # the nursery ends them the hard way

    @property
    def cpu_seconds(self) -> float:
        """Of bootstrap, peers and trainer, as far as they have ended."""
        return sum(child.cpu_seconds for name, child in self.children.by_name.items() if name != "verify")

    # --- training ---------------------------------------------------------------------

    async def train(self, screen: Screen) -> Report:
        """Until the trainer has ended; returns its report.  Raises with the trainer's exit code if it failed."""
        trainer = self.children.by_name["trainer"]
        leads_since: float | None = None
        kills = starts = 0
        while trainer.alive:
            await self._wait(trainer)
            if self._follow_trainer(screen) and leads_since is None:
                leads_since = time.monotonic()
            self._follow_peers(screen)
            if leads_since is None or not self.view.steps_done:
                continue
            elapsed = time.monotonic() - leads_since
            if self.options.kill_every_seconds and elapsed > (kills + 1) * self.options.kill_every_seconds:
                kills += 1
                self.kill_some_peer()
            if self.options.start_every_seconds and elapsed > (starts + 1) * self.options.start_every_seconds:
                starts += 1
                self.start_some_peer()
        self._follow_trainer(screen)
        self.trained_seconds = time.monotonic() - self._began
        if trainer.exit_code:
            raise _ended_badly(trainer)
        return Report.read(self._trainer_report)

    def kill_some_peer(self) -> LocalPeer | None:
        """SIGKILL a peer whose stage has another one that is up to date; None if there is none to spare."""
        spare: list[LocalPeer] = []
        for row in self.view.stages:
            current = {p.name for p in row.peers if p.state == "ready" and p.version >= self.view.steps_done}
            mine = [p for p in self.peers if p.child.alive and p.peer is not None and short(p.peer) in current]
            spare += mine if len(mine) > 1 else []
        if not spare:
            return None
        victim = self._random.choice(spare)
        self.children.signal(victim.child.name, signal.SIGKILL)
        self.kill_steps.append(self.view.steps_done + 0.5)
        self.events.record("kill", peer=victim.peer, stage=victim.stage)
        return victim

    def start_some_peer(self) -> LocalPeer:
        """Start a peer of the stage that has the fewest."""
        alive = [
            sum(p.child.alive and p.stage == stage for p in self.peers) for stage in range(len(self.options.peers))
        ]
        peer = self.start_peer(alive.index(min(alive)))
        self.started_on_the_way += 1
        self.events.record("start", stage=peer.stage)
        return peer

    # --- verification ------------------------------------------------------------------

    async def verify(self, trained: Report, screen: Screen) -> dict[str, Any]:
        """Compare with one process; the peers are stopped once their states are fetched."""
        output = self.children.folder / "verdict.json"
        journal = self._journal("verify")
        task = {
            "run_file": str(self.options.run_file),
            "overrides": self.options.overrides,
            "join": self._address,
            "steps": trained.steps,
            "losses": trained.losses,
            "journal": str(journal),
            "output": str(output),
        }
        child = self.children.spawn("verify", [json.dumps(task)], entry="peers.local.verify:run")
        tail = JournalTail(journal)
        while child.alive:
            await self._wait(child)
            for event in tail.poll():
                if event.kind == "view":
                    screen.update(view_from_json(str(event.fields["view"])))
                elif event.kind == "states_fetched":
                    for peer in self.peers:
                        if peer.child.alive:
                            self.children.signal(peer.child.name, signal.SIGTERM)
        if child.exit_code:
            raise _ended_badly(child)
        verdict: dict[str, Any] = json.loads(await asyncio.to_thread(output.read_text))
        return verdict

    # --- following ---------------------------------------------------------------------

    def _follow_trainer(self, screen: Screen) -> bool:
        """Show what the trainer tells; True if it has begun to lead."""
        leads = False
        for event in self._trainer_tail.poll():
            if event.kind == "view":
                self.view = view_from_json(str(event.fields["view"]))
                screen.update(self.view)
            elif event.kind == "leads":
                leads = True
            elif event.kind not in QUIET and event.kind != "journal":
                screen.event(describe(event))
        return leads

    def _follow_peers(self, screen: Screen) -> None:
        for peer in self.peers:
            for event in peer.tail.poll():
                if event.kind == "serving":
                    peer.peer = PeerId(str(event.fields["peer"]))
                elif event.kind in ("state_fetched", "waiting_for_donor", "donor_failed"):
                    screen.event(describe(event))
            if peer.child.exit_code is not None and peer.child.exit_code > 0 and not self.view.steps_done:
                raise _ended_badly(peer.child)

    async def _wait(self, child: Child) -> None:
        try:
            async with asyncio.timeout(POLL_SECONDS):
                await child.ended.wait()
        except TimeoutError:
            return

    async def _first_address(self, bootstrap: Child) -> str:
        deadline = time.monotonic() + BOOTSTRAP_SECONDS
        while time.monotonic() < deadline:
            await self._wait(bootstrap)
            if not bootstrap.alive:
                raise _ended_badly(bootstrap)
            text = bootstrap.log.read_text() if bootstrap.log.exists() else ""
            for line in text.splitlines(keepends=True):
                if line.startswith("/ip") and line.endswith("\n"):
                    return line.strip()
        raise RunFailed(f"the bootstrap did not start within {BOOTSTRAP_SECONDS:.0f} s: {bootstrap.last_words()}")

    def _journal(self, name: str) -> Path:
        return self.children.logs / f"{name}.jsonl"

    @property
    def _trainer_report(self) -> Path:
        return self.children.folder / "trainer-report.json"

    def _override_flags(self) -> list[str]:
        from peers.cli import flags_of

        return flags_of(self.options.overrides)


def _ended_badly(child: Child) -> RunFailed:
    words = child.last_words().removeprefix("swarm: ")
    if child.exit_code is not None and child.exit_code < 0:
        words = f"ended by {signal.Signals(-child.exit_code).name}"
    if not words:
        full = ", the disk is full" if shutil.disk_usage(child.log.parent).free == 0 else ""
        words = f"ended with {child.exit_code} and without a word (its log is {child.log}{full})"
    error = RunFailed(f"{child.name}: {words}")
    if child.exit_code in set(ExitCode):
        error.exit_code = ExitCode(child.exit_code)
    return error
