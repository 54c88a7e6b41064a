"""Averages a stage's gradient among an explicit group: implements ports.Averager."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from hivemind.p2p import P2P, PeerID

from swarm.averaging.exact_allreduce import ExactAllReduce
from swarm.averaging.groups import PREFIX, Groups
from swarm.averaging.part_sums import Values
from swarm.errors import NotFinite, ReduceFailed
from swarm.messages import ReduceRequest

PATIENCE_SECONDS = 4.0
"""A member that sends nothing for this long is given up; one that begins later than this is too late."""
EARLY_SECONDS = 30.0
"""How long other members' streams wait for this one to begin."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class ButterflyAverager:
    """All-reduces float32 sums over ``p2p``, each member reducing one span of the gradient."""

    def __init__(self, p2p: P2P, groups: Groups, patience_seconds: float) -> None:
        """Use :meth:`start`."""
        self._p2p = p2p
        self._groups = groups
        self._patience_seconds = patience_seconds

    @staticmethod
    async def start(p2p: P2P, *, patience_seconds: float = PATIENCE_SECONDS) -> ButterflyAverager:
        """Begin to take streams of other members on ``p2p``.  Once for each process."""
        groups = Groups(EARLY_SECONDS)
        await groups.add_p2p_handlers(p2p, namespace=PREFIX)
        return ButterflyAverager(p2p, groups, patience_seconds)

    async def reduce(self, request: ReduceRequest, gradient_sum: torch.Tensor) -> torch.Tensor:
        """Mean (N,) of the members' ``gradient_sum`` (N,), float32, on the same device.

        The sum itself is not read any more when this ends, however it ends.  Raises NotFinite, and sends nothing, if
        it is not finite although it counts.
        """
        if gradient_sum.dim() != 1 or gradient_sum.dtype != torch.float32:
            raise ValueError(f"the gradient must be flat float32, not {gradient_sum.dtype} {tuple(gradient_sum.shape)}")
        self._check(request)
        sums = await _apart(lambda: _on_host(gradient_sum, must_be_finite=self._weight(request) > 0))
        if len(request.members) == 1:
            mean = await _apart(lambda: sums / np.float32(request.total_tokens))
        else:
            mean = await self._reduce_in_group(request, sums)
        return await _apart(lambda: torch.from_numpy(mean).to(gradient_sum.device))

    def _check(self, request: ReduceRequest) -> None:
        peers = [member.contact.peer for member in request.members]
        if self._p2p.peer_id.to_base58() not in peers or len(set(peers)) != len(peers):
            raise ReduceFailed("this peer is not (once) in the group")
        tokens = [member.tokens for member in request.members]
        if min(tokens) < 0 or sum(tokens) != request.total_tokens or request.total_tokens < 1:
            raise ReduceFailed(f"the members' tokens {tokens} do not add up to {request.total_tokens}")

    def _weight(self, request: ReduceRequest) -> int:
        own = self._p2p.peer_id.to_base58()
        return next(member.tokens for member in request.members if member.contact.peer == own)

    async def _reduce_in_group(self, request: ReduceRequest, sums: Values) -> Values:
        sender_seconds = min(self._patience_seconds, request.deadline_seconds / 3)
        runner = ExactAllReduce(
            p2p=self._p2p,
            servicer_type=Groups,
            prefix=PREFIX,
            group_id=group_id(request),
            members=[PeerID.from_base58(member.contact.peer) for member in request.members],
            tokens=[member.tokens for member in request.members],
            sums=sums,
            sender_seconds=sender_seconds,
            # A reducer waits for its slowest sender before it answers.
            reducer_seconds=2 * sender_seconds,
        )
        self._groups.begin(runner)
        try:
            async with asyncio.timeout(request.deadline_seconds):
                return await runner.reduce()
        except TimeoutError:
            raise runner.failure(f"not done within {request.deadline_seconds:g} s") from None
        except ExceptionGroup:
            logger.exception("the all-reduce failed inside")
            raise runner.failure("it failed inside") from None
        finally:
            self._groups.end(runner)


def _on_host(gradient_sum: torch.Tensor, *, must_be_finite: bool) -> Values:
    """The same numbers (N,) in host memory.  Raises NotFinite."""
    sums: Values = gradient_sum.detach().cpu().contiguous().numpy()
    if must_be_finite and not np.isfinite(sums).all():
        raise NotFinite("gradient")
    return sums


async def _apart(work: Callable[[], T]) -> T:
    """Do ``work``, which goes over a whole gradient, on a thread: calls and heartbeats go on meanwhile.

    A thread cannot be cancelled; so whoever is cancelled here ends only when the thread reads nothing any more.
    """
    job = asyncio.ensure_future(asyncio.to_thread(work))
    cancelled: asyncio.CancelledError | None = None
    while not job.done():
        try:
            await asyncio.wait({job})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not job.cancelled():
            job.exception()  # seen: the cancellation comes first
        raise cancelled
    return job.result()


def group_id(request: ReduceRequest) -> bytes:
    """Which all-reduce this is: all who were asked the same get the same 32 bytes."""
    key = request.key
    lineage, term = key.lineage, key.term
    members = [
        [member.contact.peer, member.contact.session, list(member.microbatches), member.tokens]
        for member in request.members
    ]
    where = [key.run, key.stage, lineage.generation, lineage.length, lineage.chain, term.number, term.trainer]
    text = json.dumps([*where, request.attempt, request.total_tokens, members])
    return hashlib.sha256(text.encode()).digest()
