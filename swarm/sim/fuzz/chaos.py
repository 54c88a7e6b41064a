"""Makes a schedule's faults happen: the weather of its calls, and the misfortunes of its processes."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from random import Random

from swarm.ids import Digest, PeerId
from swarm.policy.deadlines import LAN
from swarm.records import PeerRecord, PeerState
from swarm.sim.fuzz.operator import Operator
from swarm.sim.fuzz.schedule import MESSAGES, Fault, Kind, Schedule
from swarm.sim.lives import LivePeer
from swarm.sim.loop import Process, world_later, world_seconds
from swarm.sim.machine import Device
from swarm.sim.network import Cut, Node
from swarm.sim.swarm import SimulatedSwarm
from swarm.sim.weather import FAIR, Call, Fate

FAULTS_END_SECONDS = 40.0
"""Virtual time after which nothing fails any more; what has begun lasts for 12 s at most."""
OVERDUE_SECONDS = LAN.call_floor_seconds
"""Nobody waits less for an answer."""
BAD_RECORD_SECONDS = 1e-6, 1e6
"""Speeds that no peer has."""


class Chaos:
    """Implements :class:`swarm.sim.weather.Weather` for one run of a schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.happened: Counter[tuple[str, Kind]] = Counter()
        """Faults that took place: a death that the swarm could not survive does not."""
        self._schedule = schedule
        self._rng = Random(schedule.seed)
        self._due: dict[tuple[str, int], list[Fault]] = defaultdict(list)
        self._counts: Counter[str] = Counter()
        self._messages: dict[str, deque[Fault]] = defaultdict(deque)
        """What will happen to the next calls at a point, or to and from a machine."""
        self._loses: Counter[PeerId] = Counter()
        self._stages: dict[PeerId, int] = {}
        self._slowed: list[Device] = []
        self._joiners = 0
        for fault in schedule.faults:
            self._due[fault.point, fault.nth].append(fault)

    def attach(self, swarm: SimulatedSwarm, operator: Operator) -> None:
        """Start the schedule's peers, and watch all that is not a call."""
        self.swarm, self.operator = swarm, operator
        swarm.meetings.loses = self._loses_result
        swarm.meetings.joined.append(lambda node: self._occurs("all-reduce", node))
        swarm.board.observers.append(self._directory_used)
        for stage, count in enumerate(self._schedule.peers):
            for index in range(count):
                self._start(f"p{stage}{index}", stage)

    # --- points -------------------------------------------------------------------------

    def fate(self, call: Call) -> Fate:
        """Count both points of the call now; what is due there happens as the request arrives or the answer leaves."""
        asked, asked_faults = self._count(f"{call.kind} asked")
        answered, answered_faults = self._count(f"{call.kind} answered")
        messages = [(True, fault) for fault in self._take(asked, call, asked_faults)]
        messages += [(False, fault) for fault in self._take(answered, call, answered_faults)]
        if not messages and not asked_faults and not answered_faults:
            return FAIR
        node = self.swarm.network.nodes.get(call.to.endpoint)
        at_answer = [fault for request, fault in messages if not request]
        for fault in (fault for request, fault in messages if request):
            self._count_message(fault, call.to.peer)

        def on_reply() -> None:
            for fault in at_answer:
                self._count_message(fault, call.to.peer)
            self._happen_all(answered_faults, node)

        fate = Fate(on_request=lambda: self._happen_all(asked_faults, node), on_reply=on_reply)
        for request, fault in messages:
            fate = _spoil(fate, fault, request)
        return fate

    def _count_message(self, fault: Fault, victim: str) -> None:
        self.happened[fault.point, fault.kind] += 1
        self._note(fault, victim)

    def _count(self, point: str) -> tuple[str, list[Fault]]:
        self._counts[point] += 1
        if world_seconds() > FAULTS_END_SECONDS:
            return point, []
        return point, self._due.get((point, self._counts[point]), [])

    def _take(self, point: str, call: Call, due: list[Fault]) -> list[Fault]:
        """Message faults for this call: those due here, those that are to follow, those meant for its processes."""
        for fault in due:
            if fault.kind in MESSAGES:
                self._messages[point].extend([fault] * fault.amount)
        found = []
        for place in (point, call.caller, call.to.peer):
            if self._messages.get(place):
                found.append(self._messages[place].popleft())
        return found if world_seconds() <= FAULTS_END_SECONDS else []

    def _happen_all(self, faults: list[Fault], node: Node | None) -> None:
        for fault in faults:
            if fault.kind not in MESSAGES:
                self._happen(fault, node)

    def _directory_used(self, operation: str, node: Node) -> None:
        point = {"announce": "announce", "peers": "lookup", "renew_lead": "lease"}.get(operation)
        if point is not None:
            self._occurs(point, node)

    def _occurs(self, point: str, node: Node) -> None:
        """A point that is no call."""
        for fault in self._count(point)[1]:
            if fault.kind in MESSAGES:
                self._messages[node.machine.name].append(fault)
            else:
                self._happen(fault, node)

    # --- faults -------------------------------------------------------------------------

    def _happen(self, fault: Fault, node: Node | None) -> None:
        life = self._victim(fault, node)
        if life is not None and self._strike(fault, life):
            self.happened[fault.point, fault.kind] += 1
            self._note(fault, life.node.machine.name)

    def _victim(self, fault: Fault, node: Node | None) -> LivePeer | None:
        if node is not None and node.contact is not None:
            life = self.swarm.peers.get(node.contact.peer)
            return life if life is not None and life.node is node else None
        living = sorted(self.swarm.peers)
        return self.swarm.peers[living[fault.amount % len(living)]] if living else None

    def _strike(self, fault: Fault, life: LivePeer) -> bool:
        """Make it happen; False if it cannot here."""
        peer = PeerId(life.node.machine.name)
        act: dict[Kind, Callable[[], bool]] = {
            Kind.KILL: lambda: self._die(fault, peer, back=False),
            Kind.RESTART: lambda: self._die(fault, peer),
            Kind.VANISH: lambda: self._die(fault, peer, silently=True),
            Kind.PAUSE: lambda: self._pause(life.node.process, fault.seconds),
            Kind.SLOW: lambda: self._slow(fault, life),
            Kind.CUT: lambda: self._cut(fault, Cut(machines=frozenset({peer}))),
            Kind.HALF_OPEN: lambda: self._cut(
                fault, Cut(machines=frozenset({peer}), inward=fault.amount % 2 == 0, outward=fault.amount % 2 == 1)
            ),
            Kind.BAD_RECORD: lambda: self._bad_record(fault, life),
            Kind.NAN: lambda: self._nan(fault, life),
            Kind.BROKEN: lambda: self._breaks(life),
            Kind.LOST_RESULT: lambda: self._will_lose(peer),
            Kind.CLOCK: lambda: self._jump(fault, life.node.process),
            Kind.JOIN: lambda: self._join(fault, life.peer.seat.stage),
            Kind.TRAINER_RESTART: lambda: self.operator.restart(fault.seconds, forgets=False),
            Kind.TRAINER_LOSS: lambda: self.operator.restart(fault.seconds, forgets=True),
            Kind.TRAINER_PAUSE: lambda: self._pause(self.operator.process, fault.seconds),
            Kind.SECOND_TRAINER: self.operator.start_second,
        }
        return act[fault.kind]()

    def _start(self, name: str, stage: int) -> None:
        rates = self._schedule.clock_rates
        rate = rates[len(self._stages) % len(rates)]
        peer = self.swarm.start_peer(name, stage, self._rng.choice([0.5, 1.0, 4.0]), clock_rate=rate)
        self._stages[peer] = stage

    def _die(self, fault: Fault, peer: PeerId, *, back: bool = True, silently: bool = False) -> bool:
        if not self.swarm.may_kill(peer):
            return False
        self.swarm.kill_peer(peer, silently=silently)
        if back:
            world_later(fault.seconds, lambda: self._start(peer, self._stages[peer]))
        return True

    def _pause(self, process: Process | None, seconds: float) -> bool:
        if process is None or process.paused:
            return False
        process.pause()
        world_later(seconds, process.resume)
        return True

    def _slow(self, fault: Fault, life: LivePeer) -> bool:
        device, before = life.node.machine.device, life.node.machine.device.slowness
        if device in self._slowed:
            return False
        self._slowed.append(device)
        device.slowness = before * (1 + 2 * fault.amount)

        def end() -> None:
            self._slowed.remove(device)
            device.slowness = before

        world_later(fault.seconds, end)
        return True

    def _cut(self, fault: Fault, cut: Cut) -> bool:
        self.swarm.network.cut(cut, fault.seconds)
        return True

    def _bad_record(self, fault: Fault, life: LivePeer) -> bool:
        record = life.peer.record()
        if fault.amount == 1:
            self.swarm.board.damage(record.run, record.stage, record.peer, fault.seconds)
        else:
            self.swarm.board.write(_wrong(record, fault.amount), 0.0, fault.seconds)
        return True

    def _nan(self, fault: Fault, life: LivePeer) -> bool:
        if fault.amount == 4 and life.module.added:
            life.module.spoil()
        else:
            life.module.sick_next += min(fault.amount, 2)
        return True

    def _breaks(self, life: LivePeer) -> bool:
        life.module.breaks_next += 1
        return True

    def _will_lose(self, peer: PeerId) -> bool:
        self._loses[peer] += 1
        return True

    def _loses_result(self, peer: PeerId) -> bool:
        loses = self._loses[peer] > 0
        self._loses[peer] -= loses
        return loses

    def _jump(self, fault: Fault, process: Process) -> bool:
        process.jump(fault.seconds)
        return True

    def _join(self, fault: Fault, stage: int) -> bool:
        self._joiners += 1
        name = f"joiner{self._joiners}"
        world_later(fault.seconds, lambda: self._start(name, stage))
        return True

    def _note(self, fault: Fault, victim: str) -> None:
        self.swarm.journal.record("fault", what=str(fault), victim=victim)


