"""Runs the real roles through a schedule of faults that one seed decides, and says whether the guarantees held."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from swarm.config import RunConfig, parse
from swarm.errors import Superseded
from swarm.ids import MicrobatchId, PeerId
from swarm.sim.loop import run
from swarm.sim.network import Call, Fate
from swarm.sim.numeric import Broken, Poison
from swarm.sim.swarm import MemoryLog, SimulatedSwarm

FAULTS_END_SECONDS = 40.0
"""Virtual time after which nothing fails any more."""
BOUND_SECONDS = FAULTS_END_SECONDS + 1200.0
"""Virtual time by which a run must be complete: the longest ban (300 s), and calls made amid the faults that wait for
as long as they may (up to 300 s each, times the patience)."""
OPERATOR_RESTARTS = 3
"""Times that the last trainer is started again because a term higher than its own turned up."""


def run_config(stages: int, microbatches: int) -> RunConfig:
    return parse(
        {
            "run": {"name": "t"},
            "model": {"layers": stages, "width": 8, "heads": 1, "sequence_length": 4, "stages": stages},
            "optimizer": {"learning_rate": 1.0},
            "step": {"microbatches": microbatches, "microbatch_size": 1},
        },
        "test",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What a run is, and which faults may happen; ``seed`` decides when."""

    seed: int
    peers: tuple[int, ...]
    """Peers of each stage."""
    steps: int = 3
    microbatches: int = 4
    lost: float = 0.0
    """Chance that a call's request, and that its reply, is lost."""
    late: float = 0.0
    """Chance of a delay of up to 8 s, of a repeat, of another copy up to 8 s later, and of an arrival when the
    caller has given up."""
    deaths: float = 0.0
    """Chance that a call kills its callee."""
    poisoned: int = 0
    """Microbatches that are not finite at any peer."""
    sick: int = 0
    """Microbatches that are not finite at one peer, which then is not distrusted unless it has a twin."""
    lost_results: float = 0.0
    """Chance that a member loses the result of an all-reduce."""
    joiners: int = 0
    restarts: tuple[str, ...] = ()
    """What happens to the trainer, in this order, at random times."""
    focus: tuple[str, ...] = ()
    """The kinds of calls that faults happen to; none: all."""
    bound_seconds: float = BOUND_SECONDS
    """Virtual time by which the run must be complete."""
    broken: float = 0.0
    """Chance that a life of a peer breaks half-way through the addition of one microbatch."""

    @staticmethod
    def draw(seed: int) -> Schedule:
        """A schedule with some of all faults."""
        rng = random.Random(seed)
        focus = tuple(rng.sample(FAULTY, rng.randint(1, 3))) if rng.random() < 0.5 else ()

        def chance(most: float) -> float:
            return rng.choice([0.0, most / 3, most]) * (2.0 if focus else 1.0)

        return Schedule(
            seed=seed,
            peers=tuple(rng.randint(1, 3) for _ in range(rng.randint(2, 3))),
            steps=rng.randint(3, 4),
            microbatches=rng.randint(4, 6),
            lost=chance(0.15),
            late=chance(0.2),
            deaths=chance(0.03),
            poisoned=rng.choice([0, 0, 1, 2]),
            sick=rng.choice([0, 0, 1]),
            lost_results=chance(0.4),
            joiners=rng.randint(0, 2),
            restarts=tuple(rng.choice(RESTARTS) for _ in range(rng.randint(0, 3))),
            focus=focus,
            broken=chance(0.5),
        )


FAULTY = ("forward", "backward", "void", "greet", "freeze", "drop", "reduce", "apply", "fetch_state")
RESTARTS = ("restart", "restart with empty log", "second trainer")


class RandomWeather:
    """Implements :class:`swarm.sim.network.Weather` from a schedule."""

    def __init__(self, schedule: Schedule, rng: random.Random) -> None:
        self._schedule = schedule
        self._rng = rng
        self.swarm: SimulatedSwarm | None = None

    def fate(self, call: Call) -> Fate:
        focus = self._schedule.focus
        if asyncio.get_running_loop().time() > FAULTS_END_SECONDS or (focus and call.kind not in focus):
            return Fate()
        rng, schedule = self._rng, self._schedule
        dies = rng.random() < schedule.deaths and self.swarm is not None
        overdue = rng.random() < schedule.late / 2
        copied = rng.random() < schedule.late
        how = rng.choice(["kill_before", "kill_after", "kill_amid_stream"])
        return Fate(
            request_seconds=0.005 if rng.random() >= schedule.late else rng.uniform(0.01, 8.0),
            reply_seconds=0.005 if rng.random() >= schedule.late else rng.uniform(0.01, 8.0),
            lose_request=overdue or rng.random() < schedule.lost,
            lose_reply=rng.random() < schedule.lost,
            repeat=rng.random() < schedule.late,
            late_copy_seconds=rng.uniform(4.0, 12.0) if overdue else rng.uniform(0.01, 8.0) if copied else None,
            kill_before=dies and how == "kill_before",
            kill_after=dies and how == "kill_after",
            kill_amid_stream=dies and how == "kill_amid_stream",
        )


