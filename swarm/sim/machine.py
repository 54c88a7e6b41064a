"""A machine of the simulated world: its connection to the others, and its device."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import greenlet

from swarm.sim.links import Link


@dataclass(slots=True, kw_only=True, eq=False)
class Device:
    """What computes.  Work is counted in units: a forward of one microbatch at one stage is 1."""

    seconds_per_unit: float = 0.1
    slowness: float = 1.0
    """Multiplies every job's time; a fault may change it."""
    jitter: float = 0.0
    """Standard deviation of the logarithm of a job's time."""
    straggle_chance: float = 0.0
    """That a job takes ``straggle_factor`` times as long."""
    straggle_factor: float = 10.0
    memory_bytes: int | None = None
    """For graphs that are kept for the backward; none: without limit."""
    random: Random = field(default_factory=lambda: Random(0))
    busy_seconds: float = 0.0
    """Spent in jobs so far."""

    def compute(self, units: float) -> None:
        """Take the time of ``units`` of work.  Inside a job only; elsewhere it takes none."""
        seconds = units * self.seconds_per_unit * self.slowness
        if self.jitter:
            seconds *= math.exp(self.random.gauss(0.0, self.jitter))
        if self.straggle_chance and self.random.random() < self.straggle_chance:
            seconds *= self.straggle_factor
        executor = greenlet.getcurrent().parent
        if executor is not None and seconds > 0:
            executor.switch(seconds)
            self.busy_seconds += seconds


@dataclass(slots=True, kw_only=True, eq=False)
class Machine:
    """Where a process runs.  It outlives the process: a peer that starts again has the same device and connection."""

    name: str
    up: Link = field(default_factory=Link)
    down: Link = field(default_factory=Link)
    latency_seconds: float = 0.0025
    """One way, to the middle of the network; between two machines it takes the sum of both."""
    device: Device = field(default_factory=Device)
    sent_bytes: Counter[str] = field(default_factory=Counter)
    """By kind of call, requests and answers alike."""
    received_bytes: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    """Made from here, by kind."""
