"""Calls of the simulated world: what the weather and deaths do to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from swarm.errors import PeerFailed, SwarmError, TimedOut, Unreachable, WrongRun
from swarm.ids import PeerId, SessionId
from swarm.messages import Contact
from swarm.ports import StageService
from swarm.sim.loop import run, world_seconds
from swarm.sim.weather import Fate
from tests.network_world import World

pytestmark = pytest.mark.fast

# --- fates --------------------------------------------------------------------------------


def outcome(fate: Fate, after_seconds: float = 20.0) -> tuple[str | type[SwarmError], int]:
    """What the caller of one call gets, and how often the callee was reached."""

    async def main() -> tuple[str | type[SwarmError], int]:
        world = World(fate)
        world.start()
        try:
            answer: str | type[SwarmError] = await world.call()
        except SwarmError as error:
            answer = type(error)
        await asyncio.sleep(after_seconds)
        return answer, world.arrived

    return run(main())


@pytest.mark.parametrize(
    ("fate", "answer", "arrived"),
    [
        (Fate(), "answer", 1),
        (Fate(lose_request=True), TimedOut, 0),
        (Fate(lose_reply=True), TimedOut, 1),
        (Fate(request_seconds=2.0), TimedOut, 0),
        (Fate(reply_seconds=2.0), TimedOut, 1),
        (Fate(repeat=True), "answer", 2),
        (Fate(late_copy_seconds=9.0), "answer", 2),
        (Fate(lose_request=True, late_copy_seconds=9.0), TimedOut, 1),
        (Fate(reset_request=True), Unreachable, 0),
        (Fate(reset_reply=True), Unreachable, 1),
        (Fate(kill_before=True), Unreachable, 0),
        (Fate(kill_after=True), Unreachable, 1),
    ],
)
def test_fates(fate: Fate, answer: str | type[SwarmError], arrived: int) -> None:
    assert outcome(fate) == (answer, arrived)


def test_what_happens_on_the_way() -> None:
    happened = list[tuple[str, int]]()

    async def main() -> None:
        def note(what: str) -> Callable[[], None]:
            return lambda: happened.append((what, world.arrived))

        world = World(Fate(on_request=note("request"), on_reply=note("reply")))
        world.start()
        await world.call()

    run(main())
    assert happened == [("request", 0), ("reply", 1)]


# --- who answers --------------------------------------------------------------------------


def test_calls_to_nobody_and_to_an_earlier_life() -> None:
    async def main() -> None:
        world = World()
        with pytest.raises(Unreachable):
            await world.call()
        world.start()
        with pytest.raises(WrongRun):
            await world.call(Contact(peer=PeerId("p"), session=SessionId("p#0"), endpoint="p:1"))

    run(main())


def test_an_unforeseen_error_reaches_the_caller_as_a_failure_of_the_peer_and_is_kept() -> None:
    async def main() -> None:
        async def broken(service: StageService) -> str:
            raise KeyError("oops")

        world = World()
        world.start()
        with pytest.raises(PeerFailed, match="KeyError"):
            await world.call(work=broken)
        assert [type(error) for error in world.network.failures] == [KeyError]

    run(main())


def test_a_time_out_that_no_deadline_gives_is_noted() -> None:
    async def main() -> None:
        world = World()
        world.start()
        await world.call(seconds=float("inf"))
        assert [type(error) for error in world.network.failures] == [ValueError]

    run(main())


def test_a_caller_that_gives_up_ends_the_callees_work() -> None:
    async def main() -> None:
        world = World()
        world.start()
        with pytest.raises(TimedOut):
            await world.call(seconds=0.05)
        await asyncio.sleep(0.0)
        assert (world.arrived, world.cancelled) == (1, 1)

    run(main())


# --- deaths -------------------------------------------------------------------------------


def test_a_death_breaks_the_calls_that_run() -> None:
    async def main() -> None:
        world = World()
        world.start()
        asyncio.get_running_loop().call_later(0.05, world.kill)
        with pytest.raises(Unreachable):
            await world.call()
        assert world_seconds() == pytest.approx(0.05)

    run(main())


def test_of_a_silent_death_nobody_is_told() -> None:
    """Neither those whose calls run nor those who call later hear anything until the machine is back."""

    async def main() -> None:
        world = World()
        world.start()
        asyncio.get_running_loop().call_later(0.05, lambda: world.kill(silently=True))
        with pytest.raises(TimedOut):
            await world.call(seconds=3.0)
        assert world_seconds() == pytest.approx(3.0)
        with pytest.raises(TimedOut):
            await world.call(seconds=3.0)
        assert world_seconds() == pytest.approx(6.0)
        assert (world.arrived, world.cancelled) == (1, 1)
        world.start(Contact(peer=PeerId("p"), session=SessionId("p#2"), endpoint="p:1"))
        with pytest.raises(WrongRun):
            await world.call()

    run(main())


def test_a_caller_that_is_cancelled_with_its_callee_stays_cancelled() -> None:
    async def main() -> None:
        world = World()
        world.start()
        caller = asyncio.create_task(world.call())
        await asyncio.sleep(0.05)
        world.kill()
        caller.cancel()
        await asyncio.wait({caller})
        assert caller.cancelled()

    run(main())


@pytest.mark.parametrize("dies", [False, True])
def test_a_stream_breaks_when_its_sender_dies(dies: bool) -> None:
    async def main() -> bytes:
        world = World(Fate(kill_amid_stream=dies))
        world.start()
        received = bytearray()
        try:
            async for piece in await world.stream(b"12345678"):
                received += piece
        except Unreachable:
            received += b"!"
        return bytes(received)

    assert run(main()) == (b"1234!" if dies else b"12345678")


def test_a_stream_whose_sender_dies_silently_stands_still() -> None:
    async def main() -> None:
        world = World()
        world.start()
        pieces = await world.stream(b"12345678", seconds=2.0)
        assert await anext(pieces) == b"1"
        world.kill(silently=True)
        before = world_seconds()
        with pytest.raises((TimedOut, Unreachable)):
            await anext(pieces)
        assert world_seconds() - before == pytest.approx(2.0, abs=0.1)

    run(main())
