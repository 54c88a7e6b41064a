"""``swarm train``: owns the data, routes the microbatches, leads the steps."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from peers import life
from peers.clock import MonotonicClock
from peers.dht_place import DhtPlace, parse_dht_place
from peers.peer import check_protocol
from peers.steps import steps_of
from peers.summary import in_words, microbatches_in_words
from peers.views import view_of
from swarm.config import RunConfig, load
from swarm.dht.addresses import parse_join
from swarm.errors import ExitCode, UsageError
from swarm.ids import new_session
from swarm.policy.sizes import boundary_spec, largest_tensor_bytes
from swarm.ports import Directory, StageCalls
from swarm.records import CommitRecord
from swarm.roles.trainer import Trainer
from swarm.storage.commit_log import FileCommitLog, TrainerFolder, default_folder
from swarm.telemetry.journal import Event, EventJournal
from swarm.telemetry.plot import plot_losses
from swarm.telemetry.progress import Pace, RunView
from swarm.telemetry.report import Failure, Microbatches, Report, ensure_writable
from swarm.telemetry.screen import Screen
from swarm.telemetry.words import describe

if TYPE_CHECKING:
    from swarm.dht.node import SwarmNode

QUIET = frozenset({"step", "view", "applied", "voided", "retried", "fenced", "peer_joined", "stage_empty"})
"""Events that the screen does not list: too many, or shown otherwise."""
VIEW_SECONDS = 0.5
FAILURE_KINDS = frozenset(
    {"peer_lost", "peer_suspected", "peer_diverged", "not_finite", "gradient_not_finite", "attempt_failed"}
)

_log = logging.getLogger("swarm.train")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What ``swarm train`` was asked for, checked."""

    config: RunConfig
    join: tuple[str, ...]
    dht: DhtPlace | None = None
    """Where to listen as a full DHT node; without, this one is a client, whom nobody has to dial."""
    steps: int
    state_dir: Path
    state_timeout_seconds: float
    report: Path | None
    journal: Path | None
    first_peers: tuple[int, ...] | None = None
    journal_views: bool = False
    """The journal is the screen: whoever reads it shows it."""
    socket_root: Path | None = None

    @staticmethod
    def parse(options: argparse.Namespace) -> TrainOptions:
        """Raises UsageError."""
        from peers.cli import overrides

        config = load(options.run_file, overrides(options))
        if options.report is not None:
            ensure_writable(options.report)
        return TrainOptions(
            config=config,
            join=tuple(str(address) for address in parse_join(options.join)),
            dht=parse_dht_place(options),
            steps=steps_of(config, options.steps),
            state_dir=options.state_dir or default_folder(config),
            state_timeout_seconds=options.state_timeout,
            report=options.report,
            journal=options.journal,
            first_peers=first_peers_of(config, options.first_peers),
            journal_views=options.journal_views,
        )


def main(options: argparse.Namespace) -> ExitCode:
    """Runs until the steps are committed."""
    checked = TrainOptions.parse(options)
    life.prepare()
    return life.run(TrainProgram(checked).run(), on_sigterm=ExitCode.INTERRUPTED)


