"""Processes that are started, by fork or exec, from a process that uses gRPC.

grpc/grpc#37259, grpc/grpc#22624, grpc/grpc#13464.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from peers.local.children import Child, Children
from swarm.errors import ExitCode, Unreachable
from swarm.ids import PeerId, RunHash, SessionId
from swarm.messages import Contact, Greeting
from swarm.records import NO_TERM
from swarm.rpc.client import GrpcStageCalls
from tests.fault_swarm import FaultSwarm, options_for, run_file
from tests.forking_program import BATCHES_PER_STEP, WORKERS

pytestmark = pytest.mark.swarm

STEPS = 31


class OnlyPeers(FaultSwarm):
    """The trainer is started by the test."""

    def start_trainer(self) -> Child:
        return self.children.by_name["bootstrap"]


def test_user_code_that_forks_while_training(tmp_path: Path) -> None:
    path = run_file(tmp_path, stages=1)

    async def main() -> None:
        await use_grpc()  # what starts the swarm's processes has used gRPC itself
        async with Children(tmp_path / "logs") as children:
            swarm = OnlyPeers(options_for(path, tmp_path / "logs", (1,), STEPS), children, {})
            await swarm.start()
            first = await start_trainer(swarm, tmp_path, STEPS)
            async with asyncio.timeout(60):
                output, _ = await first.communicate()
            assert first.returncode == ExitCode.DONE, output.decode()
            assert f"{STEPS * BATCHES_PER_STEP} batches" in output.decode()
            assert f"step {STEPS}/{STEPS}" in output.decode()

            second = await start_trainer(swarm, tmp_path, 100_000)
            assert second.stdout is not None
            async with asyncio.timeout(60):
                while not (await second.stdout.readline()).startswith(b"step "):
                    pass
                while len(workers := psutil.Process(second.pid).children()) < WORKERS:
                    await second.stdout.readline()
            began = time.monotonic()
            second.send_signal(signal.SIGINT)
            async with asyncio.timeout(15):
                await second.communicate()
            assert second.returncode == ExitCode.INTERRUPTED
            psutil.wait_procs(workers, timeout=max(0.0, 15 - (time.monotonic() - began)))
            assert [worker for worker in workers if worker.is_running()] == []

    asyncio.run(main())


async def use_grpc() -> None:
    calls = GrpcStageCalls()
    nobody = Contact(peer=PeerId("nobody"), session=SessionId("0" * 16), endpoint="127.0.0.1:1")
    with pytest.raises(Unreachable):
        await calls.greet(nobody, Greeting(run=RunHash("a" * 64), term=NO_TERM), 5)
    await calls.close()


async def start_trainer(swarm: FaultSwarm, folder: Path, steps: int) -> asyncio.subprocess.Process:
    arguments = ["train", str(swarm.options.run_file), "--join", swarm._address, "--steps", str(steps)]
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.forking_program", *arguments, "--state-dir", str(folder / "state"),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
