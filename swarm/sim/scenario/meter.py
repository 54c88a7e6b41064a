"""What one simulated run has done: measured while it goes on, summed up at its end."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from swarm.sim.machine import Machine


@dataclass(slots=True)
class Meter:
    """Events with their virtual seconds."""

    commits: list[tuple[float, int]] = field(default_factory=list)
    """When each step was committed, and its microbatches."""
    alive: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    """From when on how many peers of each class were alive."""
    deaths: list[float] = field(default_factory=list)
    moves: list[tuple[float, str]] = field(default_factory=list)
    spared: int = 0
    """Deaths that did not happen: the peer was the last that held its stage's state."""
    lived_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Of all peers of a class together."""

    def microbatches(self, start: float, end: float) -> float:
        """Committed in a span of time; of a step that is partly in it, the part."""
        total, began = 0.0, 0.0
        for at, count in self.commits:
            inside = max(0.0, min(end, at) - max(start, began))
            total += count * inside / (at - began) if at > began else 0.0
            began = at
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run under one combination of policies.  Fractions are of what the best assignment could do."""

    policy: dict[str, str]
    seed: int
    seconds: float
    """Virtual, from the first step's begin to the end."""
    real_seconds: float
    peers: int
    """At the end."""
    steps: int
    microbatches: int
    microbatches_per_second: float
    optimum_per_second: float
    fraction: float
    fraction_first_hour: float
    fraction_last_hour: float
    utilisation: dict[str, float]
    """By class: share of its lifetime that the device computed."""
    useful: float
    """Share of all computing that is in a commit: the rest was lost or done again."""
    repaired: int
    retried: int
    recomputed: int
    moves: int
    deaths: int
    spared: int
    recovery_seconds: float
    """By which a step in which peers died took longer than the median of the others."""
    bytes_by_role: dict[str, dict[str, float]]
    """Per virtual second: of the trainer and of a peer on average, by kind of call; of the DHT, records read."""
    calls: int
    series: list[tuple[float, float, float]]
    """Hours, microbatches per second since the last point, optimum meanwhile."""
    step_seconds: list[float]


def traffic(machines: list[Machine], seconds: float) -> dict[str, float]:
    """Bytes per second sent and received by kind, averaged over machines."""
    total: Counter[str] = Counter()
    for machine in machines:
        total += Counter({f"sent {kind}": value for kind, value in machine.sent_bytes.items()})
        total += Counter({f"received {kind}": value for kind, value in machine.received_bytes.items()})
    share = max(1, len(machines)) * max(1e-9, seconds)
    return {kind: value / share for kind, value in sorted(total.items())}
