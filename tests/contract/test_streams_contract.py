"""What roles rely on of streams of state and gradients: whole or an error, and that a donor is let go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from swarm.errors import BadReply, Retryable, TimedOut
from swarm.messages import GradientRequest, Greeting, StateRequest
from swarm.tensors import Buffer
from tests.contract.lines import LONG_SECONDS, SLACK_SECONDS, SOON_SECONDS, Line, real, simulated
from tests.contract.worlds import FAST, REAL, Real, Simulated, World, world_fixture
from tests.stage_double import COMMIT, DIGEST, LINEAGE, RUN, TERM, report

world = world_fixture((Simulated, simulated, FAST), (Real, real, REAL))

GREETING = Greeting(run=RUN, term=TERM)
STATE = StateRequest(run=RUN, stage=1)
GRADIENT = GradientRequest(run=RUN, stage=1, parent=LINEAGE, digest=DIGEST)


async def collected(data: AsyncIterator[Buffer]) -> bytes:
    return b"".join([bytes(chunk) async for chunk in data])


async def ticks(count: int = 5) -> None:
    """Let tasks that are ready run."""
    for _ in range(count):
        await asyncio.sleep(0)


def numbered(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


async def close(data: AsyncIterator[Buffer]) -> None:
    await data.aclose()  # type: ignore[attr-defined]  # of all iterators of StageCalls


@pytest.mark.parametrize("chunks", [(), (b"",), (b"1",), (numbered(100_000), b"", numbered(7)), (numbered(3 << 20),)])
def test_a_state_arrives_whole_after_its_head(world: World[Line], chunks: tuple[bytes, ...]) -> None:
    async def test(line: Line) -> None:
        line.stage.state_chunks = chunks
        expected = b"".join(chunks)
        head, data = await line.calls.fetch_state(line.to, STATE, LONG_SECONDS)
        assert (head.lineage, head.commits, head.total_bytes) == (LINEAGE, (COMMIT,), len(expected))
        assert await collected(data) == expected
        assert await collected(await line.calls.fetch_gradient(line.to, GRADIENT, LONG_SECONDS)) == expected
        await line.stage.given[-1].closed.wait()

    world.run(test)


@pytest.mark.parametrize("declared", [0, 9, 11, 1000])
def test_a_state_of_another_length_than_its_head_says_is_a_bad_reply(world: World[Line], declared: int) -> None:
    async def test(line: Line) -> None:
        line.stage.state_chunks, line.stage.state_bytes = (b"0123456789",), declared
        head, data = await line.calls.fetch_state(line.to, STATE, LONG_SECONDS)
        assert head.total_bytes == declared
        with pytest.raises(BadReply):
            await collected(data)
        await line.stage.given[-1].closed.wait()

    world.run(test)


@pytest.mark.parametrize("kind", ["state", "gradient"])
def test_a_stream_breaks_when_its_donor_dies(world: World[Line], kind: str) -> None:
    async def test(line: Line) -> None:
        line.stage.state_chunks = (numbered(1000), numbered(1000))
        line.stage.gate.clear()  # the end does not come
        if kind == "state":
            _, data = await line.calls.fetch_state(line.to, STATE, LONG_SECONDS)
        else:
            data = await line.calls.fetch_gradient(line.to, GRADIENT, LONG_SECONDS)
        assert numbered(1000).startswith(bytes(await anext(data)))
        await line.kill()
        with pytest.raises(Retryable):
            await collected(data)

    world.run(test)


def test_a_donor_that_stops_sending_times_out_and_lets_go(world: World[Line]) -> None:
    async def test(line: Line) -> None:
        line.stage.state_chunks = (b"0123456789",)
        line.stage.gate.clear()
        loop = asyncio.get_running_loop()
        data = await line.calls.fetch_gradient(line.to, GRADIENT, SOON_SECONDS)
        received = bytearray()
        while len(received) < 10:
            received += await anext(data)
        assert received == b"0123456789"
        began = loop.time()
        with pytest.raises(TimedOut):
            await anext(data)
        assert SOON_SECONDS - 0.05 <= loop.time() - began < SOON_SECONDS + SLACK_SECONDS
        await line.stage.given[-1].closed.wait()

    world.run(test)


@pytest.mark.parametrize("how", ["before the first step", "after the first step", "in a step"])
def test_a_reader_that_leaves_early_lets_the_donor_go(world: World[Line], how: str) -> None:
    async def test(line: Line) -> None:
        line.stage.gate.clear()
        # More than fits into a connection, but where the reader takes all that there is.
        line.stage.state_chunks, line.stage.state_repeats = (numbered(1 << 20),), 1 if how == "in a step" else 64
        _, data = await line.calls.fetch_state(line.to, STATE, LONG_SECONDS)
        (given,) = line.stage.given
        if how == "in a step":
            received = 0
            while received < 1 << 20:
                received += len(await anext(data))
            reader = asyncio.create_task(collected(data))
            await given.all_given.wait()
            await ticks()
            assert not given.closed.is_set()
            reader.cancel()
            await asyncio.wait({reader})
            assert reader.cancelled()
        else:
            if how == "after the first step":
                await anext(data)
            assert not given.closed.is_set()
            await close(data)
        await given.closed.wait()
        assert await line.calls.greet(line.to, GREETING, LONG_SECONDS) == report()

    world.run(test)


def test_two_states_flow_side_by_side(world: World[Line]) -> None:
    async def test(line: Line) -> None:
        line.stage.state_chunks, line.stage.state_repeats = (numbered(100_000),), 3
        (_, first), (_, second) = await asyncio.gather(
            *(line.calls.fetch_state(line.to, STATE, LONG_SECONDS) for _ in range(2))
        )
        await anext(first)
        assert await collected(second) == numbered(100_000) * 3
        await collected(first)

    world.run(test)
