"""Plays a scenario under one combination of policies: real roles, simulated machines, churn and moves."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from swarm.errors import UsageError
from swarm.ids import PeerId
from swarm.policy.deadlines import WAN
from swarm.policy.placement import choose_stage
from swarm.policy.routing import BACKWARD_UNITS, FORWARD_UNITS
from swarm.policy.sizes import stage_memory_bytes
from swarm.records import CommitRecord
from swarm.roles.trainer import Trainer
from swarm.sim.links import Link
from swarm.sim.loop import run
from swarm.sim.machine import Device, Machine
from swarm.sim.scenario.churn import Change, changes
from swarm.sim.scenario.config import PeerClass, Scenario, TrainerSection, Wiring
from swarm.sim.scenario.meter import Meter, Result, traffic
from swarm.sim.scenario.moves import Mover
from swarm.sim.scenario.optimum import Optimum
from swarm.sim.scenario.wiring import WIRINGS
from swarm.sim.swarm import SimulatedSwarm

STATE_TIMEOUT_SECONDS = 1e9
"""No stage is ever left without a peer: whoever would be the last to hold its state is spared."""
SERIES_POINTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is compared."""

    wiring: Wiring = "stochastic"
    rebalancing: str = "none"
    joining: str = "least"
    move_costs: bool = True


def policies(scenario: Scenario) -> Iterator[Policy]:
    """All combinations that the scenario asks for."""
    compare = scenario.compare
    for wiring, rule, joining, costs in itertools.product(
        compare.wiring, compare.rebalancing, compare.joining, compare.move_costs
    ):
        yield Policy(wiring=wiring, rebalancing=rule, joining=joining, move_costs=costs)


def play(scenario: Scenario, policy: Policy, seed: int) -> Result:
    """One run on a virtual loop of its own; the same seed is the same run."""
    return run(Play(scenario, policy, seed).run())