class TrainProgram:
    """Composes a trainer.  ``make_calls`` is a part that a test-only program may wrap."""

    def __init__(self, options: TrainOptions) -> None:
        self.options = options
        self.journal = EventJournal(path=options.journal)
        self._clock = MonotonicClock()
        self._began = time.monotonic()
        self._pace = Pace(began_seconds=self._began)

    def make_calls(self, calls: StageCalls) -> StageCalls:
        """Calls to peers."""
        return calls

    async def run(self) -> None:
        """Train; write the report also when the run ends early with an error."""
        from swarm.data.text import TextBatches
        from swarm.dht.directory import HivemindDirectory
        from swarm.rpc.client import GrpcStageCalls

        options, config = self.options, self.options.config
        batches = await asyncio.to_thread(TextBatches, config)
        folder = TrainerFolder(options.state_dir, config)
        log = FileCommitLog(folder.commits)
        node = await self._join(folder.identity)
        calls = GrpcStageCalls(check_finite=True, max_tensor_bytes=largest_tensor_bytes(config))
        try:
            directory = HivemindDirectory(node)
            await refuse_other_config(directory, config)
            await refuse_other_protocol(directory, config)
            trainer = Trainer(
                config=config,
                trainer=node.peer_id,
                session=new_session(),
                calls=self.make_calls(calls),
                directory=directory,
                batches=batches,
                log=log,
                clock=self._clock,
                journal=self.journal,
                state_timeout_seconds=options.state_timeout_seconds,
                first_peers=options.first_peers,
                boundary=partial(boundary_spec, config.model),
                on_step=self._stepped,
            )
            with Screen(options.steps) as screen:
                await self._train(trainer, screen)
        finally:
            await calls.close()
            await node.close()
            self.journal.close()

    async def _join(self, identity: Path) -> SwarmNode:
        from swarm.dht.node import start_node

        options = self.options
        if options.dht is None:
            return await start_node(
                identity_path=identity, join=options.join, client=True, socket_root=options.socket_root
            )
        return await start_node(
            identity_path=identity,
            join=options.join,
            listen_host=options.dht.listen.host,
            port=options.dht.listen.port,
            announce_host=options.dht.announce_host,
            announce_port=options.dht.announce_port,
            socket_root=options.socket_root,
        )

    async def _train(self, trainer: Trainer, screen: Screen) -> None:
        if not self.options.journal_views:
            self.journal.subscribe(lambda event: _show(screen, event))
        self.journal.subscribe(self._began_to_lead)
        ended = asyncio.Event()
        showing = asyncio.create_task(self._show_views(trainer, screen, ended), name="screen")
        try:
            try:
                await trainer.run(self.options.steps)
            finally:
                ended.set()
                await asyncio.wait({showing})
        except BaseException:
            try:
                self._conclude(trainer, screen)
            except Exception:  # noqa: BLE001 - whatever it is, how the run ended matters more
                _log.exception("and the report failed")
            raise
        self._conclude(trainer, screen)

    # --- screen and report --------------------------------------------------------------

    def _began_to_lead(self, event: Event) -> None:
        if event.kind == "leads":  # what was waited for until now says nothing of the run's speed
            self._pace = Pace(began_seconds=time.monotonic())

    def _stepped(self, commit: CommitRecord) -> None:
        self._pace.step(time.monotonic(), sum(commit.tokens))

    async def _show_views(self, trainer: Trainer, screen: Screen, ended: asyncio.Event) -> None:
        """Until ``ended``.  The screen is a comfort: if it fails, that is logged, and training goes on."""
        try:
            while not ended.is_set():
                self._note_view(trainer, screen)
                with suppress(TimeoutError):
                    async with asyncio.timeout(VIEW_SECONDS):
                        await ended.wait()
            self._note_view(trainer, screen)
        except OSError as error:
            _log.warning("the run is not shown any more: %s", error)
        except Exception:  # noqa: BLE001 - the root of a task
            _log.exception("the run is not shown any more")

    def _note_view(self, trainer: Trainer, screen: Screen) -> None:
        view = view_of(self.options.config, trainer, self._pace, self.options.steps, time.monotonic())
        screen.update(view)
        if self.options.journal_views:
            self.journal.record("view", view=json.dumps(asdict(view)))

    def _conclude(self, trainer: Trainer, screen: Screen) -> None:
        """Write the report, and say what the run came to even if that fails.  Raises UsageError or RunFailed."""
        if trainer.progress.lineage is None:
            return
        screen.close()
        report = self.report(trainer)
        lines = [in_words(report, made=len(trainer.progress.step_seconds)), microbatches_in_words(report)]
        try:
            if self.options.report is not None:
                picture = self.options.report.with_suffix(".png")
                report.write(self.options.report)
                if not self.options.journal_views:
                    plot_losses(picture, report.losses, title=self.options.config.run.name)
                lines.append(f"report: {self.options.report}, plot: {picture}")
        finally:
            if not self.options.journal_views:
                print("\n".join(lines), flush=True)

    def report(self, trainer: Trainer) -> Report:
        """What this process did; the losses are those of the whole run as far as they are known."""
        progress, wall = trainer.progress, time.monotonic() - self._began
        mine = [c for c in progress.commits if c.step in progress.step_seconds]
        tokens, seconds = sum(sum(c.tokens) for c in mine), sum(progress.step_seconds.values())
        marks = [sorted(stage.items()) for stage in progress.marks]
        cpu = os.times()
        return Report(
            config_hash=self.options.config.hash,
            steps=progress.lineage.length if progress.lineage else 0,
            losses=tuple(c.loss for c in progress.commits),
            tokens_per_second=tokens / seconds if seconds else None,
            cpu_seconds=cpu.user + cpu.system + cpu.children_user + cpu.children_system,
            wall_seconds=wall,
            microbatches=Microbatches(**asdict(progress.counts)),
            samples_per_stage_and_step=tuple(
                tuple(c.stages[stage].samples for c in progress.commits)
                for stage in range(self.options.config.model.stage_count)
            ),
            failures=tuple(failures_of(self.journal.events)),
            parameter_norms=tuple(stage[0][1].squared_norm ** 0.5 if stage else None for stage in marks),
            parameter_digest=tuple((stage[0][1].digest or "") if stage else "" for stage in marks),
        )


