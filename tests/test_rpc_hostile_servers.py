"""Servers that answer rubbish: it costs them, not the caller."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from swarm.errors import BadReply, PeerFailed, Refused, Retryable
from swarm.messages import BackwardRequest, Contact, GradientRequest, StateRequest
from swarm.rpc.client import GrpcStageCalls
from swarm.rpc.options import FAILURE_KEY, SERVICE
from swarm.wire import frames, heads
from swarm.wire.v1 import stage_pb2 as pb
from tests.rpc_hostile_case import DATA, GOOD, GREETING, HEAD, METHODS, Planted, declared, run
from tests.stage_double import (
    DIGEST,
    LINEAGE,
    PEER,
    RUN,
    SESSION,
    call,
)

pytestmark = pytest.mark.fast

# --- hostile servers --------------------------------------------------------------

GOOD_REPLY = heads.to_output(GOOD.inputs)


REPLIES: dict[str, list[bytes]] = {
    "nothing": [],
    "empty frame": [b""],
    "noise": [b"\xff\xfe\xfd"],
    "a head": [frames.encode(HEAD, DATA)],
    "unknown dtype": [frames.encode(pb.Frame(tensors=declared((1, 8), dtype=77).tensors), bytes(32))],
    "negative shape": [frames.encode(pb.Frame(tensors=declared((-1, 8)).tensors), bytes(32))],
    "a terabyte": [frames.encode(pb.Frame(tensors=declared((1 << 35, 8)).tensors), b"")],
    "one byte missing": [frames.encode(GOOD_REPLY, DATA[:-1])],
    "one byte too many": [frames.encode(GOOD_REPLY, DATA), frames.encode(None, b"x")],
    "a pickle": [pickle.dumps(Planted())],
    "two tensors": [frames.encode(pb.Frame(tensors=[*GOOD_REPLY.tensors] * 2), DATA * 2)],
}


@pytest.mark.parametrize("name", REPLIES)
def test_a_malformed_reply_is_a_bad_reply(name: str) -> None:
    async def main() -> None:
        async with answering(REPLIES[name]) as (calls, to):
            with pytest.raises(BadReply):
                await calls.forward(to, GOOD)
            with pytest.raises(BadReply):
                await calls.backward(to, BackwardRequest(call=call(), inputs=None, seed=GOOD.inputs, tokens=1))
            with pytest.raises(BadReply):
                await calls.fetch_state(to, StateRequest(run=RUN, stage=1), 5)
            # To a method with one reply, "nothing" is a status, and of two messages the second is waited for in vain.
            if name not in ("nothing", "one byte too many"):
                with pytest.raises(BadReply):
                    await calls.greet(to, GREETING, 5)

    run(main())


def test_a_good_reply_of_that_server_is_believed() -> None:
    async def main() -> None:
        async with answering([frames.encode(GOOD_REPLY, DATA)]) as (calls, to):
            assert (await calls.forward(to, GOOD)).data == DATA

    run(main())


def test_a_stream_of_heads_is_no_gradient() -> None:
    async def main() -> None:
        async with answering([frames.encode(None, b"x"), frames.encode(HEAD, b"x")]) as (calls, to):
            data = await calls.fetch_gradient(to, GradientRequest(run=RUN, stage=1, parent=LINEAGE, digest=DIGEST), 5)
            assert await anext(data) == b"x"
            with pytest.raises(BadReply):
                await anext(data)

    run(main())


@pytest.mark.parametrize(
    ("code", "failure", "expected"),
    [
        (grpc.StatusCode.UNKNOWN, None, PeerFailed),
        (grpc.StatusCode.INTERNAL, None, PeerFailed),
        (grpc.StatusCode.UNIMPLEMENTED, None, BadReply),
        (grpc.StatusCode.PERMISSION_DENIED, b"\xff\xff", BadReply),
        (grpc.StatusCode.UNKNOWN, pb.Failure(code=pb.FAILURE_CODE_STALE).SerializeToString(), Refused),
    ],
)
def test_any_status_is_an_error_of_the_tree(
    code: grpc.StatusCode, failure: bytes | None, expected: type[Exception]
) -> None:
    async def main() -> None:
        async with answering([], code, failure) as (calls, to):
            with pytest.raises(expected) as caught:
                await calls.forward(to, GOOD)
            assert isinstance(caught.value, Retryable | Refused)

    run(main())


@asynccontextmanager
async def answering(
    replies: list[bytes], code: grpc.StatusCode | None = None, failure: bytes | None = None
) -> AsyncIterator[tuple[GrpcStageCalls, Contact]]:
    """A server that gives the same messages to every call of every method."""

    async def handle(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        async for _ in requests:
            pass
        for reply in replies:
            await context.write(reply)
        if code is not None:
            await context.abort(code, "no", () if failure is None else ((FAILURE_KEY, failure),))

    server = grpc.aio.server()
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(handle)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, dict.fromkeys(METHODS, handler)),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    calls = GrpcStageCalls()
    try:
        yield calls, replace(Contact(peer=PEER, session=SESSION, endpoint="x:1"), endpoint=f"127.0.0.1:{port}")
    finally:
        await calls.close()
        await server.stop(0)
