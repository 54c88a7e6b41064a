"""What roles rely on of an averager."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol

import pytest
import torch

from swarm.averaging.averager import ButterflyAverager
from swarm.dht.node import SwarmNode, start_node
from swarm.errors import NotFinite, ReduceFailed
from swarm.ids import Digest, PeerId, RunHash, SessionId
from swarm.messages import Contact, GroupMember, ReduceRequest, StepKey
from swarm.ports import Averager
from swarm.records import Lineage, Term
from swarm.sim.arithmetic import mean
from swarm.sim.averager import Meetings, SimulatedAverager
from swarm.sim.loop import Process
from swarm.sim.network import Network, Node
from tests.contract.worlds import FAST, REAL, RealKept, Simulated, World, world_fixture

COUNT = 4
PATIENCE_SECONDS = 1.0
"""Of the real ones."""
GIVEN_UP_SECONDS = 8.0
"""After so long a member has given up another that does nothing."""


class Peers(Protocol):
    """COUNT processes that can average, and the numbers that they average."""

    contacts: list[Contact]
    averagers: list[Averager]

    def form(self, values: Sequence[int]) -> Any:
        """A gradient's sum of three numbers."""

    def not_finite(self) -> Any:
        """Another, with NaN in it."""

    def expected(self, total: Sequence[int], tokens: int) -> list[float]:
        """What the mean of a sum is."""

    def numbers(self, result: Any) -> list[float]:
        """A result's."""


class SimulatedPeers:
    def __init__(self) -> None:
        network, meetings = Network(), Meetings()
        self.contacts = [contact(PeerId(f"p{index}")) for index in range(COUNT)]
        self.averagers: list[Averager] = [
            SimulatedAverager(
                meetings, network, Node(machine=network.machine(c.peer), process=Process(c.peer), contact=c)
            )
            for c in self.contacts
        ]

    def form(self, values: Sequence[int]) -> Any:
        return list(values)

    def not_finite(self) -> Any:
        return [math.nan, 0, 0]

    def expected(self, total: Sequence[int], tokens: int) -> list[float]:
        return list(mean(tuple(total), tokens))

    def numbers(self, result: Any) -> list[float]:
        return list(result)


class RealPeers:
    def __init__(self, nodes: list[SwarmNode], averagers: list[Averager]) -> None:
        self.contacts = [contact(node.peer_id) for node in nodes]
        self.averagers = averagers

    def form(self, values: Sequence[int]) -> Any:
        return torch.tensor(values, dtype=torch.float32)

    def not_finite(self) -> Any:
        return torch.tensor([math.nan, 0.0, 0.0])

    def expected(self, total: Sequence[int], tokens: int) -> list[float]:
        result: list[float] = (torch.tensor(total, dtype=torch.float32) / tokens).tolist()
        return result

    def numbers(self, result: Any) -> list[float]:
        numbers: list[float] = result.tolist()
        return numbers


@asynccontextmanager
async def simulated() -> AsyncIterator[Peers]:
    yield SimulatedPeers()


@asynccontextmanager
async def real() -> AsyncIterator[Peers]:
    nodes = [await start_node()]
    try:
        while len(nodes) < COUNT:
            nodes.append(await start_node(join=nodes[0].addresses))
        yield RealPeers(
            nodes, [await ButterflyAverager.start(node.p2p, patience_seconds=PATIENCE_SECONDS) for node in nodes]
        )
    finally:
        for node in reversed(nodes):
            await node.close()


world = world_fixture((Simulated, simulated, FAST), (RealKept, real, REAL))

attempts = iter(range(10_000))
"""Each all-reduce of these tests is another."""


def contact(peer: PeerId) -> Contact:
    return Contact(peer=peer, session=SessionId("0" * 16), endpoint="127.0.0.1:1")


def request_of(contacts: Sequence[Contact], tokens: Sequence[int], seconds: float = 15.0) -> ReduceRequest:
    run = RunHash("a" * 64)
    return ReduceRequest(
        key=StepKey(run=run, stage=0, term=Term(1, PeerId("t")), lineage=Lineage.root(run)),
        attempt=next(attempts),
        members=tuple(GroupMember(contact=c, microbatches=(), tokens=t) for c, t in zip(contacts, tokens, strict=True)),
        total_tokens=sum(tokens),
        deadline_seconds=seconds,
    )


SUMS = [(1, 20, 300), (5, 70, 0), (2, 0, 900), (4, 4, 4)]


async def outcomes(peers: Peers, request: ReduceRequest, sums: dict[int, Any]) -> list[Any]:
    """What each peer that takes part gets: numbers, or its error."""
    calls = (peers.averagers[index].reduce(request, total) for index, total in sums.items())
    results = await asyncio.gather(*calls, return_exceptions=True)
    return [r if isinstance(r, BaseException) else peers.numbers(r) for r in results]


def total_of(members: Sequence[int]) -> list[int]:
    return [sum(SUMS[index][place] for index in members) for place in range(3)]


