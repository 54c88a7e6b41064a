"""Hostile clients and servers: whatever they send costs one call, never the process, its memory or other calls."""

from __future__ import annotations

import pickle
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import psutil
import pytest

from swarm.errors import BadRequest
from swarm.messages import Contact
from swarm.rpc.ending import Ending
from swarm.rpc.handlers import Limits
from swarm.rpc.options import FAILURE_KEY, call_metadata, path
from swarm.wire import failures, frames
from swarm.wire.v1 import stage_pb2 as pb
from tests.rpc_hostile_case import DATA, GOOD, GREETING, HEAD, METHODS, Planted, declared, run
from tests.stage_double import (
    DIGEST,
    RUN,
    SESSION,
    EchoStage,
    report,
    served,
    width_of_eight,
)

pytestmark = pytest.mark.fast

GROWTH_BYTES = 64 << 20
"""What memory may grow by in a test: far less than any size that is declared below."""


Bytes = grpc.aio.StreamStreamMultiCallable[bytes, bytes]


def with_call(**changes: Any) -> pb.Frame:
    """The head of a good forward with another call."""
    meta = pb.Frame()
    meta.CopyFrom(HEAD)
    for name, value in changes.items():
        setattr(meta.forward.call, name, value)
    return meta


MILLION = pb.Frame.FromString(HEAD.SerializeToString() + b"\x2a\x00" * 1_000_000)