def first_peers_of(config: RunConfig, asked: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Raises UsageError unless there is a number for each stage."""
    count = config.model.stage_count
    if asked is not None and len(asked) != count:
        raise UsageError(
            f"--first-peers {','.join(map(str, asked))}: the model has {count} stages; give {count} numbers"
        )
    return asked


async def refuse_other_config(directory: Directory, config: RunConfig) -> None:
    """Raise UsageError if peers of a run with the same name and another config live."""
    for other in await directory.runs():
        if other.run.name != config.run.name or other.hash == config.hash:
            continue
        peers = [p for stage in range(other.model.stage_count) for p in await directory.peers(other.hash, stage)]
        if peers:
            raise UsageError(
                f"run '{config.run.name}' is served by {len(peers)} peers with another config "
                f"({other.hash[:12]}, this one is {config.hash[:12]}): {difference(other, config)}; choose another name"
            )


async def refuse_other_protocol(directory: Directory, config: RunConfig) -> None:
    """Raise CannotJoin if the run's peers speak another protocol version only."""
    peers = [p for stage in range(config.model.stage_count) for p in await directory.peers(config.hash, stage)]
    check_protocol(config, peers)


def difference(theirs: RunConfig, ours: RunConfig) -> str:
    """The keys in which two published configs differ, with both values."""
    a, b = json.loads(theirs.published()), json.loads(ours.published())
    return ", ".join(
        f"{section}.{key} is {a[section].get(key)!r} there and {b[section].get(key)!r} here"
        for section in sorted(a)
        for key in sorted(a[section].keys() | b[section].keys())
        if a[section].get(key) != b[section].get(key)
    )


def failures_of(events: tuple[Event, ...]) -> list[Failure]:
    """Events that the report lists as failures."""
    return [
        Failure(
            time_seconds=event.time_seconds,
            peer=str(event.fields.get("peer", "")),
            stage=int(str(event.fields["stage"])) if event.fields.get("stage") is not None else None,
            kind=event.kind,
        )
        for event in events
        if event.kind in FAILURE_KINDS
    ]


def _show(screen: Screen, event: Event) -> None:
    if event.kind not in QUIET:
        screen.event(describe(event))


def view_from_json(text: str) -> RunView:
    """Inverse of what the trainer's journal says of its view.  Raises ValueError or TypeError."""
    from swarm.telemetry.progress import PeerRow, StageRow

    raw = json.loads(text)
    raw["stages"] = tuple(
        StageRow(stage=s["stage"], peers=tuple(PeerRow(**p) for p in s["peers"])) for s in raw["stages"]
    )
    raw["events"] = tuple(raw["events"])
    return RunView(**raw)
