"""What roles rely on of calls: answers, errors, deadlines, and that nothing goes on for a caller that is gone."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from swarm.errors import (
    BadReply,
    BadRequest,
    Busy,
    Draining,
    Frozen,
    NeedsInput,
    NotFinite,
    PeerFailed,
    ReduceFailed,
    RunFailed,
    Stale,
    StateLost,
    Superseded,
    SwarmError,
    TimedOut,
    Unreachable,
    Voided,
    WrongRun,
)
from swarm.ids import MicrobatchId, SessionId
from swarm.messages import (
    AdoptRequest,
    ApplyRequest,
    BackwardRequest,
    DropRequest,
    FreezeRequest,
    GradientRequest,
    Greeting,
    GroupMember,
    ReduceRequest,
    StateRequest,
    VoidRequest,
)
from swarm.tensors import TensorData
from tests.contract.lines import LARGE, LONG_SECONDS, SLACK_SECONDS, SOON_SECONDS, Line, real, simulated
from tests.contract.worlds import FAST, REAL, Real, Simulated, World, world_fixture
from tests.stage_double import (
    COMMIT,
    DIGEST,
    KEY,
    LINEAGE,
    MARK,
    PEER,
    RUN,
    TERM,
    call,
    forward_request,
    report,
    tensor,
)

world = world_fixture((Simulated, simulated, FAST), (Real, real, REAL))

GREETING = Greeting(run=RUN, term=TERM)
STATE = StateRequest(run=RUN, stage=1)
GRADIENT = GradientRequest(run=RUN, stage=1, parent=LINEAGE, digest=DIGEST)


def small(deadline_seconds: float = LONG_SECONDS) -> BackwardRequest:
    """A call with little to send: no inputs, and targets as its seed."""
    return BackwardRequest(call=call(deadline_seconds), inputs=None, seed=tensor(b"12345678"), tokens=2)


# --- answers ------------------------------------------------------------------------------


def test_each_call_reaches_its_method_and_brings_its_answer(world: World[Line]) -> None:
    async def test(line: Line) -> None:
        calls, to = line.calls, line.to
        member = GroupMember(contact=to, microbatches=(MicrobatchId(1),), tokens=5)
        void = VoidRequest(key=KEY, microbatch=MicrobatchId(3), below_try=2)
        freeze, drop = FreezeRequest(key=KEY, attempt=1), DropRequest(key=KEY, attempt=1)
        reduce = ReduceRequest(key=KEY, attempt=1, members=(member,), total_tokens=5, deadline_seconds=3)
        adopt = AdoptRequest(key=KEY, attempt=2, digest=DIGEST, donors=(to,))
        apply = ApplyRequest(key=KEY, commit=COMMIT, donors=(to,))
        assert (await calls.void(to, void, LONG_SECONDS)).held
        assert await calls.greet(to, GREETING, LONG_SECONDS) == report()
        assert (await calls.freeze(to, freeze, LONG_SECONDS)).held[0].tokens == 128
        await calls.drop(to, drop, LONG_SECONDS)
        assert (await calls.reduce(to, reduce, LONG_SECONDS)).unreachable == (PEER,)
        assert await calls.adopt(to, adopt, LONG_SECONDS) == MARK
        assert (await calls.apply(to, apply, LONG_SECONDS)).lineage == LINEAGE.after(COMMIT)
        assert line.stage.heard == [void, GREETING, freeze, drop, reduce, adopt, apply]

    world.run(test)


def test_tensors_arrive_as_they_were(world: World[Line]) -> None:
    async def test(line: Line) -> None:
        sent = tensor(bytes(range(240)), "float32", (3, 4, 5))
        answer = await line.calls.forward(line.to, forward_request(sent))
        assert (answer.spec, bytes(answer.data)) == (sent.spec, sent.data)
        with_inputs = replace(small(), inputs=sent, seed=tensor(bytes(16), "int64", (1, 2)))
        reply = await line.calls.backward(line.to, with_inputs)
        assert reply.input_gradient is not None
        assert (reply.input_gradient.spec, bytes(reply.input_gradient.data)) == (sent.spec, sent.data)
        assert (reply.loss, reply.accumulated) == (2.5, True)
        without = replace(small(), accumulate=False)
        reply = await line.calls.backward(line.to, without)
        assert (reply.input_gradient, reply.accumulated) == (None, False)
        assert line.stage.received[1:] == [with_inputs, without]

    world.run(test)


def test_calls_go_on_side_by_side(world: World[Line]) -> None:
    async def test(line: Line) -> None:
        line.stage.gate.clear()
        waiting = [
            asyncio.create_task(line.calls.forward(line.to, forward_request(tensor(bytes([i] * 8))))) for i in range(8)
        ]
        for _ in waiting:
            await line.stage.arrivals.acquire()
        assert await line.calls.greet(line.to, GREETING, LONG_SECONDS) == report()
        assert not any(task.done() for task in waiting)
        line.stage.gate.set()
        answers: list[TensorData] = await asyncio.gather(*waiting)
        assert [bytes(answer.data) for answer in answers] == [bytes([i] * 8) for i in range(8)]

    world.run(test)


# --- errors -------------------------------------------------------------------------------

ERRORS: list[SwarmError] = [
    Busy(1.25),
    Draining("leaving"),
    Stale("older"),
    WrongRun("another"),
    Frozen("closed"),
    Voided("higher"),
    NeedsInput("gone"),
    BadRequest("malformed"),
    Superseded("another leads", followed=7),
    NotFinite("gradient"),
    NotFinite("input"),
    NotFinite("output"),
    PeerFailed("inside"),
    BadReply("of its own donor"),
    TimedOut("in the queue"),
    Unreachable("its own donor"),
    ReduceFailed("incomplete", unreachable=("a", "b")),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__name__}")
def test_an_error_of_the_protocol_arrives_as_it_was_raised(world: World[Line], error: SwarmError) -> None:
    async def test(line: Line) -> None:
        line.stage.failure = error
        for attempt in (
            lambda: line.calls.greet(line.to, GREETING, LONG_SECONDS),
            lambda: line.calls.forward(line.to, forward_request(tensor(b"12345678"))),
            lambda: line.calls.fetch_state(line.to, STATE, LONG_SECONDS),
            lambda: line.calls.fetch_gradient(line.to, GRADIENT, LONG_SECONDS),
        ):
            with pytest.raises(SwarmError) as caught:
                await attempt()
            assert type(caught.value) is type(error)
            assert fields(caught.value) == fields(error)

    world.run(test)


def fields(error: SwarmError) -> dict[str, object]:
    return {name: getattr(error, name, None) for name in ("retry_after_seconds", "followed", "where", "unreachable")}


class Odd(SwarmError):
    """Of the project's tree, but nothing that a peer may answer."""