# --- results ------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [(1,), (7,), (3, 5), (64, 192, 1), (1, 1, 1, 1), (128, 0, 2, 0), (0, 4)])
def test_all_members_get_the_same_mean_weighted_by_tokens(world: World[Peers], tokens: tuple[int, ...]) -> None:
    """Members of weight 0 get it too, and their sums do not count."""

    async def test(peers: Peers) -> None:
        members = range(len(tokens))
        request = request_of(peers.contacts[: len(tokens)], tokens)
        expected = peers.expected(total_of([i for i in members if tokens[i]]), sum(tokens))
        found = await outcomes(peers, request, {index: peers.form(SUMS[index]) for index in members})
        assert found == [expected] * len(tokens)

    world.run(test)


def test_a_member_of_weight_0_may_hold_anything(world: World[Peers]) -> None:
    async def test(peers: Peers) -> None:
        request = request_of(peers.contacts[:3], (4, 0, 2))
        sums = {0: peers.form(SUMS[0]), 1: peers.not_finite(), 2: peers.form(SUMS[2])}
        assert await outcomes(peers, request, sums) == [peers.expected(total_of([0, 2]), 6)] * 3

    world.run(test)


def test_the_sums_stay_as_they_were_and_the_result_is_apart(world: World[Peers]) -> None:
    async def test(peers: Peers) -> None:
        request = request_of(peers.contacts[:2], (1, 1))
        sums = {index: peers.form(SUMS[index]) for index in range(2)}
        results = await asyncio.gather(*(peers.averagers[i].reduce(request, sums[i]) for i in sums))
        assert [peers.numbers(sums[index]) for index in sums] == [list(SUMS[index]) for index in sums]
        expected = [peers.numbers(result) for result in results]
        for total in sums.values():
            total[0] = 0  # the next step's
        assert [peers.numbers(result) for result in results] == expected

    world.run(test)


def test_two_groups_at_once_and_one_member_in_both(world: World[Peers]) -> None:
    async def test(peers: Peers) -> None:
        forms = [peers.form(values) for values in SUMS]
        first, second = request_of(peers.contacts[:2], (1, 2)), request_of(peers.contacts[2:], (3, 4))
        found = await asyncio.gather(
            outcomes(peers, first, {0: forms[0], 1: forms[1]}), outcomes(peers, second, {2: forms[2], 3: forms[3]})
        )
        assert list(found) == [[peers.expected(total_of([0, 1]), 3)] * 2, [peers.expected(total_of([2, 3]), 7)] * 2]
        first, second = request_of(peers.contacts[:2], (1, 2)), request_of(peers.contacts[1:3], (3, 4))
        found = await asyncio.gather(
            outcomes(peers, first, {0: forms[0], 1: forms[1]}), outcomes(peers, second, {1: forms[1], 2: forms[2]})
        )
        assert list(found) == [[peers.expected(total_of([0, 1]), 3)] * 2, [peers.expected(total_of([1, 2]), 7)] * 2]

    world.run(test)


def test_other_attempts_steps_and_terms_are_other_groups(world: World[Peers]) -> None:
    async def test(peers: Peers) -> None:
        first = request_of(peers.contacts[:2], (1, 2))
        key = first.key
        lineage = Lineage(generation=0, length=1, chain=Digest("b" * 64))
        others = [
            replace(first, attempt=next(attempts)),
            replace(first, key=replace(key, term=Term(2, PeerId("t")))),
            replace(first, key=replace(key, lineage=lineage)),
            replace(first, key=replace(key, stage=1)),
        ]
        # Each member brings other numbers to each: what is mixed up shows.
        found = await asyncio.gather(
            *(
                outcomes(peers, request, {index: peers.form((number, index, 0)) for index in range(2)})
                for number, request in enumerate([first, *others])
            )
        )
        assert found == [[peers.expected((2 * number, 1, 0), 3)] * 2 for number in range(5)]

    world.run(test)


def test_a_member_that_comes_a_little_late_is_waited_for(world: World[Peers]) -> None:
    async def test(peers: Peers) -> None:
        request = request_of(peers.contacts[:2], (1, 2))
        early = asyncio.create_task(outcomes(peers, request, {0: peers.form(SUMS[0])}))
        await asyncio.sleep(PATIENCE_SECONDS / 5)
        late = await outcomes(peers, request, {1: peers.form(SUMS[1])})
        assert late == await early == [peers.expected(total_of([0, 1]), 3)]

    world.run(test)


# --- failures -----------------------------------------------------------------------------


def missed(outcome: Any) -> tuple[str, ...]:
    assert isinstance(outcome, ReduceFailed)
    return outcome.unreachable


def test_a_member_that_does_not_come_is_named_and_nobody_gets_a_result(world: World[Peers]) -> None:
    async def test(peers: Peers) -> None:
        request = request_of(peers.contacts[:3], (1, 2, 3))
        loop = asyncio.get_running_loop()
        began = loop.time()
        found = await outcomes(peers, request, {0: peers.form(SUMS[0]), 1: peers.form(SUMS[1])})
        assert [missed(outcome) for outcome in found] == [(peers.contacts[2].peer,)] * 2
        assert loop.time() - began < GIVEN_UP_SECONDS

    world.run(test)