class Play:
    """One run."""

    def __init__(self, scenario: Scenario, policy: Policy, seed: int) -> None:
        self.scenario = scenario
        self.policy = policy
        self.meter = Meter()
        self.classes: dict[PeerId, int] = {}
        self.optimum = Optimum([self._rates(peer_class) for peer_class in scenario.peers])
        self._seed = seed
        self._rng = Random(seed)
        self._born: dict[PeerId, float] = {}
        self._names = Counter[str]()
        self._graph_bytes = scenario.weights().boundary_bytes * max(scenario.model.layers_per_stage)

    async def run(self) -> Result:
        """Until the time is over or the steps are done."""
        started = time.perf_counter()
        scenario = self.scenario
        self.swarm = SimulatedSwarm(
            scenario.run_config(),
            weights=scenario.weights(move_costs=self.policy.move_costs),
            overheads=scenario.overhead.overheads(),
            graph_bytes=self._graph_bytes,
            limits=WAN,
            thorough=False,
        )
        self._start_all()
        trainer = self._trainer()
        node = self._trainer_node
        steps = scenario.scenario.steps or 10**9
        training = node.process.spawn(trainer.run(steps), "trainer")
        seconds = 3600.0 * scenario.scenario.hours if scenario.scenario.hours is not None else None
        background = [asyncio.create_task(task) for task in self._background(seconds or float("inf"))]
        await self._until_done(training, background, seconds)
        ended = asyncio.get_running_loop().time()
        training.cancel()
        for task in background:
            task.cancel()
        await asyncio.wait([training, *background])
        for peer in list(self.swarm.peers):
            self._lived(peer, ended)
        result = self._result(trainer, ended, time.perf_counter() - started)
        await self.swarm.close()
        failures = self.swarm.network.failures
        if self.swarm.invariants.violation is not None or failures:
            raise self.swarm.invariants.violation or failures[0]
        return result

    async def _until_done(
        self, training: asyncio.Task[None], background: list[asyncio.Task[None]], seconds: float | None
    ) -> None:
        """Or until the time is over.  Raises what any of the tasks does."""
        running: set[asyncio.Task[None]] = {training, *background}
        try:
            async with asyncio.timeout(seconds):
                while training in running:
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
        except TimeoutError:
            return

    # --- who is there -----------------------------------------------------------------

    def _start_all(self) -> None:
        counts = [peer_class.count for peer_class in self.scenario.peers]
        _, best = self.optimum.of(counts)
        for stage in range(self.scenario.model.stage_count):
            there = [(c.stages or best[i])[stage] for i, c in enumerate(self.scenario.peers)]
            if not any(count and self.optimum.rates[index][stage] for index, count in enumerate(there)):
                raise UsageError(
                    f"{self.scenario.scenario.name}: no peer has the memory for stage {stage}, which needs "
                    f"{stage_memory_bytes(self.scenario.model, stage) / 1e9:.1f} GB: add peers, or raise memory_gb"
                )
        for index, peer_class in enumerate(self.scenario.peers):
            for stage, count in enumerate(peer_class.stages or best[index]):
                for _ in range(count):
                    self.start(index, stage)

    def start(self, index: int, stage: int, peer: PeerId | None = None) -> None:
        """A new peer of a class, or a new life of one that moves."""
        peer_class = self.scenario.peers[index]
        if peer is None:
            self._names[peer_class.name] += 1
            peer = PeerId(f"{peer_class.name}-{self._names[peer_class.name]}")
        self.classes[peer] = index
        seed = f"{self._seed}/{peer}"
        work = self.scenario.model.layers_per_stage[stage]
        self.swarm.start_peer(peer, stage, machine=lambda: self._machine(peer, peer_class, seed), work=work)
        self._born.setdefault(peer, asyncio.get_running_loop().time())
        self._note_alive()

    def _machine(self, name: str, peer_class: PeerClass, seed: str) -> Machine:
        memory = None if peer_class.memory_gb is None else int(peer_class.memory_gb * 1e9)
        spared = max(stage_memory_bytes(self.scenario.model, s) for s in range(self.scenario.model.stage_count))
        return Machine(
            name=name,
            up=_link(peer_class.up_mbit),
            down=_link(peer_class.down_mbit),
            latency_seconds=peer_class.latency_ms / 1e3,
            device=Device(
                seconds_per_unit=self.scenario.layer_seconds(peer_class),
                jitter=peer_class.jitter,
                straggle_chance=peer_class.straggle_chance,
                straggle_factor=peer_class.straggle_factor,
                memory_bytes=None if memory is None else max(0, memory - spared),
                random=Random(seed),
            ),
        )

    def _rates(self, peer_class: PeerClass) -> list[float]:
        """Microbatches per second of one peer at each stage; 0 where the stage does not fit its memory."""
        model = self.scenario.model
        seconds = self.scenario.layer_seconds(peer_class) * (FORWARD_UNITS + BACKWARD_UNITS)
        memory = float("inf") if peer_class.memory_gb is None else peer_class.memory_gb * 1e9
        return [
            1 / (seconds * layers) if stage_memory_bytes(model, stage) <= memory else 0.0
            for stage, layers in enumerate(model.layers_per_stage)
        ]

    def _note_alive(self) -> None:
        counts = Counter(self.classes[peer] for peer in self.swarm.peers)
        alive = tuple(counts[index] for index in range(len(self.scenario.peers)))
        self.meter.alive.append((asyncio.get_running_loop().time(), alive))

    def _lived(self, peer: PeerId, until: float) -> None:
        name = self.scenario.peers[self.classes[peer]].name
        self.meter.lived_seconds[name] += until - self._born.pop(peer)

    # --- churn --------------------------------------------------------------------------

    def _background(self, seconds: float) -> Iterator[asyncio._CoroutineLike[None]]:
        churn = self.scenario.churn
        if churn is not None:
            counts = [peer_class.count for peer_class in self.scenario.peers]
            yield self._suffer(changes(churn, counts, min(seconds, 3600.0 * 24 * 365), self._rng))
        if self.policy.rebalancing != "none":
            yield Mover(self).run(self.policy.rebalancing)

    async def _suffer(self, coming: list[Change]) -> None:
        for change in coming:
            await asyncio.sleep(change.seconds - asyncio.get_running_loop().time())
            for _ in range(abs(change.count)):
                if change.count > 0:
                    self.start(change.peer_class, await self._joins(change.peer_class))
                else:
                    self._kill_one(change.peer_class)

    def _kill_one(self, index: int) -> None:
        candidates = [peer for peer in sorted(self.swarm.peers) if self.classes[peer] == index]
        self._rng.shuffle(candidates)
        now = asyncio.get_running_loop().time()
        victim = next((peer for peer in candidates if self.swarm.may_kill(peer)), None)
        if victim is None:
            self.meter.spared += 1
            return
        self.swarm.kill_peer(victim)
        self._lived(victim, now)
        self.meter.deaths.append(now)
        self._note_alive()

    async def _joins(self, index: int) -> int:
        stages = [stage for stage, rate in enumerate(self.optimum.rates[index]) if rate > 0]
        if self.policy.joining == "random":
            return self._rng.choice(stages)
        await asyncio.sleep(1.0)  # those who came a moment ago are seen
        at = asyncio.get_running_loop().time()
        records = [self.swarm.board.of_stage(self.swarm.config.hash, stage, at) for stage in stages]
        return stages[choose_stage(records, str(self._names))[0]]

    # --- the trainer --------------------------------------------------------------------

    def _trainer(self) -> Trainer:
        section = self.scenario.trainer
        self._trainer_node = self.swarm.trainer_node("trainer", lambda: _trainer_machine(section))

        def committed(commit: CommitRecord) -> None:
            self.meter.commits.append((asyncio.get_running_loop().time(), len(commit.microbatches)))

        first = Counter(life.peer.seat.stage for life in self.swarm.peers.values())
        return self.swarm.make_trainer(
            "trainer",
            STATE_TIMEOUT_SECONDS,
            node=self._trainer_node,
            routing=WIRINGS[self.policy.wiring],
            window=section.window,
            on_step=committed,
            first_peers=[first[stage] for stage in range(self.scenario.model.stage_count)],
        )

    # --- the end ------------------------------------------------------------------------

    def _result(self, trainer: Trainer, ended: float, real_seconds: float) -> Result:
        meter, counts = self.meter, trainer.progress.counts
        began = meter.commits[0][0] - trainer.progress.step_seconds[0] if meter.commits else ended
        meter.commits.insert(0, (began, 0))
        seconds = max(1e-9, (meter.commits[-1][0] if self.scenario.scenario.steps else ended) - began)
        microbatches = sum(count for _, count in meter.commits)
        end = began + seconds
        needed = microbatches * (FORWARD_UNITS + BACKWARD_UNITS) * self.scenario.model.layers
        busy, done = defaultdict[str, float](float), 0.0
        for peer, index in self.classes.items():
            device = self.swarm.network.machines[peer].device
            busy[self.scenario.peers[index].name] += device.busy_seconds
            done += device.busy_seconds / device.seconds_per_unit
        machines = [self.swarm.network.machines[peer] for peer in self.classes]
        return Result(
            policy={
                "wiring": self.policy.wiring,
                "rebalancing": self.policy.rebalancing,
                "joining": self.policy.joining,
                "move costs": "on" if self.policy.move_costs else "off",
            },
            seed=self._seed,
            seconds=seconds,
            real_seconds=real_seconds,
            peers=len(self.swarm.peers),
            steps=len(meter.commits) - 1,
            microbatches=microbatches,
            microbatches_per_second=microbatches / seconds,
            optimum_per_second=self._best(began, end) / seconds,
            fraction=self._fraction(began, end),
            fraction_first_hour=self._fraction(began, min(end, began + 3600.0)),
            fraction_last_hour=self._fraction(max(began, end - 3600.0), end),
            utilisation={name: busy[name] / max(1.0, lived) for name, lived in meter.lived_seconds.items()},
            useful=needed / max(1e-9, done),
            repaired=counts.repaired,
            retried=counts.retried,
            recomputed=self.swarm.recomputed,
            moves=len(meter.moves),
            deaths=len(meter.deaths),
            spared=meter.spared,
            recovery_seconds=self._recovery(trainer.progress.step_seconds),
            bytes_by_role={
                "trainer": traffic([self._trainer_node.machine], seconds),
                "peer": traffic(machines, seconds),
                "dht": {
                    "read by the trainer": self.swarm.board.read_bytes["trainer"] / seconds,
                    "read by a peer": sum(self.swarm.board.read_bytes[m.name] for m in machines)
                    / seconds
                    / max(1, len(machines)),
                },
            },
            calls=sum(self.swarm.network.calls.values()),
            series=list(self._series(began, end)),
            step_seconds=[trainer.progress.step_seconds[step] for step in sorted(trainer.progress.step_seconds)],
        )

    def _best(self, start: float, end: float) -> float:
        """Microbatches that the best assignment of whoever was alive could have done in a span."""
        total = 0.0
        times = [at for at, _ in self.meter.alive[1:]] + [float("inf")]
        for (at, counts), until in zip(self.meter.alive, times, strict=True):
            inside = min(end, until) - max(start, at)
            if inside > 0:
                total += inside * self.optimum.of(counts)[0]
        return total

    def _fraction(self, start: float, end: float) -> float:
        best = self._best(start, end)
        return self.meter.microbatches(start, end) / best if best > 0 else 0.0

    def _series(self, start: float, end: float) -> Iterator[tuple[float, float, float]]:
        width = (end - start) / SERIES_POINTS
        for index in range(SERIES_POINTS):
            left = start + index * width
            done, best = self.meter.microbatches(left, left + width), self._best(left, left + width)
            yield (left + width - start) / 3600.0, done / width, best / width

    def _recovery(self, step_seconds: dict[int, float]) -> float:
        """How much longer steps with deaths took than those without."""
        times = [at for at, _ in self.meter.commits]
        hit, calm = list[float](), list[float]()
        for step, (start, end) in enumerate(itertools.pairwise(times)):
            died = any(start <= at < end for at in self.meter.deaths)
            (hit if died else calm).append(step_seconds[step])
        return statistics.mean(hit) - statistics.median(calm) if hit and calm else 0.0


def _link(mbit: float | None) -> Link:
    return Link(None if mbit is None else mbit * 1e6 / 8)


def _trainer_machine(section: TrainerSection) -> Machine:
    return Machine(
        name="trainer",
        up=_link(section.up_mbit),
        down=_link(section.down_mbit),
        latency_seconds=section.latency_ms / 1e3,
    )
