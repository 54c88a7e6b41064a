"""gRPC between a client and a server on loopback: what arrives, what is refused, and when calls end."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import grpc
import psutil
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # type: ignore[import-untyped]

from swarm.errors import (
    BadReply,
    Busy,
    CannotJoin,
    Draining,
    NeedsInput,
    NotFinite,
    PeerFailed,
    Refused,
    Retryable,
    Stale,
    TimedOut,
    Unreachable,
    WrongRun,
)
from swarm.ids import MicrobatchId, PeerId, SessionId
from swarm.messages import (
    AdoptRequest,
    ApplyRequest,
    BackwardRequest,
    Contact,
    DropRequest,
    FreezeRequest,
    GradientRequest,
    Greeting,
    GroupMember,
    ReduceRequest,
    StateRequest,
    VoidRequest,
)
from swarm.ports import StageCalls, StageService
from swarm.rpc.channels import Channels
from swarm.rpc.client import GrpcStageCalls
from swarm.rpc.complaints import Complaints
from swarm.rpc.handlers import Limits
from swarm.rpc.options import CHANNEL_OPTIONS, SERVICE, call_metadata, path
from swarm.rpc.server import StageServer
from swarm.stage.arrays import to_data
from swarm.tensors import ITEM_BYTES, TensorData
from swarm.wire import frames, heads
from swarm.wire.v1 import stage_pb2 as pb
from tests.stage_double import (
    COMMIT,
    DIGEST,
    KEY,
    LINEAGE,
    MARK,
    PEER,
    RUN,
    SESSION,
    TERM,
    EchoStage,
    call,
    forward_request,
    report,
    served,
    tensor,
)

pytestmark = pytest.mark.fast

T = TypeVar("T")

GREETING = Greeting(run=RUN, term=TERM)


def run(main: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(60):
            return await main

    return asyncio.run(limited())


def test_adapters_fit_the_ports() -> None:
    """Checked by the type checker: both are used as what the ports say."""

    async def main(calls: StageCalls, service: StageService) -> None:
        assert await service.greet(GREETING) == report()
        with pytest.raises(Unreachable):
            await calls.greet(Contact(peer=PEER, session=SESSION, endpoint="nowhere"), GREETING, 5)

    run(main(GrpcStageCalls(), EchoStage()))


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (2, 3, 8)])
def test_tensors_keep_their_bytes(dtype: str, shape: tuple[int, ...]) -> None:
    async def main() -> None:
        size = ITEM_BYTES[dtype]
        for extent in shape:
            size *= extent
        # Any bytes: NaNs with a payload and negative zeros among them.
        sent = tensor(bytes(255 - i % 256 for i in range(size)), dtype, shape)
        async with served(EchoStage()) as (calls, to):
            received = await calls.forward(to, forward_request(sent))
            assert received.spec == sent.spec
            assert bytes(received.data) == sent.data

    run(main())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_a_caller_may_ask_for_finite_answers(dtype: str, value: float) -> None:
    """Found at once and laid at its sender's door; also where a sum of finite numbers would overflow."""

    def filled(last: float) -> TensorData:
        numbers = torch.full((40,), 60_000.0, dtype=getattr(torch, dtype))
        numbers[-1] = last
        return to_data(numbers)

    async def main() -> None:
        async with served(EchoStage()) as (_, to):
            calls = GrpcStageCalls(check_finite=True)
            good, bad = filled(60_000.0), filled(value)
            assert await calls.forward(to, forward_request(good)) == good
            with pytest.raises(NotFinite, match="output"):
                await calls.forward(to, forward_request(bad))
            seed = tensor(bytes(16), "int64", (1, 2))
            with pytest.raises(NotFinite, match="gradient"):
                await calls.backward(to, BackwardRequest(call=call(), inputs=bad, seed=seed, tokens=2))
            ids = tensor(b"\xff" * 80, "int64", (10,))
            assert await calls.forward(to, forward_request(ids)) == ids
            await calls.close()

    run(main())


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 1, 40_000_000])
def test_any_size_works_with_default_settings(size: int) -> None:
    async def main() -> None:
        pattern = bytes(range(251))
        sent = tensor((pattern * (size // 251 + 1))[:size])
        async with served(EchoStage()) as (calls, to):
            received = await calls.forward(to, forward_request(sent))
            assert received.data == sent.data

    run(main())


def test_backward_with_and_without_input() -> None:
    async def main() -> None:
        stage = EchoStage()
        seed, inputs = tensor(bytes(16), "int64", (1, 2)), tensor(bytes(3 << 20), "bfloat16", (3, 1 << 19))
        async with served(stage) as (calls, to):
            with_inputs = BackwardRequest(call=call(), inputs=inputs, seed=seed, tokens=2)
            reply = await calls.backward(to, with_inputs)
            assert reply.input_gradient == inputs
            assert (reply.loss, reply.accumulated) == (2.5, True)
            without = BackwardRequest(call=call(), inputs=None, seed=seed, tokens=2, accumulate=False)
            reply = await calls.backward(to, without)
            assert (reply.input_gradient, reply.accumulated) == (None, False)
            assert stage.received == [with_inputs, without]
            assert [kind for kind, _ in stage.admitted] == ["backward", "backward"]

    run(main())


def test_control_calls() -> None:
    async def main() -> None:
        stage = EchoStage()
        async with served(stage) as (calls, to):
            void = VoidRequest(key=KEY, microbatch=MicrobatchId(3), below_try=2)
            freeze = FreezeRequest(key=KEY, attempt=1)
            drop = DropRequest(key=KEY, attempt=1)
            member = GroupMember(contact=to, microbatches=(MicrobatchId(1),), tokens=5)
            reduce = ReduceRequest(key=KEY, attempt=1, members=(member,), total_tokens=5, deadline_seconds=3)
            adopt = AdoptRequest(key=KEY, attempt=2, digest=DIGEST, donors=(to,))
            apply = ApplyRequest(key=KEY, commit=COMMIT, donors=(to,))
            assert (await calls.void(to, void, 5)).held
            assert await calls.greet(to, GREETING, 5) == report()
            assert (await calls.freeze(to, freeze, 5)).held[0].tokens == 128
            await calls.drop(to, drop, 5)
            assert (await calls.reduce(to, reduce, 5)).unreachable == (PEER,)
            assert await calls.adopt(to, adopt, 5) == MARK
            assert (await calls.apply(to, apply, 5)).lineage == LINEAGE.after(COMMIT)
            assert stage.heard == [void, GREETING, freeze, drop, reduce, adopt, apply]

    run(main())


def test_bfloat16_takes_two_bytes_a_value() -> None:
    async def main() -> None:
        values = 1 << 18
        request = forward_request(tensor(bytes(2 * values), "bfloat16", (values,)))
        async with served(EchoStage()) as (calls, to), _counting(to) as (counted, counts):
            await calls.forward(counted, request)
            for count in counts.values():
                assert 2 * values < count < 2.02 * values

    run(main())


def test_a_large_state_flows_with_bounded_memory() -> None:
    async def main() -> None:
        chunk = bytes(8 << 20)
        stage = EchoStage(state_chunks=(chunk,), state_repeats=48)
        async with served(stage) as (calls, to):
            process = psutil.Process()
            before = process.memory_info().rss
            head, data = await calls.fetch_state(to, StateRequest(run=RUN, stage=1), 10)
            received, most, digest = 0, 0, hashlib.sha256()
            async for part in data:
                received += len(part)
                if received % (32 << 20) == 0:
                    most = max(most, process.memory_info().rss)
                digest.update(part)
            assert received == head.total_bytes == 48 * len(chunk)
            assert head.commits == (COMMIT,)
            assert digest.digest() == hashlib.sha256(chunk * 48).digest()
            assert most - before < received / 4
            assert stage.closed.is_set()

    run(main())


def test_a_state_of_another_length_than_declared_is_a_bad_reply() -> None:
    async def main() -> None:
        for declared in (9, 11):
            stage = EchoStage(state_chunks=(b"0123456789",), state_bytes=declared)
            async with served(stage) as (calls, to):
                _, data = await calls.fetch_state(to, StateRequest(run=RUN, stage=1), 10)
                with pytest.raises(BadReply, match="10 bytes of the declared"):
                    async for _ in data:
                        pass

    run(main())


def test_a_donor_that_stops_sending_times_out_and_is_cancelled() -> None:
    async def main() -> None:
        stage = EchoStage(state_chunks=(b"0123456789",))
        stage.gate.clear()
        async with served(stage) as (calls, to):
            request = GradientRequest(run=RUN, stage=1, parent=LINEAGE, digest=DIGEST)
            data = await calls.fetch_gradient(to, request, 0.2)
            assert await anext(data) == b"0123456789"
            with pytest.raises(TimedOut):
                await anext(data)
            await stage.closed.wait()

    run(main())


def test_a_fetcher_that_stops_reading_does_not_hold_the_donor() -> None:
    async def main() -> None:
        stage = EchoStage(state_chunks=(bytes(8 << 20),), state_repeats=100)
        async with served(stage, Limits(stall_seconds=0.2)) as (calls, to):
            _, data = await calls.fetch_state(to, StateRequest(run=RUN, stage=1), 10)
            await stage.closed.wait()
            with pytest.raises(TimedOut, match="a frame was not taken within 0.2 s"):
                async for _ in data:
                    pass

    run(main())


def test_a_refusal_of_a_fetch_comes_before_the_iterator() -> None:
    async def main() -> None:
        async with served(EchoStage(failure=Stale("too old"))) as (calls, to):
            with pytest.raises(Stale, match="too old"):
                await calls.fetch_gradient(to, GradientRequest(run=RUN, stage=1, parent=LINEAGE, digest=DIGEST), 5)
            with pytest.raises(Stale, match="too old"):
                await calls.fetch_state(to, StateRequest(run=RUN, stage=1), 5)

    run(main())


# --- deadlines and cancellation ---------------------------------------------------


def test_a_deadline_that_passes_in_the_queue_cancels_the_work() -> None:
    async def main() -> None:
        stage = EchoStage()
        stage.gate.clear()
        async with served(stage) as (calls, to):
            with pytest.raises(TimedOut):
                await calls.forward(to, forward_request(tensor(b"abc"), deadline_seconds=0.2))
            await stage.cancelled.wait()
            assert stage.admitted[0][1] == pytest.approx(0.2)

    run(main())


def test_the_deadline_in_the_head_holds_without_one_of_grpc() -> None:
    async def main() -> None:
        stage = EchoStage()
        stage.gate.clear()
        async with served(stage) as (_, to), grpc.aio.insecure_channel(to.endpoint) as channel:
            request = forward_request(tensor(b"abc"), deadline_seconds=0.2)
            stream: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path("Forward"))
            sent = stream(
                iter([frames.encode(heads.to_forward(request), request.inputs.data)]), metadata=call_metadata(to)
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await sent.read()
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await stage.cancelled.wait()

    run(main())


def test_cancelling_the_caller_cancels_the_work() -> None:
    async def main() -> None:
        stage = EchoStage()
        stage.gate.clear()
        async with served(stage) as (calls, to):
            task = asyncio.create_task(calls.forward(to, forward_request(tensor(b"abc"))))
            await stage.entered.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await stage.cancelled.wait()

    run(main())


def test_closing_the_client_ends_its_calls() -> None:
    async def main() -> None:
        stage = EchoStage()
        stage.gate.clear()
        async with served(stage) as (calls, to):
            task = asyncio.create_task(calls.forward(to, forward_request(tensor(b"abc"))))
            await stage.entered.wait()
            await calls.close()
            with pytest.raises(Unreachable):
                await task
            with pytest.raises(Unreachable):
                await calls.greet(to, GREETING, 5)

    run(main())


def test_stopping_the_server_ends_calls_and_the_next_life_is_reached() -> None:
    async def main() -> None:
        stage = EchoStage()
        stage.gate.clear()
        server = StageServer(peer=PEER, session=SESSION)
        port = await server.bind("127.0.0.1:0")
        await server.start(stage)
        to = Contact(peer=PEER, session=SESSION, endpoint=f"127.0.0.1:{port}")
        calls = GrpcStageCalls()
        task = asyncio.create_task(calls.forward(to, forward_request(tensor(b"abc"))))
        await stage.entered.wait()
        await server.stop(0)
        with pytest.raises(Unreachable):
            await task
        with pytest.raises(Unreachable):
            await calls.greet(to, GREETING, 5)
        next_life = SessionId("f" * 16)
        server = StageServer(peer=PEER, session=next_life)
        assert await server.bind(f"127.0.0.1:{port}") == port
        await server.start(EchoStage())
        # The same client gets through once its pause after the failed attempt is over: 0.1 s, by default 1 s.
        async with asyncio.timeout(0.75):
            assert await _reached(lambda: calls.greet(replace(to, session=next_life), GREETING, 5)) == report()
        with pytest.raises(WrongRun, match="swarm-session"):
            await calls.greet(to, GREETING, 5)
        await calls.close()
        await server.stop(0)

    run(main())


async def _reached(attempt: Callable[[], Coroutine[Any, Any, T]]) -> T:
    while True:
        try:
            return await attempt()
        except Unreachable:
            continue


def test_nobody_there_is_unreachable_at_once() -> None:
    async def main() -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            endpoint = f"127.0.0.1:{unused.getsockname()[1]}"
            calls = GrpcStageCalls()
            async with asyncio.timeout(2):
                with pytest.raises(Unreachable):
                    await calls.greet(Contact(peer=PEER, session=SESSION, endpoint=endpoint), GREETING, 30)
            for malformed in ("unix:/80", "nowhere", "a:1,b:2"):
                with pytest.raises(Unreachable, match="HOST:PORT"):
                    await calls.greet(Contact(peer=PEER, session=SESSION, endpoint=malformed), GREETING, 30)
            await calls.close()

    run(main())


def test_pings_do_not_make_the_server_hang_up() -> None:
    """By default a server hangs up on the third ping that it finds too early (GOAWAY too_many_pings)."""

    async def main() -> None:
        pings = 50
        async with served(EchoStage()) as (_, to):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(to.endpoint.rpartition(":")[2]))
            # RFC 9113: the preface, an empty SETTINGS frame (type 4), then PING frames (type 6) of 8 bytes.
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            answered = 0
            for _ in range(pings):
                writer.write(bytes([0, 0, 8, 6, 0, 0, 0, 0, 0]) + bytes(8))
            while answered < pings:
                header = await reader.readexactly(9)
                await reader.readexactly(int.from_bytes(header[:3], "big"))
                assert header[3] != 7, f"GOAWAY after {answered} pings"
                answered += header[3] == 6 and header[4] == 1
            writer.close()
            await writer.wait_closed()
        assert dict(CHANNEL_OPTIONS)["grpc.keepalive_permit_without_calls"] == 1

    run(main())


# --- refusals ---------------------------------------------------------------------


@pytest.mark.parametrize("error", [Busy(1.25), Draining("leaving"), Stale("at 7"), NeedsInput("gone")])
@pytest.mark.parametrize("size", [10, 1 << 20, 6 << 20])
def test_a_refusal_comes_before_the_tensor_and_is_never_lost(error: Refused, size: int) -> None:
    """Also while the client is still sending, where grpc.aio alone loses the status half of the time."""

    async def main() -> None:
        stage = EchoStage(refusal=error)
        request = forward_request(tensor(bytes(size)))
        async with served(stage) as (calls, to):
            for _ in range(20):
                with pytest.raises(type(error)) as caught:
                    await calls.forward(to, request)
                assert vars(caught.value) == vars(error)
                assert str(caught.value) == str(error)
            assert len(stage.admitted) == 20
            assert stage.received == []

    run(main())


def test_a_refused_tensor_is_not_sent() -> None:
    async def main() -> None:
        size = 64 << 20
        request = forward_request(tensor(bytes(size)))
        async with served(EchoStage(refusal=Busy(1.0))) as (calls, to), _counting(to) as (counted, counts):
            with pytest.raises(Busy):
                await calls.forward(counted, request)
            assert counts["to server"] < size / 4

    run(main())


def test_a_call_over_the_limit_is_busy_and_control_calls_get_through() -> None:
    async def main() -> None:
        stage = EchoStage()
        request = forward_request(tensor(bytes(2 << 20)))
        async with served(stage, Limits(max_receiving=4, busy_retry_seconds=0.5)) as (calls, to):
            async with grpc.aio.insecure_channel(to.endpoint) as channel:
                stream: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path("Forward"))
                begun = []
                for _ in range(4):
                    begun.append(stream(metadata=call_metadata(to)))
                    await begun[-1].write(frames.encode(heads.to_forward(request), b""))
                    await stage.arrivals.acquire()
                # Four hold the places and send no more; sixty others are told at once, none is let in.
                outcomes = await asyncio.gather(
                    *(calls.forward(to, request) for _ in range(60)), return_exceptions=True
                )
                assert {type(outcome) for outcome in outcomes} == {Busy}
                assert all(isinstance(o, Busy) and o.retry_after_seconds == 0.5 for o in outcomes)
                assert len(stage.admitted) == 4
                assert await calls.greet(to, GREETING, 5) == report()
                for one in begun:
                    one.cancel()
            output = await _not_busy(lambda: calls.forward(to, request))
            assert output.spec == request.inputs.spec

    run(main())


def test_sixty_four_callers_at_once_are_served_or_told_busy() -> None:
    async def main() -> None:
        request = forward_request(tensor(bytes(2 << 20)))
        async with served(EchoStage(), Limits(max_receiving=4)) as (calls, to):
            async with asyncio.TaskGroup() as group:
                work = [group.create_task(_not_busy(lambda: calls.forward(to, request))) for _ in range(64)]
                greeted = await calls.greet(to, GREETING, 10)
            assert greeted == report()
            assert all(task.result().data == request.inputs.data for task in work)

    run(main())


async def _not_busy(attempt: Callable[[], Coroutine[Any, Any, T]]) -> T:
    while True:
        try:
            return await attempt()
        except Busy:
            continue


def test_another_peer_life_or_protocol_is_the_wrong_run() -> None:
    async def main() -> None:
        stage = EchoStage()
        request = forward_request(tensor(bytes(2 << 20)))
        async with served(stage) as (calls, to):
            for wrong in (replace(to, peer=PeerId("another")), replace(to, session=SessionId("e" * 16))):
                with pytest.raises(WrongRun, match=r"was called, this is"):
                    await calls.greet(wrong, GREETING, 5)
                with pytest.raises(WrongRun, match=r"was called, this is"):
                    await calls.forward(wrong, request)
            async with grpc.aio.insecure_channel(to.endpoint) as channel:
                for metadata, said in (((("swarm-protocol", "99"),), "99"), ((), "none")):
                    greet: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path("Greet"))
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await greet(b"", metadata=metadata)
                    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                    assert re.search(f"version {said} at the caller, 1 at the peer", caught.value.details() or "")
            assert (stage.heard, stage.admitted) == ([], [])

    run(main())


