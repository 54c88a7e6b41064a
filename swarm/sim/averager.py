"""An all-reduce in memory: the group meets, its bytes take their time, each member learns the sum or whom it missed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.errors import NotFinite, ReduceFailed
from swarm.ids import PeerId
from swarm.messages import GroupMember, ReduceRequest, StepKey
from swarm.sim.arithmetic import ZERO, add, mean
from swarm.sim.links import carry
from swarm.sim.network import Network, Node

MEETING_SECONDS = 3.0
"""How long a member waits for others that do nothing."""
LOOK_SECONDS = 0.5
"""Between two looks at whether those that are missing still live."""


@dataclass(slots=True)
class Meeting:
    """One attempt of one group."""

    parts: dict[PeerId, tuple[Sequence[int], int]] = field(default_factory=dict)
    nodes: dict[PeerId, Node] = field(default_factory=dict)
    through: set[PeerId] = field(default_factory=set)
    """Members whose bytes have all gone out and come in."""
    left: set[PeerId] = field(default_factory=set)
    """Members that gave up before they were through.  They live, so nobody names them."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def notify(self) -> None:
        """Wake whoever waits for a change."""
        self.changed.set()
        self.changed = asyncio.Event()


Group = tuple[StepKey, int, tuple[GroupMember, ...], int]


class Meetings:
    """All groups that meet, and the decision whether a member loses the result on the way."""

    def __init__(self) -> None:
        self.open: dict[Group, Meeting] = {}
        self.loses: Callable[[PeerId], bool] = lambda peer: False
        self.joined: list[Callable[[Node], None]] = []
        """Called when a member has come to its meeting."""

    def begin(self, request: ReduceRequest) -> Meeting:
        """The meeting of this request; those of earlier steps are forgotten."""
        key = request.key
        for other in [g for g in self.open if g[0].stage == key.stage and g[0].step < key.step - 1]:
            del self.open[other]
        return self.open.setdefault((key, request.attempt, request.members, request.total_tokens), Meeting())


class SimulatedAverager:
    """Implements :class:`swarm.ports.Averager` for :class:`swarm.sim.numeric.NumericStage`."""

    def __init__(self, meetings: Meetings, network: Network, node: Node) -> None:
        self._meetings = meetings
        self._network = network
        self._node = node

    async def reduce(self, request: ReduceRequest, gradient_sum: Any) -> Any:
        for observer in self._meetings.joined:
            observer(self._node)
        mine = next((m for m in request.members if m.contact == self._node.contact), None)
        peers, counts = [m.contact.peer for m in request.members], [m.tokens for m in request.members]
        if mine is None or len(set(peers)) != len(peers):
            raise ReduceFailed("this peer is not (once) in the group")
        if min(counts) < 0 or sum(counts) != request.total_tokens or request.total_tokens < 1:
            raise ReduceFailed(f"the members' tokens {counts} do not add up to {request.total_tokens}")
        if mine.tokens > 0 and any(math.isnan(value) for value in gradient_sum):
            raise NotFinite("gradient")
        before = tuple(gradient_sum)
        meeting = self._meetings.begin(request)
        me = mine.contact.peer
        if me in meeting.parts:
            raise ReduceFailed("this attempt at the all-reduce was made already")
        meeting.parts[me] = (gradient_sum, mine.tokens)
        meeting.nodes[me] = self._node
        meeting.notify()
        try:
            async with asyncio.timeout(request.deadline_seconds):
                await self._meet(meeting, request, me)
        except TimeoutError:
            raise ReduceFailed(f"not done within {request.deadline_seconds:g} s") from None
        finally:
            meeting.parts[me] = (tuple(gradient_sum), mine.tokens)  # the sum itself is not read any more
            if me not in meeting.through and self._node.alive:
                meeting.left.add(me)
                meeting.notify()
        if mine.tokens > 0 and _changed(before, gradient_sum):
            self._network.failures.append(AssertionError(f"the sum of {me} changed while it was being averaged"))
        if self._meetings.loses(me):
            raise ReduceFailed("the result was lost on the way")
        total, weight = ZERO, 0
        for member in request.members:
            part, tokens = meeting.parts[member.contact.peer]
            total, weight = add(total, tuple(part)) if tokens else total, weight + tokens
        if weight != request.total_tokens:
            raise ReduceFailed(f"a part has weight {weight}, not {request.total_tokens}")
        return mean(total, weight)

    async def _meet(self, meeting: Meeting, request: ReduceRequest, me: PeerId) -> None:
        """Raises ReduceFailed if somebody does not come, or leaves."""
        everybody = {m.contact.peer for m in request.members}
        # As the real one: a member that waits for the others' deadline would be too late to tell whom it missed.
        seconds = min(MEETING_SECONDS, request.deadline_seconds / 3)
        await self._until(seconds, meeting, lambda: self._missing(meeting, everybody, set(meeting.parts)))
        await self._exchange(request)
        meeting.through.add(me)
        meeting.notify()
        await self._until(seconds, meeting, lambda: self._missing(meeting, everybody, meeting.through), patient=True)

    def _missing(self, meeting: Meeting, everybody: set[PeerId], there: set[PeerId]) -> set[PeerId]:
        """Members that are not there, or from whom nothing comes."""
        return {peer for peer in everybody if peer not in there or self._unreachable(meeting, peer)}

    def _unreachable(self, meeting: Meeting, peer: PeerId) -> bool:
        node = meeting.nodes.get(peer)
        if node is None or node is self._node or peer in meeting.left:
            return node is not self._node
        own, other = self._node.machine.name, node.machine.name
        return not node.alive or self._network.blocked(own, other) or self._network.blocked(other, own)

    async def _until(
        self, seconds: float, meeting: Meeting, missing: Callable[[], set[PeerId]], *, patient: bool = False
    ) -> None:
        """Wait until nobody is missing.

        Raises ReduceFailed once somebody has been for ``seconds``; ``patient``: those that are still sending,
        however slowly, may take longer.
        """
        loop = asyncio.get_running_loop()
        since = loop.time()
        while gone := missing():
            if patient and not any(self._unreachable(meeting, peer) for peer in gone):
                since = loop.time()
            if loop.time() - since >= seconds:
                raise ReduceFailed("members did not come, or left", unreachable=tuple(sorted(gone - meeting.left)))
            try:
                async with asyncio.timeout(min(LOOK_SECONDS, seconds)):
                    await meeting.changed.wait()
            except TimeoutError:
                continue

    async def _exchange(self, request: ReduceRequest) -> None:
        """Butterfly: every member sends each other its part of the sum, and then the part that it averaged."""
        machine, others = self._node.machine, len(request.members) - 1
        nbytes = int(2 * self._network.weights.gradient(request.key.stage) * others / (others + 1))
        machine.sent_bytes["all-reduce"] += nbytes
        machine.received_bytes["all-reduce"] += nbytes
        overheads = self._network.overheads
        if overheads.reduce_over_links and others:
            await carry(nbytes, machine.up, machine.down)
            await asyncio.sleep(4 * machine.latency_seconds)
        await asyncio.sleep(overheads.reduce_seconds)


def _changed(before: Sequence[float], after: Sequence[float]) -> bool:
    """Something was added or dropped meanwhile.  What a fault of the device leaves, not finite, is another thing."""
    return any(old != new and not math.isnan(new) for old, new in zip(before, after, strict=True))
