"""Virtual time, and the processes that share it: pauses, and clocks that differ."""

from __future__ import annotations

import asyncio
import time

import pytest

from swarm.sim.loop import Deadlock, Process, VirtualClock, run, world_later, world_seconds

pytestmark = pytest.mark.fast


def test_time_is_virtual() -> None:
    async def main() -> float:
        await asyncio.sleep(1e6)
        return asyncio.get_running_loop().time()

    started = time.monotonic()
    assert run(main()) == pytest.approx(1e6)
    assert time.monotonic() - started < 5.0


def test_a_wait_without_a_deadline_is_a_deadlock() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(main())


# --- pauses -------------------------------------------------------------------------------


async def ticking(ticks: list[tuple[str, float]], name: str, period_seconds: float = 1.0) -> None:
    while True:
        await asyncio.sleep(period_seconds)
        ticks.append((name, world_seconds()))


def test_a_paused_process_runs_nothing_while_others_go_on() -> None:
    async def main() -> None:
        ticks = list[tuple[str, float]]()
        stopped, other = Process("stopped"), Process("other")
        tasks = [process.spawn(ticking(ticks, process.name)) for process in (stopped, other)]
        await asyncio.sleep(2.5)
        stopped.pause()
        await asyncio.sleep(3.0)
        assert [at for name, at in ticks if name == "stopped"] == [1.0, 2.0]
        assert [at for name, at in ticks if name == "other"] == [1.0, 2.0, 3.0, 4.0, 5.0]
        stopped.resume()
        await asyncio.sleep(2.0)
        # The sleep that ended meanwhile ends at once; the next one begins only then.
        assert [at for name, at in ticks if name == "stopped"] == [1.0, 2.0, 5.5, 6.5]
        for task in tasks:
            task.cancel()

    run(main())


def test_a_process_that_goes_on_does_what_it_missed_in_order() -> None:
    async def main() -> None:
        done = list[str]()
        process = Process("p")

        async def timers() -> None:
            loop = asyncio.get_running_loop()
            for seconds in (3.0, 1.0, 2.0):
                loop.call_later(seconds, done.append, f"timer {seconds:g}")
            loop.call_later(1.5, lambda: loop.call_soon(done.append, "after 1.5"))

        process.spawn(timers())
        await asyncio.sleep(0.5)
        process.pause()
        world_later(2.0, lambda: done.append("world"))
        late = process.spawn(asyncio.sleep(0, "spawned"))
        await asyncio.sleep(9.5)
        assert done == ["world"]
        assert not late.done()
        process.resume()
        assert done == ["world"], "resuming runs nothing by itself"
        assert await late == "spawned"
        await asyncio.sleep(0)
        assert done == ["world", "timer 1", "timer 2", "timer 3", "after 1.5"]

    run(main())


def test_a_time_out_that_passed_in_a_pause_is_found_at_its_end() -> None:
    async def main() -> None:
        process = Process("p")

        async def wait() -> float:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await asyncio.sleep(60.0)
            return asyncio.get_running_loop().time()

        task = process.spawn(wait())
        await asyncio.sleep(0.5)
        process.pause()
        await asyncio.sleep(4.5)
        assert not task.done()
        process.resume()
        assert await task == pytest.approx(5.0)

    run(main())


def test_what_was_cancelled_in_a_pause_does_not_run_at_its_end() -> None:
    async def main() -> None:
        process, done = Process("p"), list[str]()

        async def timer() -> asyncio.TimerHandle:
            return asyncio.get_running_loop().call_later(1.0, done.append, "cancelled")

        handle = await process.spawn(timer())
        process.pause()
        await asyncio.sleep(2.0)
        handle.cancel()
        process.resume()
        await asyncio.sleep(1.0)
        assert done == []

    run(main())


# --- clocks -------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.5, 1.0, 2.0])
def test_a_clock_of_another_rate(rate: float) -> None:
    async def main() -> None:
        process = Process("p", clock_rate=rate, clock_offset_seconds=100.0)

        async def work() -> float:
            clock = VirtualClock()
            before = clock.now()
            await clock.sleep(6.0)
            assert clock.now() - before == pytest.approx(6.0)
            return before

        before = await process.spawn(work())
        assert before == pytest.approx(100.0)
        assert world_seconds() == pytest.approx(6.0 / rate)
        assert process.true(process.local(17.0)) == pytest.approx(17.0)

    run(main())


def test_a_jump_makes_the_process_own_timers_due_and_nobody_elses() -> None:
    async def main() -> None:
        process, other = Process("p", clock_rate=2.0), Process("other")
        sleeps = [process.spawn(asyncio.sleep(seconds)) for seconds in (20.0, 60.0)]
        sleeps.append(other.spawn(asyncio.sleep(20.0)))
        await asyncio.sleep(1.0)
        process.jump(30.0)
        await sleeps[0]
        assert world_seconds() == pytest.approx(1.0)
        assert [sleep.done() for sleep in sleeps] == [True, False, False]
        await sleeps[1]
        assert world_seconds() == pytest.approx(15.0)  # 60 s by a clock twice as fast that has jumped by 30 s
        await sleeps[2]
        assert world_seconds() == pytest.approx(20.0)
        with pytest.raises(ValueError):
            process.jump(-1.0)

    run(main())


def test_a_jump_in_a_pause_is_noticed_at_its_end() -> None:
    async def main() -> None:
        process = Process("p")
        sleep = process.spawn(asyncio.sleep(20.0))
        await asyncio.sleep(1.0)
        process.pause()
        process.jump(30.0)
        await asyncio.sleep(1.0)
        assert not sleep.done()
        process.resume()
        await sleep
        assert world_seconds() == pytest.approx(2.0)

    run(main())
