"""A peer: one stage, its state, and the loops that keep it in the swarm.  See docs/protocol.md."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from swarm import PROTOCOL_VERSION
from swarm.config import RunConfig
from swarm.ids import RunHash
from swarm.messages import (
    AdoptRequest,
    ApplyRequest,
    BackwardReply,
    BackwardRequest,
    Contact,
    DropRequest,
    ForwardRequest,
    FreezeReply,
    FreezeRequest,
    GradientRequest,
    Greeting,
    PeerReport,
    ReducedMark,
    ReduceReply,
    ReduceRequest,
    StateHead,
    StateMark,
    StateRequest,
    VoidReply,
    VoidRequest,
)
from swarm.policy.deadlines import LAN, Limits
from swarm.ports import Averager, Clock, Directory, Executor, Journal, Priority, StageCalls, StageModule
from swarm.records import PeerRecord, PeerState
from swarm.roles.catchup import CatchUp
from swarm.roles.committing import Committing
from swarm.roles.donation import Donation
from swarm.roles.reducing import Reducing
from swarm.roles.seat import Seat
from swarm.roles.serving import Serving
from swarm.tensors import Buffer, TensorData

RENEW_SECONDS = 8.0
"""Between two renewals of the peer's record (it lives about four times as long)."""
ANNOUNCE_GAP_SECONDS = 0.3
"""Least time between two announcements, however often things change."""
RENEW_RUN_EVERY = 4
"""Renewals of the own record per renewal of the run's config, which every node renews."""


class Peer:
    """Implements :class:`swarm.ports.StageService` and keeps the peer's record alive."""

    def __init__(
        self,
        *,
        config: RunConfig,
        stage: int,
        contact: Contact,
        module: StageModule,
        executor: Executor,
        averager: Averager,
        calls: StageCalls,
        directory: Directory,
        clock: Clock,
        journal: Journal,
        numeric_class: str,
        limits: Limits = LAN,
    ) -> None:
        run: RunHash = config.hash
        self.seat = Seat(run=run, stage=stage, contact=contact, clock=clock)
        self._config = config
        self._module = module
        self._executor = executor
        self._directory = directory
        self._clock = clock
        self._journal = journal
        self._numeric_class = numeric_class
        self.reducing = Reducing(
            seat=self.seat,
            module=module,
            executor=executor,
            averager=averager,
            calls=calls,
            clock=clock,
            journal=journal,
            limits=limits,
        )
        self.serving = Serving(
            seat=self.seat,
            module=module,
            executor=executor,
            reducing=self.reducing,
            clock=clock,
            journal=journal,
            microbatches=config.step.microbatches,
            microbatch_tokens=config.step.microbatch_size * config.model.sequence_length,
        )
        self.committing = Committing(
            seat=self.seat,
            module=module,
            executor=executor,
            reducing=self.reducing,
            clock=clock,
            journal=journal,
            limits=limits,
            stages=config.model.stage_count,
            numeric_class=numeric_class,
        )
        self.donation = Donation(seat=self.seat, module=module, executor=executor, limits=limits)
        self.catchup = CatchUp(
            seat=self.seat,
            module=module,
            executor=executor,
            reducing=self.reducing,
            directory=directory,
            calls=calls,
            clock=clock,
            journal=journal,
            limits=limits,
            run=run,
        )

    # --- life ---------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled; the own record is withdrawn at the end."""
        await self._probe()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._announce(), name="announce")
                tasks.create_task(self._keep_current(), name="keep current")
        finally:
            await self.committing.close()
            await self.reducing.close()
            await self._directory.withdraw(self.record())

    async def _probe(self) -> None:
        seconds = await self._executor.run(Priority.BACKGROUND, self._module.probe)
        self.serving.lane.start_from(seconds)

    async def _announce(self) -> None:
        renewals = 0
        while True:
            self.seat.changed.clear()
            await self._directory.announce(self.record())
            if renewals % RENEW_RUN_EVERY == 0:
                await self._directory.publish_run(self._config)
            renewals += 1
            await self._clock.sleep(ANNOUNCE_GAP_SECONDS)
            try:
                async with asyncio.timeout(RENEW_SECONDS):
                    await self.seat.changed.wait()
            except TimeoutError:
                continue

    async def _keep_current(self) -> None:
        while True:
            if self.seat.state is PeerState.JOINING:
                await self.catchup.until_ready()
            await self.seat.wait_moved()

    def record(self) -> PeerRecord:
        """What this peer says of itself now."""
        return PeerRecord(
            peer=self.seat.contact.peer,
            session=self.seat.contact.session,
            run=self.seat.run,
            protocol=PROTOCOL_VERSION,
            stage=self.seat.stage,
            endpoint=self.seat.contact.endpoint,
            state=self.seat.state,
            lineage=self.seat.lineage,
            forward_seconds=self.serving.lane.seconds_per_unit,
            queue=self._executor.waiting,
            numeric_class=self._numeric_class,
        )

    # --- swarm.ports.StageService -------------------------------------------------

    def admit(self, request_kind: str, deadline_seconds: float) -> None:
        self.serving.admit(request_kind, deadline_seconds)

    async def forward(self, request: ForwardRequest) -> TensorData:
        return await self.serving.forward(request)

    async def backward(self, request: BackwardRequest) -> BackwardReply:
        return await self.serving.backward(request)

    async def void(self, request: VoidRequest) -> VoidReply:
        return await self.serving.void(request)

    async def greet(self, request: Greeting) -> PeerReport:
        """Follow the term, tell what is held; fetch state if the run's lineage says that it is needed."""
        seat = self.seat
        seat.check_place(request.run, seat.stage)
        seat.follow(request.term)
        # An update that began under an earlier lead may still end: what is told must not be overtaken by it.
        await self.committing.settled()
        seat.follow(request.term)
        lineage = request.lineage
        if lineage is not None and seat.state is PeerState.READY and not seat.has_outrun(request.term, lineage):
            # One commit short of the lead's is sent that commit; more than one beyond it, the lead is in the wrong.
            beyond = lineage.length - seat.lineage.length
            away = lineage != seat.lineage and beyond >= -1 and beyond != 1
            if request.distrust or away:
                seat.fall_behind(lineage)
        return seat.report(self._executor.waiting, self.serving.lane.seconds_per_unit)

    async def freeze(self, request: FreezeRequest) -> FreezeReply:
        return await self.reducing.freeze(request)

    async def drop(self, request: DropRequest) -> None:
        await self.reducing.drop(request)

    async def reduce(self, request: ReduceRequest) -> ReduceReply:
        return await self.reducing.reduce(request)

    async def adopt(self, request: AdoptRequest) -> ReducedMark:
        return await self.reducing.adopt(request)

    async def apply(self, request: ApplyRequest) -> StateMark:
        return await self.committing.apply(request)

    async def fetch_state(self, request: StateRequest) -> tuple[StateHead, AsyncIterator[Buffer]]:
        return await self.donation.fetch_state(request)

    async def fetch_gradient(self, request: GradientRequest) -> AsyncIterator[Buffer]:
        return await self.donation.fetch_gradient(request)