STREAMS: dict[str, list[bytes]] = {
    "nothing": [],
    "empty frame": [b""],
    "no head": [frames.encode(None, DATA)],
    "no tensors": [frames.encode(declared(), b"")],
    "another head": [frames.encode(pb.Frame(backward=pb.BackwardHead(), tensors=HEAD.tensors), DATA)],
    "unknown dtype": [frames.encode(declared((2, 3, 8), dtype=99), DATA)],
    "dtype unset": [frames.encode(declared((2, 3, 8), dtype=0), DATA)],
    "negative shape": [frames.encode(declared((-2, 3, 8)), DATA)],
    "two negatives": [frames.encode(declared((-2, -3, 8)), DATA)],
    "huge shape": [frames.encode(declared((1 << 40, 1 << 40, 8)), DATA)],
    "overflowing shape": [frames.encode(declared((1 << 62, 4, 8)), DATA)],
    "a terabyte": [frames.encode(declared((1 << 35, 8)), b"")],
    "five dimensions": [frames.encode(declared((1, 1, 1, 1, 8)), bytes(32))],
    "wrong width": [frames.encode(declared((2, 3, 9)), bytes(2 * 3 * 9 * 4))],
    "wrong dtype for the stage": [frames.encode(declared((2, 3, 8), dtype=pb.DTYPE_INT64), bytes(384))],
    "two tensors": [frames.encode(declared((2, 3, 8), (2, 3, 8)), DATA * 2)],
    "a million tensors": [frames.encode(MILLION, DATA)],
    "one byte missing": [frames.encode(HEAD, DATA[:-1])],
    "one byte too many": [frames.encode(HEAD, DATA + b"x")],
    "data missing": [frames.encode(HEAD, b"")],
    "data left over": [frames.encode(HEAD, DATA), frames.encode(None, b"x")],
    "endless empty frames": [frames.encode(HEAD, b""), *[b""] * 1000],
    "a second head": [frames.encode(HEAD, b""), frames.encode(HEAD, DATA)],
    "a chunk of 2 MiB": [frames.encode(declared((1 << 17, 8)), b""), frames.encode(None, bytes(2 << 20))],
    "cut protobuf": [frames.encode(HEAD, DATA)[:40]],
    "deadline nan": [frames.encode(with_call(deadline_seconds=float("nan")), DATA)],
    "deadline forever": [frames.encode(with_call(deadline_seconds=1e300), DATA)],
    "microbatch": [frames.encode(with_call(microbatch=(1 << 32) - 1), DATA)],
    "no call": [frames.encode(pb.Frame(forward=pb.ForwardHead(), tensors=HEAD.tensors), DATA)],
    "a pickle as frame": [pickle.dumps(Planted())],
    "a pickle as data": [frames.encode(declared((1, 1, 8)), pickle.dumps(Planted()))],
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_bad_forward_costs_that_call_only(name: str) -> None:
    async def main() -> None:
        stage = EchoStage()
        async with served(stage, check=width_of_eight) as (calls, to), raw(to) as channel:
            before = psutil.Process().memory_info().rss
            stream: Bytes = channel.stream_stream(path("Forward"))
            sent = stream(iter(STREAMS[name]), metadata=call_metadata(to))
            ending = Ending(sent)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await sent.read()
            error = ending.of(caught.value)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert type(failures.decode(_failure(error))) is BadRequest
            assert stage.received == []
            assert psutil.Process().memory_info().rss - before < GROWTH_BYTES
            assert (await calls.forward(to, GOOD)).data == DATA

    run(main())


def test_the_base_of_the_table_above_is_good() -> None:
    """Else its rows would fail for another reason than theirs."""

    async def main() -> None:
        stage = EchoStage()
        async with served(stage, check=width_of_eight) as (_, to), raw(to) as channel:
            stream: Bytes = channel.stream_stream(path("Forward"))
            for head in (HEAD, declared((2, 3, 8)), with_call()):
                for sent in ([frames.encode(head, DATA)], [frames.encode(head, b""), frames.encode(None, DATA)]):
                    reply = await stream(iter(sent), metadata=call_metadata(to)).read()
                    assert isinstance(reply, bytes)
                    assert frames.decode(reply).data == DATA
            assert len(stage.received) == 6

    run(main())


def test_declared_memory_is_taken_only_as_data_arrives() -> None:
    """Many callers that declare as much as a stage allows and send nothing."""

    async def main() -> None:
        stage = EchoStage()
        async with served(stage, Limits(max_receiving=16, max_tensor_bytes=1 << 30)) as (calls, to), raw(to) as channel:
            before = psutil.Process().memory_info().rss
            stream: Bytes = channel.stream_stream(path("Forward"))
            begun = []
            for _ in range(15):
                begun.append(stream(metadata=call_metadata(to)))
                await begun[-1].write(frames.encode(declared((1 << 25, 8)), b""))
                await begun[-1].write(frames.encode(None, b"x"))
                await stage.arrivals.acquire()
            assert psutil.Process().memory_info().rss - before < GROWTH_BYTES
            assert (await calls.forward(to, GOOD)).data == DATA
            for one in begun:
                one.cancel()

    run(main())


def test_random_bytes_and_damaged_messages() -> None:
    """1000 messages of noise, or good ones with some bytes changed, to all methods: none ends anything but its call."""

    async def main() -> None:
        draw = random.Random(20240501)
        good = [
            frames.encode(HEAD, DATA),
            pb.Greeting(run=RUN, term=pb.Term(number=3, trainer="a")).SerializeToString(),
        ]
        stage = EchoStage()
        async with served(stage, check=width_of_eight) as (calls, to), raw(to) as channel:
            before = psutil.Process().memory_info().rss
            codes: dict[grpc.StatusCode, int] = {}
            for number in range(1000):
                message = bytearray(draw.choice(good) if number % 2 else draw.randbytes(draw.randrange(300)))
                for _ in range(draw.randrange(1, 8) if message else 0):
                    message[draw.randrange(len(message))] = draw.randrange(256)
                stream: Bytes = channel.stream_stream(path(draw.choice(METHODS)))
                sent = stream(iter([bytes(message)]), timeout=20, metadata=call_metadata(to))
                try:
                    # Read on: single-reply methods answer too, and what is damaged harmlessly is served.
                    while await sent.read() is not grpc.aio.EOF:
                        pass
                    code = grpc.StatusCode.OK
                except grpc.aio.AioRpcError as error:
                    code = error.code()
                codes[code] = codes.get(code, 0) + 1
            assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}, codes
            assert codes[grpc.StatusCode.INVALID_ARGUMENT] > 500
            assert psutil.Process().memory_info().rss - before < GROWTH_BYTES
            assert await calls.greet(to, GREETING, 5) == report()
            assert (await calls.forward(to, GOOD)).data == DATA

    run(main())


