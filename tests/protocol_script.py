"""One fault at a time: a weather that a test writes, and what a directed test of the protocol starts with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from swarm.messages import (
    BackwardRequest,
)
from swarm.sim.fuzz.run import run_config
from swarm.sim.lives import MemoryLog
from swarm.sim.loop import run
from swarm.sim.numeric import Poison
from swarm.sim.swarm import SimulatedSwarm
from swarm.sim.weather import Call, Fate

STEPS = 3


BOUND_SECONDS = 300.0


class Script:
    """A weather that a test writes: ``decide`` gives a fate, or None for fair weather."""

    def __init__(self, decide: Callable[[Call], Fate | None] = lambda call: None) -> None:
        self.decide = decide

    def fate(self, call: Call) -> Fate:
        return self.decide(call) or Fate()


def once(matches: Callable[[Call], bool], fate: Fate, times: int = 1) -> Callable[[Call], Fate | None]:
    left = [times]

    def decide(call: Call) -> Fate | None:
        if left[0] and matches(call):
            left[0] -= 1
            return fate
        return None

    return decide


def start(swarm: SimulatedSwarm, *peers: int) -> None:
    for stage, count in enumerate(peers):
        for index in range(count):
            swarm.start_peer(f"p{stage}{index}", stage)


async def train(swarm: SimulatedSwarm, steps: int = STEPS) -> None:
    async with asyncio.timeout(BOUND_SECONDS):
        await swarm.make_trainer(log=MemoryLog(list(swarm.log.commits))).run(steps)
    swarm.check_finished(steps)


async def until(swarm: SimulatedSwarm, condition: Callable[[], bool]) -> None:
    """Wait for the first call after which the condition holds."""
    holds = asyncio.Event()

    def look(call: Call, answer: object) -> None:
        if condition():
            holds.set()

    swarm.network.after_call.append(look)
    try:
        await holds.wait()
    finally:
        swarm.network.after_call.remove(look)


def play(
    peers: tuple[int, ...],
    decide: Callable[[Call], Fate | None] = lambda call: None,
    then: Callable[[SimulatedSwarm], Awaitable[None]] = train,
    poisons: frozenset[Poison] = frozenset(),
    sick: frozenset[Poison] = frozenset(),
    prepare: Callable[[SimulatedSwarm], None] = lambda swarm: None,
) -> SimulatedSwarm:
    async def main() -> SimulatedSwarm:
        swarm = SimulatedSwarm(run_config(len(peers), 4), Script(decide), poisons, sick)
        start(swarm, *peers)
        prepare(swarm)
        try:
            await then(swarm)
        finally:
            await swarm.close()
        return swarm

    return run(main())


def kinds(swarm: SimulatedSwarm) -> set[str]:
    return {kind for _, kind, _ in swarm.journal.events}


def is_backward(call: Call, stage: int, step: int = 0, microbatch: int = 1) -> bool:
    request = call.request
    if not isinstance(request, BackwardRequest):
        return False
    key = request.call.key
    return (key.stage, key.step, request.call.microbatch) == (stage, step, microbatch)
