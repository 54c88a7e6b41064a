"""The first part of a step: every microbatch through all stages; what peers that die take along is computed again."""

from __future__ import annotations

import asyncio

from swarm.ids import MicrobatchId
from swarm.ports import Batches, Journal
from swarm.roles.fences import Fences
from swarm.roles.ledger import Ledger, Passage
from swarm.roles.pipeline import Pipeline
from swarm.roles.roster import Roster

LOOK_SECONDS = 5.0
"""Between two looks for peers that are gone, if nothing is heard meanwhile."""
WINDOW_PER_PEER = 4
"""Microbatches in flight: so many keep the queues of fast and slow peers filled (docs/simulation.md)."""


class Computing:
    """Fills one step's ledger."""

    def __init__(self, *, ledger: Ledger, roster: Roster, fences: Fences, pipeline: Pipeline, journal: Journal) -> None:
        self._ledger = ledger
        self._roster = roster
        self._fences = fences
        self._pipeline = pipeline
        self._journal = journal

    async def run(self, step: int, batches: Batches, microbatches: int, window: int | None) -> None:
        """Until every stage has acknowledged every microbatch of the step.  ``window`` None: by the number of peers."""
        for stage in self._roster.stages:
            for member in stage.values():
                member.lane.begin_step()
        room = asyncio.Semaphore(window or self._window())
        async with asyncio.TaskGroup() as tasks:
            carried = []
            for index in range(microbatches):
                passage = self._passage(step, MicrobatchId(index), batches)
                carried.append(tasks.create_task(self._carry(passage, room)))
            mender = tasks.create_task(self._mend(tasks))
            await asyncio.wait(carried)
            mender.cancel()
        self._ledger.computing = False

    def _window(self) -> int:
        stages = range(len(self._roster.stages))
        return max(WINDOW_PER_PEER, WINDOW_PER_PEER * sum(len(self._roster.eligible(stage)) for stage in stages))

    def _passage(self, step: int, microbatch: MicrobatchId, batches: Batches) -> Passage:
        inputs, targets, tokens = batches.microbatch(step, microbatch)
        passage = Passage(microbatch=microbatch, tokens=tokens)
        passage.inputs[0] = inputs
        passage.seeds[len(self._roster.stages) - 1] = targets
        self._ledger.passages[microbatch] = passage
        return passage

    async def _carry(self, passage: Passage, room: asyncio.Semaphore) -> None:
        async with room:
            await self._pipeline.train(passage)

    async def _mend(self, tasks: asyncio.TaskGroup) -> None:
        """What a peer that is gone held is computed again now, beside all else, and not at the close.

        Beyond the window: it is bounded by what one peer held.  Whoever comes back is let in again.
        """
        while True:
            await self._roster.changed(LOOK_SECONDS)
            for holder, stage, passages in self._fences.take_lost():
                self._journal.record("mending", peer=holder.peer, stage=stage, microbatches=len(passages))
                for passage in passages:
                    tasks.create_task(self._pipeline.repair(passage, stage))
            for stage in range(len(self._roster.stages)):
                await self._fences.lift(stage)
