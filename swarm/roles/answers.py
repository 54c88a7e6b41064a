"""What peers answer to a microbatch's calls, before anything is made of it."""

from __future__ import annotations

from collections.abc import Callable

from swarm.errors import BadReply
from swarm.messages import BackwardReply
from swarm.roles.ledger import Passage
from swarm.tensors import TensorData, TensorSpec

Boundary = Callable[[TensorSpec], TensorSpec]
"""From the form of the token ids to that of what travels between stages."""


class Answers:
    """Raises BadReply here, or the next stage's peers would be blamed for what this one sent."""

    def __init__(self, stages: int, boundary: Boundary) -> None:
        self._last_stage = stages - 1
        self._boundary = boundary

    def check_output(self, passage: Passage, output: TensorData) -> None:
        """Of a forward."""
        expected = self._boundary(passage.inputs[0].spec)
        if output.spec != expected:
            raise BadReply(f"an output of {output.spec}, not {expected}")

    def check_reply(self, passage: Passage, stage: int, reply: BackwardReply, accumulate: bool) -> None:
        """Of a backward."""
        gradient = reply.input_gradient
        expected = self._boundary(passage.inputs[0].spec) if stage else None
        if (None if gradient is None else gradient.spec) != expected:
            raise BadReply(f"a gradient of {None if gradient is None else gradient.spec}, not {expected}")
        if (reply.loss is not None) != (stage == self._last_stage):
            raise BadReply(f"stage {stage} answers with loss {reply.loss}")
        if accumulate and not reply.accumulated:
            raise BadReply("a backward was answered but not accumulated")