@pytest.mark.parametrize("error", [KeyError("oops"), RunFailed("its own"), StateLost("its own"), Odd("strange")])
def test_whatever_else_goes_wrong_at_a_peer_is_its_failure(world: World[Line], error: Exception) -> None:
    """Least of all does a callee's fatal error stop its caller."""

    async def test(line: Line) -> None:
        line.stage.failure = error
        with pytest.raises(PeerFailed):
            await line.calls.greet(line.to, GREETING, LONG_SECONDS)
        with pytest.raises(PeerFailed):
            await line.calls.forward(line.to, forward_request(tensor(b"12345678")))
        line.stage.failure = None
        assert await line.calls.greet(line.to, GREETING, LONG_SECONDS) == report()

    world.run(test)


def test_a_deadline_that_passes_at_the_peer_is_a_time_out(world: World[Line]) -> None:
    async def test(line: Line) -> None:
        line.stage.failure = TimeoutError()
        with pytest.raises(TimedOut):
            await line.calls.greet(line.to, GREETING, LONG_SECONDS)

    world.run(test)


def test_where_nobody_listens_is_unreachable(world: World[Line]) -> None:
    async def test(line: Line) -> None:
        for attempt in (
            lambda: line.calls.greet(line.nobody, GREETING, LONG_SECONDS),
            lambda: line.calls.forward(line.nobody, forward_request(tensor(b"12345678"))),
            lambda: line.calls.fetch_state(line.nobody, STATE, LONG_SECONDS),
            lambda: line.calls.fetch_gradient(line.nobody, GRADIENT, LONG_SECONDS),
        ):
            with pytest.raises(Unreachable):
                await attempt()

    world.run(test)