@pytest.mark.parametrize("error", [ZeroDivisionError("secret"), MemoryError("secret"), KeyError("secret")])
def test_an_unexpected_error_is_logged_once_and_not_told(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        stage = EchoStage(failure=error)
        async with served(stage) as (calls, to):
            for _ in range(5):
                with pytest.raises(PeerFailed) as caught:
                    await calls.greet(to, GREETING, 5)
                assert str(caught.value) == "Greet: internal error"
            stage.failure = None
            assert await calls.greet(to, GREETING, 5) == report()

    run(main())
    lines = [record.getMessage() for record in caplog.records if record.name == "swarm.rpc"]
    assert len(lines) == 1
    assert lines[0].startswith(f"Greet failed: {type(error).__name__}: ")
    assert "stage_double.py:" in lines[0]
    assert "\n" not in lines[0]


def test_complaints_say_how_many_were_left_out(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints(every_seconds=0.0)
    complaints.note("Greet", ValueError("a"))
    complaints.every_seconds = 3600.0
    complaints.note("Greet", ValueError("b"))
    complaints.note("Void", ValueError("c"))
    complaints.every_seconds = 0.0
    complaints.note("Greet", ValueError("d"))
    assert [record.getMessage() for record in caplog.records] == [
        "Greet failed: ValueError: a",
        "Void failed: ValueError: c",
        "Greet failed: ValueError: d (1 more since the last line)",
    ]


@pytest.mark.parametrize("error", [Retryable("plain"), Refused("plain")])
def test_the_bases_travel_as_something_of_their_kind(error: Retryable | Refused) -> None:
    async def main() -> None:
        async with served(EchoStage(failure=error)) as (calls, to):
            with pytest.raises((Retryable, Refused)):
                await calls.greet(to, GREETING, 5)

    run(main())


# --- ports and services -----------------------------------------------------------


def test_a_port_in_use_is_named_and_the_first_server_undisturbed() -> None:
    async def main() -> None:
        async with served(EchoStage()) as (calls, to):
            second = StageServer(peer=PeerId("second"), session=SESSION)
            port = to.endpoint.rpartition(":")[2]
            with pytest.raises(CannotJoin, match=port):
                await second.bind(to.endpoint)
            await second.stop(0)
            for _ in range(20):
                fresh = GrpcStageCalls()
                assert await fresh.greet(to, GREETING, 5) == report()
                await fresh.close()
            assert await calls.greet(to, GREETING, 5) == report()

    run(main())


def test_thirty_automatic_ports_are_distinct() -> None:
    async def main() -> None:
        servers = [StageServer(peer=PEER, session=SESSION) for _ in range(30)]
        ports = [await server.bind("127.0.0.1:0") for server in servers]
        assert len(set(ports)) == 30
        assert all(0 < port < 1 << 16 for port in ports)
        for server in servers:
            await server.stop(0)

    run(main())


def test_a_caller_between_bind_and_start_is_served_after_it() -> None:
    async def main() -> None:
        server = StageServer(peer=PEER, session=SESSION)
        port = await server.bind("127.0.0.1:0")
        calls = GrpcStageCalls()
        contact = Contact(peer=PEER, session=SESSION, endpoint=f"127.0.0.1:{port}")
        early = asyncio.create_task(calls.greet(contact, GREETING, 10))
        await server.start(EchoStage())
        assert await early == report()
        await calls.close()
        await server.stop(0)

    run(main())


def test_health_and_reflection_answer() -> None:
    async def main() -> None:
        async with served(EchoStage()) as (_, to), grpc.aio.insecure_channel(to.endpoint) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", SERVICE):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
            ]
            answers = [answer async for answer in reflection.ServerReflectionInfo(iter(asked))]
            names = {service.name for service in answers[0].list_services_response.service}
            assert {SERVICE, "grpc.health.v1.Health"} <= names
            assert b"BackwardHead" in answers[1].file_descriptor_response.file_descriptor_proto[0]

    run(main())


def test_every_method_of_the_contract_is_served() -> None:
    async def main() -> None:
        async with served(EchoStage()) as (_, to), grpc.aio.insecure_channel(to.endpoint) as channel:
            for method in pb.DESCRIPTOR.services_by_name["Stage"].methods:
                ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path(method.name))
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await ask(b"\xff", metadata=call_metadata(to))
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, method.name

    run(main())