def test_a_member_of_weight_0_that_does_not_come_is_missed_as_well(world: World[Peers]) -> None:
    async def test(peers: Peers) -> None:
        request = request_of(peers.contacts[:3], (1, 2, 0))
        found = await outcomes(peers, request, {0: peers.form(SUMS[0]), 1: peers.form(SUMS[1])})
        assert [missed(outcome) for outcome in found] == [(peers.contacts[2].peer,)] * 2

    world.run(test)


def test_a_member_that_comes_too_late_gets_no_result(world: World[Peers]) -> None:
    async def test(peers: Peers) -> None:
        request = request_of(peers.contacts[:2], (1, 2))
        (early,) = await outcomes(peers, request, {0: peers.form(SUMS[0])})
        assert missed(early) == (peers.contacts[1].peer,)
        loop = asyncio.get_running_loop()
        began = loop.time()
        (late,) = await outcomes(peers, request, {1: peers.form(SUMS[1])})
        assert isinstance(late, ReduceFailed)
        assert loop.time() - began < GIVEN_UP_SECONDS

    world.run(test)


def test_a_short_deadline_holds(world: World[Peers]) -> None:
    async def test(peers: Peers) -> None:
        request = request_of(peers.contacts[:2], (1, 2), seconds=0.3)
        loop = asyncio.get_running_loop()
        began = loop.time()
        (alone,) = await outcomes(peers, request, {0: peers.form(SUMS[0])})
        assert isinstance(alone, ReduceFailed)
        assert loop.time() - began < 1.3

    world.run(test)


def test_a_member_that_leaves_costs_the_others_the_attempt(world: World[Peers]) -> None:
    async def test(peers: Peers) -> None:
        request = request_of(peers.contacts[:3], (1, 2, 3))
        leaver = asyncio.create_task(peers.averagers[0].reduce(request, peers.form(SUMS[0])))
        for _ in range(5):
            await asyncio.sleep(0)
        leaver.cancel()
        await asyncio.wait({leaver})
        assert leaver.cancelled()
        loop = asyncio.get_running_loop()
        began = loop.time()
        found = await outcomes(peers, request, {1: peers.form(SUMS[1]), 2: peers.form(SUMS[2])})
        assert all(isinstance(outcome, ReduceFailed) for outcome in found)
        assert loop.time() - began < GIVEN_UP_SECONDS

    world.run(test)


def test_a_member_whose_sum_is_not_finite_says_so_and_contributes_nothing(world: World[Peers]) -> None:
    async def test(peers: Peers) -> None:
        request = request_of(peers.contacts[:3], (4, 2, 1))
        sums = {0: peers.form(SUMS[0]), 1: peers.form(SUMS[1]), 2: peers.not_finite()}
        first, second, culprit = await outcomes(peers, request, sums)
        assert isinstance(culprit, NotFinite)
        assert culprit.where == "gradient"
        assert [missed(first), missed(second)] == [(peers.contacts[2].peer,)] * 2
        (alone,) = await outcomes(peers, request_of(peers.contacts[:1], (4,)), {0: peers.not_finite()})
        assert isinstance(alone, NotFinite)

    world.run(test)


@pytest.mark.parametrize(("tokens", "total"), [((1, 1), 3), ((1, 1), 1), ((0, 0), 0), ((3, -1), 2)])
def test_a_wrong_weight_is_no_result(world: World[Peers], tokens: tuple[int, int], total: int) -> None:
    async def test(peers: Peers) -> None:
        request = replace(request_of(peers.contacts[:2], tokens), total_tokens=total)
        found = await outcomes(peers, request, {index: peers.form(SUMS[index]) for index in range(2)})
        assert all(isinstance(outcome, ReduceFailed) for outcome in found)

    world.run(test)


def test_who_is_not_once_in_the_group_gets_no_result(world: World[Peers]) -> None:
    async def test(peers: Peers) -> None:
        request = request_of(peers.contacts[:2], (1, 1))
        (stranger,) = await outcomes(peers, request, {2: peers.form(SUMS[2])})
        assert isinstance(stranger, ReduceFailed)
        twice = request_of([peers.contacts[0], peers.contacts[0]], (1, 1))
        (double,) = await outcomes(peers, twice, {0: peers.form(SUMS[0])})
        assert isinstance(double, ReduceFailed)

    world.run(test)


def test_an_attempt_is_made_once(world: World[Peers]) -> None:
    async def test(peers: Peers) -> None:
        request = request_of(peers.contacts[:2], (1, 2))
        sums = {0: peers.form(SUMS[0]), 1: peers.form(SUMS[1])}
        assert await outcomes(peers, request, sums) == [peers.expected(total_of([0, 1]), 3)] * 2
        for asked in (request, replace(request, deadline_seconds=3.0)):
            (again,) = await outcomes(peers, asked, {0: sums[0]})
            assert isinstance(again, ReduceFailed)
        following = replace(request, attempt=next(attempts))
        assert await outcomes(peers, following, sums) == [peers.expected(total_of([0, 1]), 3)] * 2

    world.run(test)
