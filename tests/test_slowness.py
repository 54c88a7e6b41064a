"""A peer that is told to emulate a slow machine is as slow as it was told, announces it, and computes the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from peers import slowness
from peers.cli import parser
from peers.peer import PeerOptions, PeerProgram
from peers.slowness import PacedModule
from swarm.config import RunConfig, parse
from swarm.errors import NeedsInput
from swarm.ids import MicrobatchId
from swarm.ports import Draw, StageModule
from swarm.stage.module import TorchStage
from swarm.tensors import TensorData, TensorSpec

pytestmark = pytest.mark.fast

JOIN = "/ip4/127.0.0.1/tcp/31337/p2p/12D3KooWHHzSeKaY8xuZVzkLbKFfvNgPPeKhFBGrMbNzbm5akpqu"
DRAW = Draw(step=0, microbatch=MicrobatchId(0))


@dataclass(slots=True)
class Time:
    """A clock that only sleep, and the work that is told to, moves."""

    now: float = 0.0
    slept: list[float] = field(default_factory=list)

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Working:
    """A module each of whose calls takes so many seconds."""

    def __init__(self, module: StageModule, clock: Time, seconds: float) -> None:
        self._module, self._clock, self._seconds = module, clock, seconds

    def __getattr__(self, name: str) -> Any:
        method: Callable[..., Any] = getattr(self._module, name)

        def work(*arguments: Any, **named: Any) -> Any:
            self._clock.now += self._seconds
            # What a module measures itself is real time: this clock's stands in for it.
            return self._seconds if name == "probe" else method(*arguments, **named)

        return work


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    fake = Time()
    monkeypatch.setattr(slowness, "time", fake)
    return fake


def config() -> RunConfig:
    return parse(
        {
            "run": {"name": "paced", "seed": 1},
            "model": {"layers": 2, "width": 8, "heads": 2, "sequence_length": 4, "stages": 2},
            "optimizer": {"learning_rate": 0.1},
            "step": {"microbatches": 2, "microbatch_size": 1},
        },
        "test",
    )


def ids() -> TensorData:
    return TensorData(spec=TensorSpec(dtype="int64", shape=(1, 4)), data=bytes(32))


def activation(value: bytes = bytes(4)) -> TensorData:
    return TensorData(spec=TensorSpec(dtype="float32", shape=(1, 4, 8)), data=32 * value)


@pytest.mark.parametrize(("work", "seconds"), [(0.02, 0.1), (0.3, 0.3)])
def test_forward_takes_at_least_its_seconds(clock: Time, work: float, seconds: float) -> None:
    bare = TorchStage(config(), 0)
    paced = PacedModule(Working(bare, clock, work), seconds=0.1)
    output = paced.forward(DRAW, ids(), keep_graph=False)
    assert clock.now == pytest.approx(seconds)
    assert bytes(output.data) == bytes(bare.forward(DRAW, ids(), keep_graph=False).data)


def test_backward_takes_twice_that_and_with_its_forward_three_times(clock: Time) -> None:
    first = PacedModule(Working(TorchStage(config(), 0), clock, 0.02), seconds=0.1)
    first.forward(DRAW, ids(), keep_graph=True)
    began = clock.now
    first.backward(DRAW, None, activation())
    assert clock.now - began == pytest.approx(0.2)
    last = PacedModule(Working(TorchStage(config(), 1), clock, 0.02), seconds=0.1)
    began = clock.now
    last.backward(DRAW, activation(b"\0\0\x80?"), ids())
    assert clock.now - began == pytest.approx(0.3)


def test_failure_and_all_else_are_not_slowed(clock: Time) -> None:
    paced = PacedModule(Working(TorchStage(config(), 0), clock, 0.02), seconds=0.1)
    with pytest.raises(NeedsInput):
        paced.backward(DRAW, None, activation())
    paced.snapshot()
    paced.digest()
    assert clock.slept == []


def test_a_factor_multiplies_what_is_computed_and_the_probe_knows(clock: Time) -> None:
    slow = PacedModule(Working(TorchStage(config(), 0), clock, 0.02), factor=4.0)
    slow.forward(DRAW, ids(), keep_graph=True)
    assert clock.now == pytest.approx(0.08)
    slow.backward(DRAW, None, activation())
    assert clock.now == pytest.approx(0.16)
    assert slow.probe() == pytest.approx(0.08)


@pytest.mark.parametrize(("work", "seconds"), [(0.02, 0.1), (0.3, 0.3)])
def test_probe_says_what_a_forward_takes(clock: Time, work: float, seconds: float) -> None:
    paced = PacedModule(Working(TorchStage(config(), 0), clock, work), seconds=0.1)
    assert paced.probe() == pytest.approx(seconds)
    assert clock.now == pytest.approx(seconds)


def test_the_option_reaches_the_module() -> None:
    def program(*options: str) -> PeerProgram:
        return PeerProgram(PeerOptions.parse(parser().parse_args(["peer", "--join", JOIN, *options])))

    bare = TorchStage(config(), 0)
    assert program().make_module(bare) is bare
    began = time.perf_counter()
    assert isinstance(program("--emulate-slowness", "2").make_module(bare), PacedModule)
    program("--emulate-seconds", "0.05").make_module(bare).forward(DRAW, ids(), keep_graph=False)
    assert time.perf_counter() - began >= 0.05
