"""The trainer: owns the data, carries the microbatches of each step through the swarm, and leads its close."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swarm.config import RunConfig
from swarm.errors import StateLost
from swarm.ids import PeerId, SessionId
from swarm.messages import StateMark
from swarm.policy.deadlines import LAN, Limits
from swarm.policy.routing import Routing, choose
from swarm.policy.sizes import stage_parameters
from swarm.ports import Batches, Clock, CommitLog, Directory, Journal, StageCalls
from swarm.records import CommitRecord, LeadRecord, Lineage, Term
from swarm.roles.answers import Boundary
from swarm.roles.closing import StageClose, StageResult
from swarm.roles.computing import Computing
from swarm.roles.fences import Fences
from swarm.roles.lead import Lead
from swarm.roles.ledger import Counts, Ledger
from swarm.roles.pipeline import Pipeline
from swarm.roles.roster import Roster
from swarm.roles.takeover import LEASE_RENEW_SECONDS, Lease, Takeover

RUN_RENEW_SECONDS = 20.0
EMPTY_SECONDS = 2.0
"""A stage without an eligible peer for so long is said to be empty."""


@dataclass(slots=True)
class Progress:
    """What a run has done so far, for the screen and the report."""

    lineage: Lineage | None = None
    commits: list[CommitRecord] = field(default_factory=list)
    empty: set[int] = field(default_factory=set)
    """Stages without an eligible peer for :data:`EMPTY_SECONDS`."""
    counts: Counts = field(default_factory=Counts)
    marks: list[dict[PeerId, StateMark]] = field(default_factory=list)
    """By stage: what the peers' parameters are at the end of the run."""
    step_seconds: dict[int, float] = field(default_factory=dict)