class Chaos:
    """Deaths that the swarm survives, restarts, joiners, and the trainer's misfortunes."""

    def __init__(self, swarm: SimulatedSwarm, schedule: Schedule, rng: random.Random) -> None:
        self.swarm = swarm
        self.schedule = schedule
        self.rng = rng
        self._stages: dict[PeerId, tuple[int, bool]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, name: str, stage: int, sick: bool = False) -> None:
        peer = self.swarm.start_peer(name, stage, self.rng.choice([0.5, 1.0, 4.0]), sick)
        self._stages[peer] = (stage, sick)
        breaking = random.Random(f"{self.schedule.seed}/{name}/{self.swarm.network.calls}")
        if breaking.random() < self.schedule.broken:
            self.swarm.peers[peer].module.breaks.add(MicrobatchId(breaking.randrange(self.schedule.microbatches)))
        # Every way to die asks first whether the swarm can survive it.
        self.swarm.peers[peer].node.kill = lambda: self._die(peer)

    def _die(self, peer: PeerId) -> None:
        if peer not in self.swarm.peers or not self._can_spare(peer):
            return
        self.swarm.kill_peer(peer)
        self._later(self._come_back(peer))

    def _can_spare(self, peer: PeerId) -> bool:
        stage = self._stages[peer][0]
        someone_sick = any(sick for of, sick in self._stages.values() if of == stage)
        return not someone_sick and self.swarm.may_kill(peer)

    async def _come_back(self, peer: PeerId) -> None:
        await asyncio.sleep(self.rng.uniform(0.5, 12.0))
        self.start(peer, *self._stages[peer])

    async def join_late(self, name: str) -> None:
        await asyncio.sleep(self.rng.uniform(0.5, 12.0))
        self.start(name, self.rng.randrange(len(self.schedule.peers)))

    def _later(self, what: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def train(self) -> None:
        """Train to the end, whatever happens to trainers.  One must finish; the others may only be superseded."""
        for index in range(self.schedule.joiners):
            self._later(self.join_late(f"joiner{index}"))
        trainings = [self._training("trainer", self.swarm.log)]
        name = "trainer"
        for number, what in enumerate(self.schedule.restarts):
            await asyncio.wait({trainings[-1]}, timeout=self.rng.uniform(0.3, 8.0))
            if trainings[-1].done():
                break
            if what == "second trainer":
                name = f"trainer{number}"
            else:
                trainings[-1].cancel()
            log = MemoryLog() if what == "restart with empty log" else MemoryLog(list(self.swarm.log.commits))
            trainings.append(self._training(name, log))
        for _ in range(OPERATOR_RESTARTS):
            await asyncio.wait(trainings)
            if not all(task.cancelled() or superseded(task) for task in trainings):
                break
            trainings.append(self._training(name, MemoryLog(list(self.swarm.log.commits))))
        await asyncio.wait(trainings)
        finished = [await task for task in trainings if not task.cancelled() and not superseded(task)]
        if not finished:
            raise AssertionError("every trainer was superseded, and the last one by nobody who lives")
        self.swarm.log = finished[-1]

    def _training(self, name: str, log: MemoryLog) -> asyncio.Task[MemoryLog]:
        trainer = self.swarm.make_trainer(name, log=log, sees_lead=False)

        async def train() -> MemoryLog:
            await trainer.run(self.schedule.steps)
            return log

        return asyncio.create_task(train(), name=name)


def superseded(task: asyncio.Task[MemoryLog]) -> bool:
    """It ended, and of nothing but that another trainer leads."""
    error = None if task.cancelled() else task.exception()
    if isinstance(error, ExceptionGroup):
        return error.split(Superseded)[1] is None
    return isinstance(error, Superseded)


async def play(schedule: Schedule) -> SimulatedSwarm:
    """One run.  Raises whatever shows that a guarantee does not hold."""
    rng = random.Random(schedule.seed)
    config = run_config(len(schedule.peers), schedule.microbatches)
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))

    def draw(count: int, stages: int) -> frozenset[Poison]:
        return frozenset(
            Poison(
                stage=rng.randrange(stages),
                step=rng.randrange(schedule.steps),
                microbatch=MicrobatchId(rng.randrange(1, schedule.microbatches)),
                where=rng.choice(["output", "gradient"]),
            )
            for _ in range(count)
        )

    weather = RandomWeather(schedule, rng)
    swarm = SimulatedSwarm(config, weather, draw(schedule.poisoned, len(schedule.peers)), draw(schedule.sick, 1))
    weather.swarm = swarm
    swarm.meetings.loses = lambda peer: (
        asyncio.get_running_loop().time() < FAULTS_END_SECONDS and rng.random() < schedule.lost_results
    )
    chaos = Chaos(swarm, schedule, rng)
    for stage, count in enumerate(schedule.peers):
        for index in range(count):
            chaos.start(f"p{stage}{index}", stage, sick=bool(schedule.sick) and stage == index == 0)
    try:
        async with asyncio.timeout(schedule.bound_seconds):
            await chaos.train()
        swarm.check_finished(schedule.steps)
    finally:
        await swarm.close()
    gc.collect()
    failures = [error for error in swarm.network.failures if not isinstance(error, Broken)]
    if complaints or failures:
        raise AssertionError(f"not retrieved or not foreseen: {complaints} {failures}")
    return swarm


def run_schedule(schedule: Schedule) -> SimulatedSwarm:
    return run(play(schedule))
