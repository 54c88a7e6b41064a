"""Whoever starts trainers, and starts them again: the run must end under one of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from swarm.errors import Superseded
from swarm.sim.lives import MemoryLog
from swarm.sim.loop import Process, world_later
from swarm.sim.network import Node
from swarm.sim.swarm import SimulatedSwarm

RESTARTS = 3
"""Times that the last trainer is started again because a term higher than its own turned up, beyond those that faults
cause."""
STATE_TIMEOUT_SECONDS = 1e4
"""In these runs no state is ever lost: whoever waits for it must get it."""


@dataclass(slots=True, eq=False)
class Training:
    """One life of a trainer."""

    name: str
    log: MemoryLog
    node: Node
    task: asyncio.Task[None]


class Operator:
    """Runs trainers until one has finished."""

    def __init__(self, swarm: SimulatedSwarm, steps: int, *, sees_lead: bool) -> None:
        self._swarm = swarm
        self._steps = steps
        self._sees_lead = sees_lead
        self._names = 0
        self._restarts = RESTARTS
        self._lives: list[Training] = []
        self._changed = asyncio.Event()
        self._coming = 0

    @property
    def process(self) -> Process | None:
        """Of the trainer that was started last."""
        return self._lives[-1].node.process if self._lives else None

    def start(self, name: str, log: MemoryLog) -> None:
        """A new life of a trainer."""
        node = self._swarm.trainer_node(name)
        trainer = self._swarm.make_trainer(
            name, STATE_TIMEOUT_SECONDS, MemoryLog(list(log.commits)), self._sees_lead, node=node
        )
        self._lives.append(Training(name, self._swarm.log, node, node.process.spawn(trainer.run(self._steps), name)))
        self._changed.set()

    def restart(self, seconds: float, *, forgets: bool) -> bool:
        """Kill the trainer that was started last; it starts again after a while, with its log or without."""
        life = self._lives[-1]
        if life.task.done() or self._coming:
            return False
        life.task.cancel()
        life.node.process.resume()
        self._swarm.network.leave(life.node)
        self._restarts += 1
        self._coming += 1

        def back() -> None:
            self._coming -= 1
            self.start(life.name, MemoryLog() if forgets else life.log)

        world_later(seconds, back)
        return True

    def start_second(self) -> bool:
        """Another trainer, which begins with a copy of the log, while the first goes on."""
        self._names += 1
        self._restarts += 1
        self.start(f"trainer{self._names}", self._lives[-1].log)
        return True

    async def run(self) -> None:
        """Until one life has committed all steps; its log is the swarm's.  Raises what a trainer failed of."""
        self.start("trainer", MemoryLog())
        while True:
            self._changed.clear()
            running = [life.task for life in self._lives if not life.task.done()]
            change = asyncio.create_task(self._changed.wait())
            await asyncio.wait([*running, change], return_when=asyncio.FIRST_COMPLETED)
            change.cancel()
            for life in self._lives:
                if life.task.done() and not life.task.cancelled() and not superseded(life.task):
                    life.task.result()
                    self._swarm.log = life.log
                    return
            if not self._coming and all(life.task.done() for life in self._lives):
                self._restarts -= 1
                if self._restarts < 0:
                    raise AssertionError("every trainer was superseded, and the last one by nobody who lives")
                self.start(self._lives[-1].name, self._lives[-1].log)

    async def stop(self) -> None:
        """Whoever still runs has been superseded, or will be."""
        for life in self._lives:
            life.node.process.resume()
            life.task.cancel()
        if self._lives:
            await asyncio.wait([life.task for life in self._lives])


def superseded(task: asyncio.Task[Any]) -> bool:
    """It ended, and of nothing but that another trainer leads."""
    error = None if task.cancelled() else task.exception()
    if isinstance(error, ExceptionGroup):
        return error.split(Superseded)[1] is None
    return isinstance(error, Superseded)
