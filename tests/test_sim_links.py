"""Links of the simulated world: all transfers share the bandwidth at every moment."""

from __future__ import annotations

import asyncio

import pytest

from swarm.sim.links import Link, carry
from swarm.sim.loop import Process, run, world_seconds

pytestmark = pytest.mark.fast


async def timed(nbytes: int, *links: Link, after_seconds: float = 0.0) -> float:
    """When the transfer ends."""
    await asyncio.sleep(after_seconds)
    await carry(nbytes, *links)
    return world_seconds()


def ends(*transfers: tuple[float, int], bytes_per_second: float = 100.0) -> list[float]:
    """When each (start, bytes) ends that shares one link."""

    async def main() -> list[float]:
        link = Link(bytes_per_second)
        found = await asyncio.gather(*(timed(nbytes, link, after_seconds=start) for start, nbytes in transfers))
        assert link.active == 0
        assert link.carried_bytes == sum(nbytes for _, nbytes in transfers)
        return found

    return run(main())


def test_one_transfer_has_the_whole_link() -> None:
    assert ends((0.0, 1000)) == pytest.approx([10.0])


def test_two_equal_transfers_share_it_and_both_take_twice_as_long() -> None:
    assert ends((0.0, 1000), (0.0, 1000)) == pytest.approx([20.0, 20.0])


def test_a_short_one_ends_first_and_leaves_its_share() -> None:
    assert ends((0.0, 1000), (0.0, 200)) == pytest.approx([12.0, 4.0])


def test_one_that_comes_later_shares_what_is_left() -> None:
    # 4 s alone, then both at half until the first has its other 600 bytes, then the second alone.
    assert ends((0.0, 1000), (4.0, 1000)) == pytest.approx([16.0, 20.0])


def test_as_many_bytes_pass_whatever_the_order() -> None:
    transfers = [(0.1 * i, 50 + 37 * (i * 7 % 11)) for i in range(20)]
    assert max(ends(*transfers)) == pytest.approx(sum(nbytes for _, nbytes in transfers) / 100.0)


def test_nothing_and_a_link_without_limit_take_no_time() -> None:
    assert ends((0.0, 0)) == [0.0]

    async def main() -> None:
        assert await timed(10**12, Link()) == 0.0

    run(main())


@pytest.mark.parametrize("cancels_before_it_begins", [False, True])
def test_one_that_is_given_up_gives_its_share_back(cancels_before_it_begins: bool) -> None:
    async def main() -> None:
        link = Link(100.0)
        kept, given_up = (asyncio.create_task(timed(1000, link)) for _ in range(2))
        await asyncio.sleep(0.0 if cancels_before_it_begins else 8.0)
        given_up.cancel()
        await asyncio.wait({given_up})
        assert given_up.cancelled()
        assert link.active == 1
        # 8 s at half the bandwidth, and the other 600 bytes alone.
        assert await kept == pytest.approx(10.0 if cancels_before_it_begins else 14.0)
        assert link.active == 0

    run(main())


def test_the_narrower_of_up_and_down_limits() -> None:
    async def main(up: float, down: float) -> float:
        return await timed(1000, Link(up), Link(down))

    assert run(main(100.0, 50.0)) == pytest.approx(20.0)
    assert run(main(50.0, 100.0)) == pytest.approx(20.0)


def test_up_and_down_are_busy_at_the_same_time_and_shared_apart() -> None:
    """Two receivers of one sender share its way up; two senders to one receiver share its way down."""

    async def main() -> None:
        ups, downs = [Link(100.0), Link(100.0)], [Link(100.0), Link(100.0)]
        found = await asyncio.gather(timed(1000, ups[0], downs[0]), timed(1000, ups[0], downs[1]))
        assert found == pytest.approx([20.0, 20.0])
        found = await asyncio.gather(timed(1000, ups[0], downs[0]), timed(1000, ups[1], downs[0]))
        assert found == pytest.approx([40.0, 40.0])
        found = await asyncio.gather(timed(1000, ups[0], downs[0]), timed(1000, ups[1], downs[1]))
        assert found == pytest.approx([50.0, 50.0])

    run(main())


def test_one_that_is_given_up_at_a_link_is_given_up_at_the_other() -> None:
    async def main() -> None:
        up, down = Link(100.0), Link(10.0)
        task = asyncio.create_task(timed(1000, up, down))
        await asyncio.sleep(20.0)
        assert (up.active, down.active) == (0, 1)
        task.cancel()
        await asyncio.wait({task})
        assert (up.active, down.active) == (0, 0)
        assert await timed(100, up, down) == pytest.approx(30.0)

    run(main())


def test_a_link_goes_by_the_worlds_clock() -> None:
    """Neither a process's clock nor its pause makes bytes slower."""

    async def main() -> None:
        link, process = Link(100.0), Process("p", clock_rate=3.0)
        paused = process.spawn(timed(1000, link))
        other = asyncio.create_task(timed(1000, link))
        await asyncio.sleep(1.0)
        process.pause()
        assert await other == pytest.approx(20.0)
        process.resume()
        assert await paused == pytest.approx(20.0)

    run(main())


def test_within_a_connection_messages_go_one_after_another_and_connections_share() -> None:
    async def main() -> None:
        link, ended = Link(100.0), dict[str, float]()

        async def send(name: str, nbytes: int, connection: str) -> None:
            await carry(nbytes, link, connection=connection)
            ended[name] = world_seconds()

        await asyncio.gather(send("a1", 100, "a"), send("a2", 100, "a"), send("b", 100, "b"))
        # Half the link each for 2 s; then the second one of a has it alone.
        assert ended == pytest.approx({"a1": 2.0, "b": 2.0, "a2": 3.0})

    run(main())


def test_one_that_waits_for_its_turn_may_be_given_up() -> None:
    async def main() -> None:
        link = Link(100.0)
        first, second, third = (asyncio.create_task(carry(100, link, connection="a")) for _ in range(3))
        await asyncio.sleep(0.5)
        second.cancel()
        await asyncio.gather(first, third)
        assert world_seconds() == pytest.approx(2.0)
        assert link.active == 0

    run(main())
