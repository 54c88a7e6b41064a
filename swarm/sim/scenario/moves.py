"""Moves peers between stages by a rule.  A move is what it is without draining: leave, join elsewhere, fetch state."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

from swarm.ids import PeerId
from swarm.policy.rebalancing import paper_move

if TYPE_CHECKING:
    from swarm.sim.scenario.play import Play

ORACLE_SECONDS = 10.0
"""Between two looks of the oracle at who is alive."""
PATIENCE_SECONDS = 1.0
"""Between two looks at whether a peer that is to move has applied its step."""


class Mover:
    """Carries out one rule until it is cancelled."""

    def __init__(self, play: Play) -> None:
        self._play = play
        self._moving: set[PeerId] = set()

    async def run(self, rule: str) -> None:
        """``rule`` as in the scenario file."""
        seconds = ORACLE_SECONDS if rule == "oracle" else float(rule.removeprefix("paper-"))
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(seconds)
                wanted = list(self._oracle()) if rule == "oracle" else self._paper()
                for peer, stage in wanted:
                    self._moving.add(peer)
                    tasks.create_task(self._move(peer, stage))

    def _stages(self) -> list[dict[PeerId, int]]:
        """Queue lengths by stage; of a peer that is about to move, at the stage it moves to."""
        stages: list[dict[PeerId, int]] = [{} for _ in range(self._play.scenario.model.stage_count)]
        for peer, life in self._play.swarm.peers.items():
            if peer not in self._moving:
                stages[life.peer.seat.stage][peer] = life.executor.waiting
        return stages

    def _paper(self) -> list[tuple[PeerId, int]]:
        move = paper_move(self._stages())
        if move is None:
            return []
        peer, stage, _ = move
        return [(peer, stage)] if self._play.optimum.rates[self._play.classes[peer]][stage] > 0 else []

    def _oracle(self) -> Iterator[tuple[PeerId, int]]:
        """From stages that have more of a class than the best assignment to those that have less."""
        if self._moving:
            return
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

    async def _move(self, peer: PeerId, stage: int) -> None:
        """Once it has applied its step, so that nothing of it has to be computed again."""
        play = self._play
        try:
            while (life := play.swarm.peers.get(peer)) is not None and life.module.added:
                await asyncio.sleep(PATIENCE_SECONDS)
            if life is None or not play.swarm.may_kill(peer):
                return
            play.swarm.stop_peer(peer)
            play.meter.moves.append((asyncio.get_running_loop().time(), peer))
            play.start(play.classes[peer], stage, peer)
        finally:
            self._moving.discard(peer)
