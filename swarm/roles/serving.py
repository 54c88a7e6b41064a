"""A peer's microbatch calls: forward, backward, void.  A gradient is computed apart, checked, and added as one job."""

from __future__ import annotations

from swarm.errors import BadRequest, Busy, NotFinite, TimedOut
from swarm.messages import (
    BackwardReply,
    BackwardRequest,
    ForwardRequest,
    MicrobatchCall,
    VoidReply,
    VoidRequest,
)
from swarm.policy.admission import retry_after
from swarm.policy.routing import BACKWARD_UNITS, FORWARD_UNITS, Lane
from swarm.ports import Clock, Draw, Executor, Gradient, Journal, Priority, StageModule
from swarm.roles.reducing import Reducing
from swarm.roles.seat import Seat
from swarm.roles.stepbook import StepBook
from swarm.tensors import TensorData


class Serving:
    """Answers the calls that carry microbatches."""

    def __init__(
        self,
        *,
        seat: Seat,
        module: StageModule,
        executor: Executor,
        reducing: Reducing,
        clock: Clock,
        journal: Journal,
        microbatches: int,
        microbatch_tokens: int,
    ) -> None:
        self._seat = seat
        self._module = module
        self._executor = executor
        self._reducing = reducing
        self._clock = clock
        self._journal = journal
        self._microbatches = microbatches
        self._microbatch_tokens = microbatch_tokens
        self.lane = Lane()
        """This peer's own measured speed."""

    def admit(self, request_kind: str, deadline_seconds: float) -> None:
        """Refuse, before its tensor is accepted, a call that could not be answered in time."""
        self._seat.check_ready()
        units = FORWARD_UNITS if request_kind == "forward" else BACKWARD_UNITS
        seconds = self.lane.seconds_per_unit * units if self.lane.measurements else 0.0
        wait = retry_after(self._executor.waiting, seconds, deadline_seconds)
        if wait is not None:
            raise Busy(wait)

    async def forward(self, request: ForwardRequest) -> TensorData:
        """Changes no state: any try, at any peer of the stage, gives the same."""
        call = request.call
        deadline = self._clock.now() + call.deadline_seconds
        self._check_microbatch(call.microbatch)
        self._module.check_forward(request)
        await self._seat.reach(call.key, deadline)

        def job() -> TensorData:
            started = self._start(call, deadline)
            output = self._module.forward(self._draw(call), request.inputs, keep_graph=request.keep_graph)
            self._measure(FORWARD_UNITS, started)
            return output

        return await self._executor.run(Priority.FORWARD, job)

    async def backward(self, request: BackwardRequest) -> BackwardReply:
        """Idempotent per (step, stage, microbatch): asked again it answers again and adds nothing."""
        call = request.call
        deadline = self._clock.now() + call.deadline_seconds
        self._check_microbatch(call.microbatch)
        if not 0 <= request.tokens <= self._microbatch_tokens:
            raise BadRequest(f"{request.tokens} tokens in a microbatch of {self._microbatch_tokens}")
        self._module.check_backward(request)
        await self._seat.reach(call.key, deadline)
        if request.accumulate:
            await self._reducing.reopen(call.key, call.attempt)

        def job() -> BackwardReply:
            started = self._start(call, deadline)
            book = self._seat.open_book(call.key, self._module.drop_gradient) if request.accumulate else None
            repeated = book is not None and book.holds(call)
            gradient = self._module.backward(self._draw(call), request.inputs, request.seed)
            self._measure(BACKWARD_UNITS, started)
            if not gradient.finite:
                raise NotFinite("gradient")
            if book is not None and not repeated:
                if self._clock.now() > deadline:
                    raise TimedOut("computed after its deadline; not added")
                self._seat.confirm(call.key)
                self._add(book, call, request.tokens, gradient)
            return BackwardReply(
                input_gradient=gradient.input_gradient, loss=gradient.loss, accumulated=book is not None
            )

        return await self._executor.run(Priority.BACKWARD, job)

    async def void(self, request: VoidRequest) -> VoidReply:
        """Definite: whatever of lower tries is not added when this is answered never will be."""
        self._seat.check_place(request.key.run, request.key.stage)
        self._seat.follow(request.key.term)
        self._check_microbatch(request.microbatch)
        await self._reducing.reopen(request.key, 0)  # a void under a new term opens a new book

        def job() -> VoidReply:
            book = self._seat.open_book(request.key, self._module.drop_gradient)
            return VoidReply(held=book.void(request.microbatch, request.below_try))

        return await self._executor.run(Priority.CONTROL, job)

    # --- on the compute thread ----------------------------------------------------

    def _start(self, call: MicrobatchCall, deadline: float) -> float:
        """Drop work that came too late while it was queued; returns the time."""
        now = self._clock.now()
        if now > deadline:
            raise TimedOut("its deadline passed in the queue")
        self._seat.confirm(call.key)
        return now

    def _add(self, book: StepBook, call: MicrobatchCall, tokens: int, gradient: Gradient) -> None:
        try:
            self._module.accumulate(gradient)
        except BaseException:
            # The sum may be half changed: nothing of it can be trusted, so nothing of it is kept.
            book.held.clear()
            self._module.drop_gradient()
            self._journal.record("gradient_lost", step=call.key.step, microbatch=call.microbatch)
            raise
        book.add(call, tokens, gradient.samples)

    def _measure(self, units: float, started: float) -> None:
        self.lane.answered(units, started, self._clock.now())

    # --- anywhere -----------------------------------------------------------------

    def _check_microbatch(self, microbatch: int) -> None:
        if not 0 <= microbatch < self._microbatches:
            raise BadRequest(f"microbatch {microbatch} of {self._microbatches}")

    @staticmethod
    def _draw(call: MicrobatchCall) -> Draw:
        return Draw(step=call.key.step, microbatch=call.microbatch)
