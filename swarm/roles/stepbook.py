"""What one peer holds for one step: its half of 'exactly once'.

Plain bookkeeping, owned by the compute thread: every method is called there, so that a check and the addition that
it allows are one action.
"""

from __future__ import annotations

from swarm.errors import BadRequest, Frozen, Voided
from swarm.ids import MicrobatchId
from swarm.messages import HeldMicrobatch, MicrobatchCall, ReducedMark, StepKey

OPEN = -1
"""``frozen_attempt`` of a book that was never closed."""


class StepBook:
    """The gradient of one step, on one lead's word: which microbatches are in it, and which may still come."""

    def __init__(self, key: StepKey) -> None:
        self.key = key
        self.held: dict[MicrobatchId, HeldMicrobatch] = {}
        self.frozen_attempt = OPEN
        self.reduced: ReducedMark | None = None
        self._least_try: dict[MicrobatchId, int] = {}

    def holds(self, call: MicrobatchCall) -> bool:
        """True if the microbatch is in the gradient already; False if ``call`` may add it.

        Raises Frozen (sent in an attempt that is closed) or Voided (a higher try exists).
        """
        if call.microbatch in self.held:
            return True
        if call.attempt <= self.frozen_attempt:
            raise Frozen(f"step {self.key.step} is closed for attempt {call.attempt}")
        if call.try_number < self._least_try.get(call.microbatch, 0):
            raise Voided(f"try {call.try_number} of microbatch {call.microbatch} was voided")
        return False

    def add(self, call: MicrobatchCall, tokens: int, samples: int) -> None:
        """Enter a microbatch whose gradient was just added."""
        if self.holds(call):
            raise AssertionError(f"microbatch {call.microbatch} added twice")
        self.held[call.microbatch] = HeldMicrobatch(
            microbatch=call.microbatch, try_number=call.try_number, tokens=tokens, samples=samples
        )

    def void(self, microbatch: MicrobatchId, below_try: int) -> bool:
        """Refuse lower tries from now on; True if one is held already (it stays)."""
        self._least_try[microbatch] = max(below_try, self._least_try.get(microbatch, 0))
        held = self.held.get(microbatch)
        return held is not None and held.try_number < below_try

    def freeze(self, attempt: int) -> tuple[HeldMicrobatch, ...]:
        """Close the step for ``attempt`` and all before; what is held, in order of id.  Repeatable."""
        self.frozen_attempt = max(self.frozen_attempt, attempt)
        return tuple(self.held[m] for m in sorted(self.held))

    def drop(self, attempt: int) -> None:
        """Forget everything held (the gradient is dropped by the caller); closes ``attempt`` as well.

        Raises Frozen if a later attempt was closed: what is held may be under way to an average.
        """
        if attempt < self.frozen_attempt:
            raise Frozen(f"attempt {attempt} is over, {self.frozen_attempt} was closed")
        self.freeze(attempt)
        self.held.clear()

    def contribute(self, attempt: int, microbatches: tuple[MicrobatchId, ...], tokens: int) -> bool:
        """Check what the lead counts on from this peer.  True: the gradient must be dropped first (weight 0).

        Raises Frozen if the book was closed for a later attempt, BadRequest if it holds something else.
        """
        if attempt < self.frozen_attempt:
            raise Frozen(f"attempt {attempt} is over, {self.frozen_attempt} was closed")
        self.freeze(attempt)
        if not microbatches:
            return bool(self.held)
        held_tokens = sum(h.tokens for h in self.held.values())
        if set(microbatches) != set(self.held) or tokens != held_tokens:
            raise BadRequest(f"holds {sorted(self.held)} ({held_tokens} tokens), not {sorted(microbatches)} ({tokens})")
        return False

    @property
    def samples(self) -> int:
        """Sequences in the gradient."""
        return sum(h.samples for h in self.held.values())
