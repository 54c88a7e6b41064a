"""The real trainer with a user's code in it that forks: worker processes, and a shell command now and then.

Run as ``python -m tests.forking_program train ...``; the workers' count of what they did is printed at the end.
"""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import time
from multiprocessing.pool import Pool

from peers import life
from peers.cli import guarded, parser
from peers.train import TrainOptions, TrainProgram
from swarm.errors import ExitCode, RunFailed
from swarm.records import CommitRecord

WORKERS = 4
BATCHES_PER_STEP = 16


def load(number: int) -> int:
    """What a loader's worker does."""
    return sum(range(number))


class ForkingTrainer(TrainProgram):
    """Its workers are forked while gRPC, the DHT and their threads are running."""

    pool: Pool | None = None
    batches = 0

    def _stepped(self, commit: CommitRecord) -> None:
        super()._stepped(commit)
        if self.pool is None:
            self.pool = multiprocessing.get_context("fork").Pool(WORKERS)
        self.batches += len(self.pool.map(load, range(BATCHES_PER_STEP)))
        # A worker that is told to end does so, and this process does not take it for its own.
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
        worker.terminate()
        worker.join(10)
        if worker.exitcode != -signal.SIGTERM:
            raise RunFailed(f"a worker that was told to end has exit code {worker.exitcode}")
        if commit.step % 10 == 0:
            subprocess.run(["/bin/sh", "-c", "true"], check=True)


def main() -> ExitCode:
    program = ForkingTrainer(TrainOptions.parse(parser().parse_args(sys.argv[1:])))
    life.prepare()
    code = life.run(program.run(), on_sigterm=ExitCode.INTERRUPTED)
    print(f"{program.batches} batches")
    return code


if __name__ == "__main__":
    sys.exit(guarded(main))
