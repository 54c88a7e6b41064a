"""gRPC: deadlines and cancellation."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import grpc
import pytest

from swarm.errors import (
    TimedOut,
    Unreachable,
    WrongRun,
)
from swarm.ids import SessionId
from swarm.messages import (
    Contact,
)
from swarm.rpc.client import GrpcStageCalls
from swarm.rpc.options import CHANNEL_OPTIONS, call_metadata, path
from swarm.rpc.server import StageServer
from swarm.wire import frames, heads
from tests.rpc_case import GREETING, T, run
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
