"""One run of one schedule, and what must be true of it."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

from swarm.config import RunConfig, parse
from swarm.errors import RunFailed
from swarm.ids import MicrobatchId
from swarm.policy.deadlines import LAN
from swarm.policy.health import BAN_SECONDS
from swarm.sim.fuzz.chaos import FAULTS_END_SECONDS, Chaos
from swarm.sim.fuzz.operator import Operator
from swarm.sim.fuzz.schedule import Kind, Schedule
from swarm.sim.loop import run
from swarm.sim.numeric import Broken, Poison
from swarm.sim.swarm import SimulatedSwarm

BOUND_SECONDS = FAULTS_END_SECONDS + BAN_SECONDS + 3 * LAN.call_ceiling_seconds
"""Virtual time by which a run must be complete: once faults end, the longest ban may have to pass, and three calls that
were made amid the faults may wait for as long as any may."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How a schedule ended."""

    schedule: Schedule
    error: BaseException | None
    happened: Counter[tuple[str, Kind]]
    events: list[tuple[float, str, dict[str, Any]]]
    calls: int
    seconds: float
    """Virtual."""

    @property
    def what(self) -> str:
        """The failure in one line; empty if there is none."""
        return "" if self.error is None else f"{type(self.error).__name__}: {_first_cause(self.error)}"


def run_config(stages: int, microbatches: int) -> RunConfig:
    """Of a run whose arithmetic is simulated: only its numbers of stages and microbatches matter."""
    return parse(
        {
            "run": {"name": "simulated"},
            "model": {"layers": stages, "width": 8, "heads": 1, "sequence_length": 4, "stages": stages},
            "optimizer": {"learning_rate": 1.0},
            "step": {"microbatches": microbatches, "microbatch_size": 1},
        },
        "simulated",
    )


def try_schedule(schedule: Schedule, bound_seconds: float = BOUND_SECONDS) -> Outcome:
    """Run it on a virtual loop of its own."""
    chaos = Chaos(schedule)
    outcome = Outcome(schedule=schedule, error=None, happened=chaos.happened, events=[], calls=0, seconds=0.0)
    try:
        run(_play(schedule, chaos, outcome, bound_seconds))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the schedule has shown
        outcome.error = error
    return outcome


async def _play(schedule: Schedule, chaos: Chaos, outcome: Outcome, bound_seconds: float) -> None:
    complaints: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    config = run_config(len(schedule.peers), schedule.microbatches)
    swarm = SimulatedSwarm(config, chaos, _poisons(schedule), staleness_seconds=schedule.staleness_seconds)
    outcome.events = swarm.journal.events
    operator = Operator(swarm, schedule.steps, sees_lead=schedule.sees_lead)
    chaos.attach(swarm, operator)
    try:
        async with asyncio.timeout(bound_seconds):
            await operator.run()
        swarm.check_finished(schedule.steps)
    except* RunFailed:
        if not any(swarm.truth.is_hopeless(step) for step in range(schedule.steps)):
            raise
    except* TimeoutError:
        violation = swarm.invariants.violation
        raise violation or AssertionError(f"no end within {bound_seconds:g} s, though faults ended") from None
    finally:
        outcome.seconds = loop.time()
        outcome.calls = sum(swarm.network.calls.values())
        await operator.stop()
        await swarm.close()
    if swarm.invariants.violation is not None:
        raise swarm.invariants.violation
    gc.collect()
    failures = [error for error in swarm.network.failures if not isinstance(error, Broken)]
    if complaints or failures:
        raise AssertionError(f"not retrieved or not foreseen: {complaints} {failures}")


def _poisons(schedule: Schedule) -> frozenset[Poison]:
    """Microbatches that no peer can compute; never the first, so that a step always has one."""
    rng = Random(schedule.seed)
    return frozenset(
        Poison(
            stage=rng.randrange(len(schedule.peers)),
            step=rng.randrange(schedule.steps),
            microbatch=MicrobatchId(rng.randrange(1, schedule.microbatches)),
            where=rng.choice(["output", "gradient"]),
        )
        for _ in range(schedule.poisoned)
    )


def _first_cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