def test_idle_channels_are_closed_when_there_are_many() -> None:
    async def main() -> None:
        channels = Channels(most=2)
        first = await channels.get("127.0.0.1:1")
        assert await channels.get("127.0.0.1:1") is first
        await channels.get("127.0.0.1:2")
        await channels.get("127.0.0.1:3")
        assert first.get_state() is grpc.ChannelConnectivity.SHUTDOWN
        assert await channels.get("127.0.0.1:1") is not first
        await channels.close()

    run(main())


def test_a_client_closed_while_room_is_made_makes_no_channel() -> None:
    class Slow(grpc.aio._channel.Channel):  # type: ignore[name-defined, misc]
        """A channel whose close takes until it is let go."""

        def __init__(self) -> None:
            self.closing, self.go = asyncio.Event(), asyncio.Event()

        async def close(self, grace: float | None = None) -> None:
            self.closing.set()
            await self.go.wait()

    async def main() -> None:
        channels, slow = Channels(most=1), Slow()
        await channels.get("127.0.0.1:1")
        await channels._entries["127.0.0.1:1"].channel.close()
        channels._entries["127.0.0.1:1"].channel = slow
        late = asyncio.create_task(channels.get("127.0.0.1:2"))
        await slow.closing.wait()
        await channels.close()
        slow.go.set()
        with pytest.raises(Unreachable, match="closed"):
            await late
        assert not channels._entries

    run(main())


