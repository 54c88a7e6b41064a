"""Moves peers between stages by a rule.

A move is what it is without draining: the peer leaves at once, what it holds of the open step is computed again by
those it leaves, and it downloads its new stage's state (of no weight, if moves are to cost nothing).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

from swarm.ids import PeerId
from swarm.policy.rebalancing import paper_move

if TYPE_CHECKING:
    from swarm.sim.scenario.play import Play

ORACLE_SECONDS = 60.0
"""Between two looks of the oracle at who is alive."""


class Mover:
    """Carries out one rule until it is cancelled."""

    def __init__(self, play: Play) -> None:
        self._play = play

    async def run(self, rule: str) -> None:
        """``rule`` as in the scenario file."""
        seconds = ORACLE_SECONDS if rule == "oracle" else float(rule.removeprefix("paper-"))
        while True:
            await asyncio.sleep(seconds)
            for peer, stage in list(self._oracle()) if rule == "oracle" else self._paper():
                self._move(peer, stage)

    def _paper(self) -> list[tuple[PeerId, int]]:
        play = self._play
        queues: list[dict[PeerId, float]] = [{} for _ in range(play.scenario.model.stage_count)]
        for peer, life in play.swarm.peers.items():
            queues[life.peer.seat.stage][peer] = life.executor.waiting
        move = paper_move(queues)
        if move is None or play.optimum.rates[play.classes[move[0]]][move[1]] <= 0:
            return []
        return [move[:2]]

    def _oracle(self) -> Iterator[tuple[PeerId, int]]:
        """From stages that have more of a class than the best assignment to those that have less."""
        play = self._play
        counts = [0] * len(play.scenario.peers)
        there: dict[tuple[int, int], list[PeerId]] = {}
        for peer, life in sorted(play.swarm.peers.items()):
            index = play.classes[peer]
            counts[index] += 1
            there.setdefault((index, life.peer.seat.stage), []).append(peer)
        for index, row in enumerate(play.optimum.of(counts)[1]):
            have = [there.get((index, stage), []) for stage in range(len(row))]
            spare = [peer for stage, peers in enumerate(have) for peer in peers[row[stage] :]]
            lacking = [stage for stage, peers in enumerate(have) for _ in range(row[stage] - len(peers))]
            yield from zip(spare, lacking, strict=False)

    def _move(self, peer: PeerId, stage: int) -> None:
        play = self._play
        if peer in play.swarm.peers and play.swarm.may_kill(peer):
            play.swarm.stop_peer(peer)
            play.meter.moves.append((asyncio.get_running_loop().time(), peer))
            play.start(play.classes[peer], stage, peer)
