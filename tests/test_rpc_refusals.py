"""gRPC: refusals, ports and services."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # type: ignore[import-untyped]

from swarm.errors import (
    Busy,
    CannotJoin,
    Draining,
    NeedsInput,
    PeerFailed,
    Refused,
    Retryable,
    Stale,
    Unreachable,
    WrongRun,
)
from swarm.ids import PeerId, SessionId
from swarm.messages import (
    Contact,
)
from swarm.rpc.channels import Channels
from swarm.rpc.client import GrpcStageCalls
from swarm.rpc.complaints import Complaints
from swarm.rpc.handlers import Limits
from swarm.rpc.options import SERVICE, call_metadata, path
from swarm.rpc.server import StageServer
from swarm.wire import frames, heads
from swarm.wire.v1 import stage_pb2 as pb
from tests.rpc_case import GREETING, T, _counting, run
from tests.stage_double import (
    PEER,
    SESSION,
    EchoStage,
    forward_request,
    report,
    served,
    tensor,
)

pytestmark = pytest.mark.fast

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