def _spoil(fate: Fate, fault: Fault, request: bool) -> Fate:
    """The fate with one more thing that happens to its request, or to its answer."""
    if fault.kind is Kind.LOSE:
        return replace(fate, lose_request=True) if request else replace(fate, lose_reply=True)
    if fault.kind is Kind.RESET:
        return replace(fate, reset_request=True) if request else replace(fate, reset_reply=True)
    if fault.kind is Kind.DELAY:
        return replace(fate, request_seconds=fault.seconds) if request else replace(fate, reply_seconds=fault.seconds)
    if fault.amount % 2 and request:
        return replace(fate, repeat=True)
    # Held up on the way with others, which all arrive together; or the caller gives up, and then it arrives after all.
    together = fault.seconds - world_seconds() % fault.seconds
    overdue = fault.amount == 4 and request
    return replace(fate, late_copy_seconds=together + OVERDUE_SECONDS * overdue, lose_request=overdue)


def _wrong(record: PeerRecord, variant: int) -> PeerRecord:
    """What a peer with a fault of its own might sign."""
    if variant == 2:
        return replace(record, endpoint="nowhere:1")
    if variant == 3:
        return replace(record, forward_seconds=BAD_RECORD_SECONDS[record.stage % 2], queue=10**6)
    lineage = replace(record.lineage, length=record.lineage.length + 1, chain=Digest(record.lineage.chain[::-1]))
    return replace(record, lineage=lineage, state=PeerState.READY)