def test_lists_of_a_million_entries() -> None:
    async def main() -> None:
        key = HEAD.forward.call.key
        members = pb.ReduceRequest(key=key, deadline_seconds=5).SerializeToString() + b"\x1a\x00" * 1_000_000
        ids = pb.GroupMember(
            contact=pb.Contact(peer="a", session=SESSION, endpoint="a:1"), microbatches=[0] * 1_000_000
        )
        one_member = pb.ReduceRequest(key=key, deadline_seconds=5, members=[ids]).SerializeToString()
        donors = pb.AdoptRequest(key=key, digest=DIGEST).SerializeToString()
        async with served(EchoStage()) as (calls, to), raw(to) as channel:
            before = psutil.Process().memory_info().rss
            for method, message, field in (
                ("Reduce", members, "ReduceRequest: more than 4096"),
                ("Reduce", one_member, "microbatches: 1000000"),
                ("Adopt", donors + b"\x22\x00" * 1_000_000, "AdoptRequest: more than 4096"),
            ):
                ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path(method))
                with pytest.raises(grpc.aio.AioRpcError, match=field):
                    await ask(message, metadata=call_metadata(to))
            assert psutil.Process().memory_info().rss - before < GROWTH_BYTES
            assert await calls.greet(to, GREETING, 5) == report()

    run(main())


def test_a_message_over_the_limit_is_not_taken() -> None:
    async def main() -> None:
        async with served(EchoStage()) as (calls, to), raw(to) as channel:
            stream: Bytes = channel.stream_stream(path("Forward"))
            with pytest.raises(grpc.aio.AioRpcError):
                await stream(iter([bytes(8 << 20)]), metadata=call_metadata(to)).read()
            assert (await calls.forward(to, GOOD)).data == DATA

    run(main())


def test_a_client_that_sends_no_more_loses_its_place() -> None:
    async def main() -> None:
        stage = EchoStage()
        async with served(stage, Limits(max_receiving=1, silence_seconds=0.2)) as (calls, to), raw(to) as channel:
            stream: Bytes = channel.stream_stream(path("Forward"))
            for sent in ([], [frames.encode(HEAD, b"")]):
                slow = stream(metadata=call_metadata(to))
                for message in sent:
                    await slow.write(message)
                with pytest.raises(grpc.aio.AioRpcError, match="no frame came within 0.2 s") as caught:
                    await slow.read()
                assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert (await calls.forward(to, GOOD)).data == DATA

    run(main())


@pytest.mark.parametrize("method", ["Forward", "Backward"])
def test_silent_streams_take_no_place(method: str) -> None:
    async def main() -> None:
        stage = EchoStage()
        async with served(stage, Limits(max_receiving=4)) as (_, to), raw(to) as channel:
            stream: Bytes = channel.stream_stream(path(method))
            silent = [stream(metadata=call_metadata(to)) for _ in range(16)]
            # Of one connection, so they have begun at the server when it answers what came after them.
            health: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/grpc.health.v1.Health/Check")
            for _ in range(3):
                await health(b"")
            forward: Bytes = channel.stream_stream(path("Forward"))
            reply = await forward(iter([frames.encode(HEAD, DATA)]), metadata=call_metadata(to)).read()
            assert isinstance(reply, bytes)
            assert frames.decode(reply).data == DATA
            for one in silent:
                one.cancel()

    run(main())


@asynccontextmanager
async def raw(to: Contact) -> AsyncIterator[grpc.aio.Channel]:
    """A channel for bytes of our own making."""
    async with grpc.aio.insecure_channel(to.endpoint, options=(("grpc.max_send_message_length", -1),)) as channel:
        yield channel


def _failure(error: grpc.aio.AioRpcError) -> bytes:
    found: Iterator[object] = (value for key, value in error.trailing_metadata() or () if key == FAILURE_KEY)
    value = next(found)
    assert isinstance(value, bytes)
    return value