def test_nothing_starts_at_import() -> None:
    """Processes are forked after imports: a thread or a channel made there would be broken in the child."""
    script = (
        "import threading, swarm.rpc.server, swarm.rpc.client;"
        "assert threading.active_count() == 1, threading.enumerate();"
        "from pathlib import Path;"
        "assert len(list(Path('/proc/self/task').iterdir())) == 1;"
        "import sys; assert 'torch' not in sys.modules and 'hivemind' not in sys.modules"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@asynccontextmanager
async def _counting(to: Contact) -> AsyncIterator[tuple[Contact, dict[str, int]]]:
    """A relay in front of a server that counts the bytes of both directions."""
    counts = {"to server": 0, "to client": 0}
    port = int(to.endpoint.rpartition(":")[2])

    async def pump(name: str, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            counts[name] += len(data)
            sink.write(data)
            await sink.drain()
        sink.write_eof()

    async def relay(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        relays.append(task)
        upstream, downstream = await asyncio.open_connection("127.0.0.1", port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(pump("to server", source, downstream))
                group.create_task(pump("to client", upstream, sink))
        finally:
            for writer in (sink, downstream):
                writer.close()
                await writer.wait_closed()

    relays: list[asyncio.Task[Any]] = []
    async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
        yield replace(to, endpoint=f"127.0.0.1:{server.sockets[0].getsockname()[1]}"), counts
    for task in relays:
        task.cancel()
    await asyncio.gather(*relays, return_exceptions=True)