class Trainer:
    """One trainer, which leads."""

    def __init__(
        self,
        *,
        config: RunConfig,
        trainer: PeerId,
        session: SessionId,
        calls: StageCalls,
        directory: Directory,
        batches: Batches,
        log: CommitLog,
        clock: Clock,
        journal: Journal,
        state_timeout_seconds: float,
        boundary: Boundary,
        first_peers: Sequence[int] | None = None,
        limits: Limits = LAN,
        routing: Routing = choose,
        window: int | None = None,
        on_step: Callable[[CommitRecord], None] | None = None,
    ) -> None:
        """``window`` is how many microbatches may be in flight; by default as many as keep all peers busy."""
        self.progress = Progress()
        self.roster = Roster(
            config=config,
            calls=calls,
            directory=directory,
            clock=clock,
            journal=journal,
            limits=limits,
            routing=routing,
        )
        self._config = config
        self._trainer = trainer
        self._session = session
        self._calls = calls
        self._directory = directory
        self._batches = batches
        self._log = log
        self._clock = clock
        self._journal = journal
        self._limits = limits
        self._state_timeout_seconds = state_timeout_seconds
        self._boundary = boundary
        self._first_peers = first_peers
        self._fixed_window = window
        self._on_step = on_step

    async def run(self, steps: int) -> None:
        """Train until ``steps`` are committed in all.

        Raises Superseded, StateLost or RunFailed (possibly within an ExceptionGroup).
        """
        lease = Lease(
            config=self._config,
            trainer=self._trainer,
            session=self._session,
            directory=self._directory,
            clock=self._clock,
        )
        await self._directory.publish_run(self._config)
        predecessor = await lease.predecessor()
        async with asyncio.TaskGroup() as tasks:
            publishing = tasks.create_task(self._renew_run(), name="renew the run's config")
            lead, term = await self._take_over(predecessor)
            background = [
                publishing,
                tasks.create_task(self.roster.watch(), name="watch the directory"),
                tasks.create_task(self._renew_lease(lease, term), name="renew the lease"),
                tasks.create_task(self._watch_stages(), name="watch for empty stages"),
                tasks.create_task(lead.help_behind(), name="bring peers along"),
            ]
            while (lineage := self._lineage()).length < steps:
                await self._step(lead, term, lineage)
            while self.roster.empty_stages():  # a stage may hold the last commit's gradient and not have applied it
                await self.roster.changed(1.0)
            self.progress.marks = await lead.final_marks()
            await lease.renew(term, self._lineage())  # the last commit is known even to who comes after us
            for task in background:
                task.cancel()

    def _lineage(self) -> Lineage:
        if self.progress.lineage is None:
            raise AssertionError("not the lead yet")
        return self.progress.lineage

    async def _take_over(self, predecessor: LeadRecord | None) -> tuple[Lead, Term]:
        takeover = Takeover(
            config=self._config,
            trainer=self._trainer,
            roster=self.roster,
            log=self._log,
            clock=self._clock,
            journal=self._journal,
            state_timeout_seconds=self._state_timeout_seconds,
            predecessor=predecessor,
            first_peers=self._first_peers,
        )
        term, reports = await takeover.raise_term()
        lead = Lead(
            config=self._config,
            term=term,
            roster=self.roster,
            calls=self._calls,
            journal=self._journal,
            limits=self._limits,
        )
        lineage, history = await takeover.settle(lead, reports)
        known = {commit.step for commit in self._log.read()}
        for commit in history:
            if commit.step not in known:
                self._log.append(commit)
        self.progress.lineage, self.progress.commits = lineage, history
        self._journal.record("leads", term=term.number, version=lineage.length)
        return lead, term

    # --- one step -------------------------------------------------------------------

    async def _step(self, lead: Lead, term: Term, lineage: Lineage) -> None:
        started = self._clock.now()
        ledger = Ledger(len(self.roster.stages))
        fences = Fences(
            run=self._config.hash,
            term=term,
            lineage=lineage,
            ledger=ledger,
            roster=self.roster,
            calls=self._calls,
            journal=self._journal,
            limits=self._limits,
        )
        pipeline = Pipeline(
            run=self._config.hash,
            term=term,
            lineage=lineage,
            ledger=ledger,
            roster=self.roster,
            fences=fences,
            calls=self._calls,
            clock=self._clock,
            journal=self._journal,
            limits=self._limits,
            counts=self.progress.counts,
            boundary=self._boundary,
        )
        computing = Computing(
            ledger=ledger, roster=self.roster, fences=fences, pipeline=pipeline, journal=self._journal
        )
        await computing.run(lineage.length, self._batches, self._config.step.microbatches, self._fixed_window)
        computed = self._clock.now()
        closes = self._closes(ledger, fences, pipeline)
        results = await self._close(ledger, closes)
        closed = self._clock.now()
        commit = lead.decide(lineage, ledger, results)
        await lead.commit(commit, lineage, [result.donors for result in results])
        applied = self._clock.now()
        self._committed(commit, lineage)
        self.progress.step_seconds[commit.step] = applied - started
        self._journal.record(
            "step",
            step=commit.step,
            loss=commit.loss,
            tokens=sum(commit.tokens),
            seconds=applied - started,
            compute_seconds=computed - started,
            freeze_seconds=max(close.freeze_seconds for close in closes),
            reduce_seconds=max(close.reduce_seconds for close in closes),
            apply_seconds=applied - closed,
        )
        if self._on_step is not None:
            self._on_step(commit)

    def _closes(self, ledger: Ledger, fences: Fences, pipeline: Pipeline) -> list[StageClose]:
        return [
            StageClose(
                stage=stage,
                ledger=ledger,
                roster=self.roster,
                fences=fences,
                pipeline=pipeline,
                calls=self._calls,
                clock=self._clock,
                journal=self._journal,
                limits=self._limits,
                gradient_bytes=4 * stage_parameters(self._config.model, stage),
            )
            for stage in range(len(self.roster.stages))
        ]

    async def _close(self, ledger: Ledger, closes: list[StageClose]) -> list[StageResult]:
        """All stages at once.  A repair may exclude a microbatch: then every stage closes again without it."""
        while True:
            excluded = set(ledger.excluded)
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(close.run()) for close in closes]
            if ledger.excluded == excluded:
                return [task.result() for task in running]
            for stage in range(len(closes)):
                ledger.attempts[stage] += 1

    def _committed(self, commit: CommitRecord, parent: Lineage) -> None:
        self._log.append(commit)
        self.progress.commits.append(commit)
        self.progress.lineage = parent.after(commit)

    # --- beside the steps --------------------------------------------------------------

    async def _renew_lease(self, lease: Lease, term: Term) -> None:
        while True:
            await lease.renew(term, self._lineage())
            await self._clock.sleep(LEASE_RENEW_SECONDS)

    async def _renew_run(self) -> None:
        while True:
            await self._clock.sleep(RUN_RENEW_SECONDS)
            await self._directory.publish_run(self._config)

    async def _watch_stages(self) -> None:
        """Say which stage is empty; give the run up when a committed state stays away too long.

        Between two steps every stage looks empty for a moment: only a stage that stays so, with no commit, is.
        """
        since: dict[int, float] = {}
        committed = -1
        while True:
            now = self._clock.now()
            moved, committed = self._lineage().length != committed, self._lineage().length
            empty = set() if moved else set(self.roster.empty_stages())
            for stage in since.keys() - empty:
                start = since.pop(stage)
                if stage in self.progress.empty:
                    self.progress.empty.remove(stage)
                    self._journal.record("stage_back", stage=stage, seconds=now - start)
            for stage in empty:
                start = since.setdefault(stage, now)
                if stage not in self.progress.empty and now - start >= EMPTY_SECONDS:
                    self.progress.empty.add(stage)
                    self._journal.record("stage_empty", stage=stage)
                if committed and now - start > self._state_timeout_seconds:
                    raise StateLost(
                        f"stage {stage} has had no peer for {now - start:.0f} s: the state after step {committed - 1} "
                        f"of run '{self._config.run.name}' is held by nobody that can be reached"
                    )
            await self._clock.sleep(1.0)
