"""A peer's side of the commit: apply once, in order, and say what the parameters are then."""

from __future__ import annotations

import asyncio

from swarm.errors import BadRequest
from swarm.messages import ApplyRequest, StateMark
from swarm.policy.deadlines import Limits
from swarm.ports import Clock, Executor, Journal, Priority, StageModule
from swarm.records import StageCommit
from swarm.roles.reducing import Reducing
from swarm.roles.seat import TORN, Seat


class Committing:
    """Applies commits."""

    def __init__(
        self,
        *,
        seat: Seat,
        module: StageModule,
        executor: Executor,
        reducing: Reducing,
        clock: Clock,
        journal: Journal,
        limits: Limits,
        stages: int,
        numeric_class: str,
    ) -> None:
        self._seat = seat
        self._module = module
        self._executor = executor
        self._reducing = reducing
        self._clock = clock
        self._journal = journal
        self._limits = limits
        self._stages = stages
        self._numeric_class = numeric_class
        self._finishing: set[asyncio.Task[StateMark]] = set()

    async def apply(self, request: ApplyRequest) -> StateMark:
        """Apply ``request.commit`` if it is next; answer again if it was the last.  Fetches a missed reduce."""
        seat, key, commit = self._seat, request.key, request.commit
        seat.check_place(key.run, key.stage)
        seat.follow(key.term)
        if len(commit.stages) != self._stages or commit.step != key.step or commit.parent != key.lineage.chain:
            raise BadRequest(f"commit of step {commit.step} does not fit the call for step {key.step}")
        if not self._was_last(request):
            await seat.reach(key, self._clock.now() + self._limits.control_seconds)
            wanted = commit.stages[seat.stage]
            if not self._keeps(request, wanted):
                await self._reducing.fetch_reduced(key, wanted.attempt, wanted.digest, request.donors)
        task = asyncio.create_task(self._finish(request), name="apply")
        self._finishing.add(task)
        task.add_done_callback(self._finished)
        return await asyncio.shield(task)

    async def settled(self) -> None:
        """Return once no update is under way: until then nobody can say which version this peer is at."""
        while self._finishing:
            await asyncio.wait(self._finishing)

    async def close(self) -> None:
        """End what is under way."""
        for task in self._finishing:
            task.cancel()
        await self.settled()

    async def _finish(self, request: ApplyRequest) -> StateMark:
        """Goes on when the caller has given up: the compute thread does as well."""
        if not self._was_last(request):  # a repeated one changes nothing, and the next step's reduce may be under way
            await self._reducing.close()  # the update uses the sum's memory
        try:
            return await self._executor.run(Priority.CONTROL, lambda: self._apply(request))
        finally:
            if self._seat.lineage.chain == TORN:
                self._seat.fall_behind(request.key.lineage)
            self._seat.touch()

    def _finished(self, task: asyncio.Task[StateMark]) -> None:
        self._finishing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:  # the caller may have gone
            self._journal.record("apply_failed", stage=self._seat.stage, reason=str(error))

    def _was_last(self, request: ApplyRequest) -> bool:
        seat = self._seat
        return bool(seat.commits) and seat.commits[-1] == request.commit

    def _keeps(self, request: ApplyRequest, wanted: StageCommit) -> bool:
        kept = self._seat.kept
        return kept is not None and kept[0] == request.key.lineage and kept[1].digest == wanted.digest

    # --- on the compute thread ----------------------------------------------------

    def _apply(self, request: ApplyRequest) -> StateMark:
        seat, commit = self._seat, request.commit
        if self._was_last(request):
            squared_norm = self._module.squared_norm()
        else:
            seat.confirm(request.key)
            if not self._keeps(request, commit.stages[seat.stage]):
                raise BadRequest("the reduced gradient kept is not the commit's")
            try:
                squared_norm = self._module.apply(commit.step, commit.clip_factor)
            except BaseException:
                seat.torn()
                self._module.drop_gradient()
                raise
            seat.advance(commit)
            self._journal.record("applied", stage=seat.stage, step=commit.step, version=seat.lineage.length)
        return StateMark(
            lineage=seat.lineage,
            squared_norm=squared_norm,
            digest=self._module.digest() if request.digest else None,
            numeric_class=self._numeric_class,
        )
