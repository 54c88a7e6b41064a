"""A peer's side of the close: freeze, drop, reduce, adopt."""

from __future__ import annotations

import asyncio
import hashlib
import math
from contextlib import aclosing
from functools import partial
from typing import Any

from swarm.errors import FAILURES, BadReply, BadRequest, Frozen, NotFinite, PeerFailed, ReduceFailed
from swarm.ids import Digest, PeerId
from swarm.messages import (
    AdoptRequest,
    Contact,
    DropRequest,
    FreezeReply,
    FreezeRequest,
    GradientRequest,
    ReducedMark,
    ReduceReply,
    ReduceRequest,
    StepKey,
)
from swarm.policy.deadlines import Limits, transfer_deadline
from swarm.ports import Averager, Clock, Executor, Journal, Priority, StageCalls, StageModule
from swarm.roles.seat import Seat


class Reducing:
    """Closes the step's gradient and averages it with the group."""

    def __init__(
        self,
        *,
        seat: Seat,
        module: StageModule,
        executor: Executor,
        averager: Averager,
        calls: StageCalls,
        clock: Clock,
        journal: Journal,
        limits: Limits,
    ) -> None:
        self._seat = seat
        self._module = module
        self._executor = executor
        self._averager = averager
        self._calls = calls
        self._clock = clock
        self._journal = journal
        self._limits = limits
        self._running: tuple[ReduceRequest, asyncio.Task[ReduceReply]] | None = None

    async def freeze(self, request: FreezeRequest) -> FreezeReply:
        """Add nothing sent in this attempt or before, and say what is held."""
        await self._reach(request.key)
        await self.reopen(request.key, request.attempt)

        def job() -> FreezeReply:
            book = self._seat.open_book(request.key, self._module.drop_gradient)
            return FreezeReply(session=self._seat.contact.session, held=book.freeze(request.attempt))

        return await self._executor.run(Priority.CONTROL, job)

    async def drop(self, request: DropRequest) -> None:
        """Throw the step's gradient away.  Repeatable."""
        await self._reach(request.key)
        await self.reopen(request.key, request.attempt + 1)

        def job() -> None:
            book = self._seat.open_book(request.key, self._module.drop_gradient)
            book.drop(request.attempt)
            self._module.drop_gradient()

        await self._executor.run(Priority.CONTROL, job)

    async def reduce(self, request: ReduceRequest) -> ReduceReply:
        """Take part in an all-reduce.  The same request again joins the one that runs, or repeats its result."""
        await self._reach(request.key)
        while self._running is not None and self._running[0] != request:
            if self._later(self._running[0], request):
                raise Frozen(f"attempt {request.attempt} is over, {self._running[0].attempt} is being reduced")
            await self.close()  # another request may have begun meanwhile: looked at again
        if self._running is None:
            self._running = (request, asyncio.create_task(self._reduce(request)))
        task = self._running[1]
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if task.cancelled() and (this is None or not this.cancelling()):
                raise Frozen(f"attempt {request.attempt} of step {request.key.step} was ended by a later one") from None
            raise

    @staticmethod
    def _later(running: ReduceRequest, request: ReduceRequest) -> bool:
        return running.key == request.key and running.attempt > request.attempt

    async def reopen(self, key: StepKey, attempt: int) -> None:
        """End a reduce of an earlier attempt, step or lead: nothing may change the sum while it is read."""
        if self._running is not None:
            running = self._running[0]
            if running.key != key or running.attempt < attempt:
                await self.close()

    async def close(self) -> None:
        """End the reduce that runs, if any."""
        if self._running is None:
            return
        task = self._running[1]
        self._running = None
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and (error := task.exception()) is not None:
            self._journal.record("reduce_ended", reason=str(error))

    async def _reduce(self, request: ReduceRequest) -> ReduceReply:
        mine = [m for m in request.members if m.contact == self._seat.contact]
        if len(mine) != 1:
            raise BadRequest("this life of the peer is no member of the group")

        def take() -> tuple[Any, int]:
            book = self._seat.open_book(request.key, self._module.drop_gradient)
            if book.contribute(request.attempt, mine[0].microbatches, mine[0].tokens):
                book.drop(request.attempt)
                self._module.drop_gradient()
            return self._module.gradient_sum(), book.samples

        gradient_sum, samples = await self._executor.run(Priority.CONTROL, take)
        try:
            async with asyncio.timeout(request.deadline_seconds):
                mean = await self._averager.reduce(request, gradient_sum)
        except NotFinite:
            # Each microbatch's gradient was finite when it was added: the sum overflowed, or this machine is at fault.
            await self._executor.run(Priority.CONTROL, lambda: self._lose(request))
            raise
        except (ReduceFailed, TimeoutError) as error:
            missed = error.unreachable if isinstance(error, ReduceFailed) else ()
            reason = str(error) or "no result before the deadline"
            unreachable = tuple(PeerId(peer) for peer in missed)
            return ReduceReply(reduced=None, samples=samples, unreachable=unreachable, reason=reason)

        def keep() -> ReducedMark:
            self._seat.confirm(request.key)
            digest, squared_norm = self._module.set_reduced(mean)
            if not math.isfinite(squared_norm):
                self._seat.kept = None  # the module keeps this now
                raise NotFinite("gradient")
            mark = ReducedMark(attempt=request.attempt, digest=digest, squared_norm=squared_norm)
            self._seat.keep_reduced(mark)
            return mark

        mark = await self._executor.run(Priority.CONTROL, keep)
        self._seat.touch()
        return ReduceReply(reduced=mark, samples=samples, unreachable=(), reason="")

    def _lose(self, request: ReduceRequest) -> None:
        """Hold nothing of the step any more, so that the next close has it computed again."""
        book = self._seat.open_book(request.key, self._module.drop_gradient)
        lost = len(book.held)
        book.drop(request.attempt)
        self._module.drop_gradient()
        self._journal.record(
            "gradient_lost", step=request.key.step, microbatches=lost, reason="the sum of them is not finite"
        )

    async def adopt(self, request: AdoptRequest) -> ReducedMark:
        """Fetch the group's result instead of reducing.  Raises Retryable if no donor gives it."""
        await self._reach(request.key)
        return await self.fetch_reduced(request.key, request.attempt, request.digest, request.donors)

    async def fetch_reduced(
        self, key: StepKey, attempt: int, digest: Digest, donors: tuple[Contact, ...]
    ) -> ReducedMark:
        """Get and keep the averaged gradient with this digest, from the first donor that gives it."""
        problems: list[str] = []
        for donor in donors:
            if donor.peer == self._seat.contact.peer:
                continue
            try:
                async with asyncio.timeout(transfer_deadline(self._limits, self._module.gradient_bytes, 1.0)):
                    data = await self._download(donor, key, digest)
            except (*FAILURES, TimeoutError) as error:
                problems.append(f"{donor.peer}: {str(error) or 'too slow'}")
            else:
                return await self._executor.run(Priority.CONTROL, partial(self._load, key, attempt, data))
        raise PeerFailed("no donor gave the reduced gradient: " + ("; ".join(problems) or "there is none"))

    async def _download(self, donor: Contact, key: StepKey, digest: Digest) -> bytearray:
        request = GradientRequest(run=key.run, stage=key.stage, parent=key.lineage, digest=digest)
        data = bytearray()
        chunks = await self._calls.fetch_gradient(donor, request, self._limits.reduce_floor_seconds)
        async with aclosing(chunks):
            async for chunk in chunks:
                data += chunk
                if len(data) > self._module.gradient_bytes:
                    raise BadReply(f"more than the {self._module.gradient_bytes} bytes of a gradient")
        found = hashlib.sha256(data).hexdigest()
        if found != digest:
            raise BadReply(f"reduced gradient has digest {found[:12]}, not {digest[:12]}")
        return data

    def _load(self, key: StepKey, attempt: int, data: bytearray) -> ReducedMark:
        self._seat.confirm(key)
        try:
            digest, squared_norm = self._module.load_reduced(data)
        except ValueError as error:
            raise BadReply(str(error)) from None
        mark = ReducedMark(attempt=attempt, digest=digest, squared_norm=squared_norm)
        self._seat.keep_reduced(mark)
        return mark

    async def _reach(self, key: StepKey) -> None:
        await self._seat.reach(key, self._clock.now() + self._limits.control_seconds)
