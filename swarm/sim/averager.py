"""An all-reduce in memory: the group meets, and each member gets the sum, or learns whom it missed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.errors import ReduceFailed
from swarm.ids import PeerId
from swarm.messages import Contact, ReduceRequest
from swarm.sim.numeric import ZERO, add, mean

MEETING_SECONDS = 3.0
"""How long a member waits for the others."""


@dataclass(slots=True)
class Meeting:
    """One attempt of one group."""

    parts: dict[PeerId, tuple[Sequence[int], int]] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)


class Meetings:
    """All groups that meet, and the decision whether a member loses the result on the way."""

    def __init__(self) -> None:
        self.open: dict[ReduceRequest, Meeting] = {}
        self.loses: Callable[[PeerId], bool] = lambda peer: False


class SimulatedAverager:
    """Implements :class:`swarm.ports.Averager` for :class:`swarm.sim.numeric.NumericStage`."""

    def __init__(self, meetings: Meetings, contact: Contact) -> None:
        self._meetings = meetings
        self._contact = contact

    async def reduce(self, request: ReduceRequest, gradient_sum: Any) -> Any:
        meeting = self._meetings.open.setdefault(request, Meeting())
        mine = next(m for m in request.members if m.contact == self._contact)
        meeting.parts[self._contact.peer] = (gradient_sum, mine.tokens)
        everybody = {m.contact.peer for m in request.members}
        if set(meeting.parts) == everybody:
            meeting.complete.set()
        try:
            async with asyncio.timeout(MEETING_SECONDS):
                await meeting.complete.wait()
                await asyncio.sleep(0.05)
        except TimeoutError:
            missed = tuple(sorted(everybody - set(meeting.parts)))
            raise ReduceFailed("members did not come", unreachable=missed) from None
        if self._meetings.loses(self._contact.peer):
            raise ReduceFailed("the result was lost on the way")
        total, weight = ZERO, 0
        for member in request.members:
            part, tokens = meeting.parts[member.contact.peer]
            total, weight = add(total, tuple(part)), weight + tokens
        if weight != request.total_tokens:
            raise ReduceFailed(f"a part has weight {weight}, not {request.total_tokens}")
        return mean(total, weight)
