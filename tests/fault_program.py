"""A peer or trainer that dies, or misbehaves, at a named point: the real program with its ports wrapped.

Test-only entry point for the nursery: the first argument is a JSON list of faults, the rest are those of `swarm`.
Each fault is noted in a file before it happens, so that a run whose fault did not fire is seen.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from peers import life
from peers.cli import guarded, parser
from peers.peer import PeerOptions, PeerProgram
from peers.train import TrainOptions, TrainProgram
from swarm.errors import ExitCode
from swarm.messages import ApplyRequest, BackwardRequest, ForwardRequest, FreezeRequest, ReduceRequest, StateRequest
from swarm.ports import Averager, Draw, Executor, Gradient, Priority, StageCalls, StageModule, StageService
from swarm.tensors import TensorData

T = TypeVar("T")

PEER_POINTS = (
    "backward arrives",  # between forward and backward of a microbatch
    "freeze arrives",  # after its backward, before the close
    "reduce begins",  # during the all-reduce
    "reduce is done",  # has the result, has not said so
    "apply arrives",  # between reduce and apply
    "apply is done",  # before the acknowledgement
)
TRAINER_POINTS = (
    "forward is answered",
    "freeze is sent",
    "reduce is sent",
    "reduce is answered",
    "apply is sent",
    "apply is answered",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens where.  ``action``: kill, stop (for ``seconds``, then go on), nan, sleep (each job ``seconds``)."""

    point: str
    file: str
    step: int = 0
    action: str = "kill"
    seconds: float = 0.0
    microbatch: int | None = None
    """Of a fault that strikes one microbatch of one step, each time."""
    shared: bool = False
    """Of all processes that were given this fault, it fires in the first one only."""

    def to_json(self) -> str:
        return json.dumps([asdict(self)])


class Faults:
    """Fires each fault once."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._waiting = list(faults)

    def at(self, point: str, step: int) -> Fault | None:
        """The fault of this point, if it is due; noted on disk, and taken off the list."""
        for fault in self._waiting:
            if fault.point == point and step >= fault.step:
                self._waiting.remove(fault)
                if fault.shared and Path(fault.file).exists():
                    return None
                note(fault, step)
                return fault
        return None

    def strike(self, point: str, step: int) -> None:
        """Kill or stop this process if a fault is due here."""
        fault = self.at(point, step)
        if fault is not None and fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault is not None and fault.action == "stop":
            # Another program wakes us: nothing in this process runs while it is stopped, and a mere fork of it may
            # die in gRPC's fork handlers.
            subprocess.Popen(["/bin/sh", "-c", f"sleep {fault.seconds}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)

    def constant(self, point: str, step: int = 0) -> Fault | None:
        """A fault that holds all the time, from its step on."""
        return next((fault for fault in self._waiting if fault.point == point and step >= fault.step), None)

    def strikes(self, point: str, draw: Draw) -> bool:
        """A fault of exactly this microbatch; noted each time."""
        for fault in self._waiting:
            if (fault.point, fault.step, fault.microbatch) == (point, draw.step, draw.microbatch):
                note(fault, draw.step)
                return True
        return False


def note(fault: Fault, step: int) -> None:
    """Write down that a fault happens now."""
    with Path(fault.file).open("a") as file:
        file.write(json.dumps({"point": fault.point, "step": step, "pid": os.getpid()}) + "\n")
        file.flush()
        os.fsync(file.fileno())


class Wrapper:
    """Passes everything on; subclasses step in where they must."""

    def __init__(self, inner: Any, faults: Faults) -> None:
        self.inner = inner
        self.faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class FaultyService(Wrapper):
    """What other processes call."""

    async def backward(self, request: BackwardRequest) -> Any:
        self.faults.strike("backward arrives", request.call.key.step)
        reply = await self.inner.backward(request)
        self.faults.strike("backward is done", request.call.key.step)
        return reply

    async def freeze(self, request: FreezeRequest) -> Any:
        self.faults.strike("freeze arrives", request.key.step)
        return await self.inner.freeze(request)

    async def apply(self, request: ApplyRequest) -> Any:
        self.faults.strike("apply arrives", request.key.step)
        mark = await self.inner.apply(request)
        self.faults.strike("apply is done", request.key.step)
        return mark

    async def fetch_state(self, request: StateRequest) -> Any:
        head, chunks = await self.inner.fetch_state(request)
        fault = self.faults.at("state is a pickle", head.lineage.length)
        if fault is not None:
            data = pickle.dumps(Bomb(f"{fault.file}.marker"))
            return replace(head, total_bytes=len(data), digest=hashlib.sha256(data).hexdigest()), _one(data)

        async def broken() -> AsyncIterator[Any]:
            async for chunk in chunks:
                yield chunk[: len(chunk) // 2]
                self.faults.strike("state is half sent", head.lineage.length)
                yield chunk[len(chunk) // 2 :]

        return head, broken()


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (self.marker, "w")


async def _one(data: bytes) -> AsyncIterator[bytes]:
    yield data


class FaultyAverager(Wrapper):
    """The all-reduce."""

    async def reduce(self, request: ReduceRequest, gradient_sum: Any) -> Any:
        self.faults.strike("reduce begins", request.key.step)
        once = self.faults.at("gradient is NaN", request.key.step)
        if once is not None or self.faults.constant("gradients are NaN", request.key.step) is not None:
            gradient_sum = gradient_sum * float("nan")
        mean = await self.inner.reduce(request, gradient_sum)
        self.faults.strike("reduce is done", request.key.step)
        return mean


class FaultyModule(Wrapper):
    """The stage's arithmetic."""

    def forward(self, draw: Draw, inputs: TensorData, *, keep_graph: bool) -> TensorData:
        output: TensorData = self.inner.forward(draw, inputs, keep_graph=keep_graph)
        once = self.faults.at("output is NaN", draw.step)
        if once is not None or self.faults.constant("outputs are NaN", draw.step) is not None:
            return TensorData(spec=output.spec, data=b"\xff" * len(output.data))
        return output

    step = 0
    """Of the last backward: the gradient that is added next, on the same thread, is of it."""

    def backward(self, draw: Draw, inputs: TensorData | None, seed: TensorData) -> Gradient:
        self.step = draw.step
        gradient: Gradient = self.inner.backward(draw, inputs, seed)
        if self.faults.at("gradient is not finite", draw.step) is not None:
            gradient.finite = False
        if gradient.loss is not None and self.faults.strikes("loss is infinite", draw):
            gradient.loss, gradient.finite = float("inf"), False
        if self.faults.at("backward raises", draw.step) is not None:
            raise RuntimeError("a fault in the middle of a backward")
        return gradient

    def accumulate(self, gradient: Gradient) -> None:
        """Wrong sums that no protocol can see: the negative controls of the comparison with a single process."""
        if self.faults.at("microbatch is dropped", self.step) is not None:
            return
        if self.faults.at("microbatch is doubled", self.step) is not None:
            self.inner.accumulate(gradient)
        if self.faults.at("microbatch is weighted wrongly", self.step) is not None:
            gradient.handle = [1.5 * part for part in gradient.handle]
        self.inner.accumulate(gradient)