def test_another_life_refuses_what_was_meant_for_an_earlier_one(world: World[Line]) -> None:
    async def test(line: Line) -> None:
        earlier = replace(line.to, session=SessionId("f" * 16))
        for attempt in (
            lambda: line.calls.greet(earlier, GREETING, LONG_SECONDS),
            lambda: line.calls.forward(earlier, forward_request(tensor(b"12345678"))),
            lambda: line.calls.fetch_state(earlier, STATE, LONG_SECONDS),
            lambda: line.calls.fetch_gradient(earlier, GRADIENT, LONG_SECONDS),
        ):
            with pytest.raises(WrongRun):
                await attempt()
        assert (line.stage.heard, line.stage.received, line.stage.admitted) == ([], [], [])

    world.run(test)


def test_a_death_breaks_the_calls_that_run(world: World[Line]) -> None:
    async def test(line: Line) -> None:
        line.stage.gate.clear()
        task = asyncio.create_task(line.calls.forward(line.to, forward_request(tensor(b"12345678"))))
        await line.stage.entered.wait()
        await line.kill()
        with pytest.raises(Unreachable):
            await task
        with pytest.raises(Unreachable):
            await line.calls.greet(line.to, GREETING, LONG_SECONDS)

    world.run(test)


# --- deadlines and callers that give up ---------------------------------------------------


def test_a_call_lasts_no_longer_than_its_time_out_and_then_its_work_is_cancelled(world: World[Line]) -> None:
    async def test(line: Line) -> None:
        line.stage.gate.clear()
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(TimedOut):
            await line.calls.forward(line.to, forward_request(tensor(b"12345678"), SOON_SECONDS))
        assert SOON_SECONDS - 0.05 <= loop.time() - began < SOON_SECONDS + SLACK_SECONDS
        await line.stage.cancelled.wait()
        ((kind, seconds),) = line.stage.admitted
        assert kind == "forward"
        assert seconds == pytest.approx(SOON_SECONDS)

    world.run(test)


def test_a_caller_that_is_cancelled_ends_the_work(world: World[Line]) -> None:
    async def test(line: Line) -> None:
        line.stage.gate.clear()
        task = asyncio.create_task(line.calls.forward(line.to, forward_request(tensor(b"12345678"))))
        await line.stage.entered.wait()
        assert not line.stage.cancelled.is_set()
        task.cancel()
        await line.stage.cancelled.wait()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await line.calls.greet(line.to, GREETING, LONG_SECONDS) == report()

    world.run(test)


# --- admission ----------------------------------------------------------------------------


@pytest.mark.parametrize("refusal", [Busy(0.5), Draining("leaving"), Stale("older")], ids=["busy", "draining", "stale"])
def test_a_peer_is_asked_for_admission_before_the_tensor_comes(world: World[Line], refusal: SwarmError) -> None:
    async def test(line: Line) -> None:
        line.stage.refusal = refusal
        line.make_large_tensors_slow()
        loop = asyncio.get_running_loop()
        began = loop.time()
        for _ in range(3):
            with pytest.raises(type(refusal)) as caught:
                await line.calls.forward(line.to, forward_request(LARGE))
            assert fields(caught.value) == fields(refusal)
            with pytest.raises(type(refusal)):
                await line.calls.backward(line.to, replace(small(), inputs=LARGE))
        assert loop.time() - began < 3.0
        assert [kind for kind, _ in line.stage.admitted] == ["forward", "backward"] * 3
        assert line.stage.received == []
        line.stage.refusal = None
        line.stage.admitted.clear()
        await line.calls.backward(line.to, small(LONG_SECONDS))
        ((kind, seconds),) = line.stage.admitted
        assert kind == "backward"
        assert seconds == pytest.approx(LONG_SECONDS)

    world.run(test)


def test_nothing_but_forwards_and_backwards_asks_for_admission(world: World[Line]) -> None:
    async def test(line: Line) -> None:
        line.stage.refusal = Busy(0.5)
        line.stage.state_chunks = (b"12345678",)
        await line.calls.greet(line.to, GREETING, LONG_SECONDS)
        await line.calls.freeze(line.to, FreezeRequest(key=KEY, attempt=1), LONG_SECONDS)
        _, data = await line.calls.fetch_state(line.to, STATE, LONG_SECONDS)
        assert b"".join([bytes(chunk) async for chunk in data]) == b"12345678"
        assert line.stage.admitted == []

    world.run(test)
