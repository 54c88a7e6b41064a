"""The launcher's side of the nursery: who has ended is known, whatever becomes of the nursery."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from peers.local.children import Children
from swarm.errors import RunFailed

pytestmark = pytest.mark.swarm

ENTRY = "tests.test_children:wait"
END_SECONDS = 20.0


def wait(arguments: Sequence[str]) -> int:
    """A child: until SIGUSR1; exits with its argument then."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    print("ready", flush=True)
    signal.sigwait({signal.SIGUSR1})
    return int(arguments[0])


def test_a_nursery_that_dies_with_an_unread_request_ends_all(tmp_path: Path) -> None:
    """The kernel resets the connection then instead of ending it."""

    async def main() -> None:
        children = Children(tmp_path)
        async with asyncio.timeout(END_SECONDS), children:
            child = children.spawn("first", [], entry=ENTRY)
            await _said(child.log)
            assert children._nursery is not None
            nursery = psutil.Process(children._nursery.pid)
            nursery.suspend()
            unread = children.spawn("second", [], entry=ENTRY)
            await asyncio.sleep(0)  # the request is written at once
            nursery.kill()
            await child.ended.wait()
            await unread.ended.wait()
            assert (child.exit_code, unread.exit_code) == (-signal.SIGKILL, -signal.SIGKILL)
            with pytest.raises(RunFailed, match="is gone"):
                children.spawn("third", [], entry=ENTRY)

    asyncio.run(main())


def test_who_is_started_again_is_not_ended_by_the_end_of_its_predecessor(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(END_SECONDS), Children(tmp_path) as children:
            first = children.spawn("trainer", ["7"], entry=ENTRY)
            await _said(first.log)
            second = children.spawn("trainer", ["8"], entry=ENTRY)
            await _said(first.log, times=2)
            assert first.process
            assert first.process != second.process
            os.kill(first.process, signal.SIGUSR1)
            await first.ended.wait()
            assert first.exit_code == 7
            assert second.alive
            children.signal("trainer", signal.SIGUSR1)
            await second.ended.wait()
            assert second.exit_code == 8
            assert children.cpu_seconds == first.cpu_seconds + second.cpu_seconds

    asyncio.run(main())


async def _said(log: Path, times: int = 1) -> None:
    def poll() -> None:
        deadline = time.monotonic() + END_SECONDS
        while not (log.exists() and log.read_text().count("ready") >= times):
            assert time.monotonic() < deadline, "it did not come about"
            select.select([], [], [], 0.02)

    await asyncio.to_thread(poll)