class SleepingExecutor(Wrapper):
    """Emulated compute: every forward sleeps ``seconds``, every backward twice that."""

    def __init__(self, inner: Executor, faults: Faults, seconds: float) -> None:
        super().__init__(inner, faults)
        self.seconds = seconds

    async def run(self, priority: Priority, job: Callable[[], T]) -> T:
        cost = {Priority.FORWARD: 1.0, Priority.BACKWARD: 2.0}.get(priority, 0.0) * self.seconds

        def slow() -> T:
            time.sleep(cost)
            return job()

        result: T = await self.inner.run(priority, slow)
        return result


class FaultyPeer(PeerProgram):
    """The peer program with its parts wrapped."""

    def __init__(self, options: PeerOptions, faults: Faults) -> None:
        super().__init__(options)
        self.faults = faults

    def make_service(self, service: StageService) -> StageService:
        return FaultyService(service, self.faults)

    def make_averager(self, averager: Averager) -> Averager:
        return FaultyAverager(averager, self.faults)

    def make_module(self, module: StageModule) -> StageModule:
        return FaultyModule(module, self.faults)

    def make_executor(self, executor: Executor) -> Executor:
        fault = self.faults.constant("compute is emulated")
        return executor if fault is None else SleepingExecutor(executor, self.faults, fault.seconds)


class FaultyCalls(Wrapper):
    """The trainer's calls."""

    async def forward(self, to: Any, request: ForwardRequest) -> Any:
        output = await self.inner.forward(to, request)
        self.faults.strike("forward is answered", request.call.key.step)
        return output

    async def freeze(self, to: Any, request: FreezeRequest, timeout_seconds: float) -> Any:
        self.faults.strike("freeze is sent", request.key.step)
        return await self.inner.freeze(to, request, timeout_seconds)

    async def reduce(self, to: Any, request: ReduceRequest, timeout_seconds: float) -> Any:
        call = asyncio.ensure_future(self.inner.reduce(to, request, timeout_seconds))
        await asyncio.wait({call}, timeout=0)
        self.faults.strike("reduce is sent", request.key.step)
        reply = await call
        self.faults.strike("reduce is answered", request.key.step)
        return reply

    async def apply(self, to: Any, request: ApplyRequest, timeout_seconds: float) -> Any:
        self.faults.strike("apply is sent", request.key.step)
        mark = await self.inner.apply(to, request, timeout_seconds)
        self.faults.strike("apply is answered", request.key.step)
        return mark


class FaultyTrainer(TrainProgram):
    """The trainer program with its calls wrapped."""

    def __init__(self, options: TrainOptions, faults: Faults) -> None:
        super().__init__(options)
        self.faults = faults

    def make_calls(self, calls: StageCalls) -> StageCalls:
        return FaultyCalls(calls, self.faults)


def run(arguments: Sequence[str]) -> int:
    """Entry point in the nursery."""
    faults = Faults([Fault(**raw) for raw in json.loads(arguments[0])])
    watch = faults.constant("something is unpickled")
    if watch is not None:
        sys.addaudithook(lambda event, _: note(watch, 0) if event == "pickle.find_class" else None)

    def main() -> ExitCode:
        options: argparse.Namespace = parser().parse_args(arguments[1:])
        life.prepare()
        if options.command == "peer":
            return life.run(FaultyPeer(PeerOptions.parse(options), faults).run(), on_sigterm=ExitCode.DONE)
        return life.run(FaultyTrainer(TrainOptions.parse(options), faults).run(), on_sigterm=ExitCode.INTERRUPTED)

    return guarded(main)
