"""None"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarm.averaging.averager import group_id
from swarm.averaging.exact_allreduce import ExactAllReduce
from swarm.errors import NotFinite, ReduceFailed
from swarm.ids import PeerId, RunHash
from swarm.records import Term
from tests.averaging_case import PATIENCE_SECONDS, Group, digest, gradients, group_of, reduce_request

pytestmark = pytest.mark.swarm  # each node starts a p2pd

# --- exactness --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "size"),
    [
        ([64, 192], 1),
        ([64, 64], 1000),
        ([1, 1000, 7], 100_003),
        ([0, 128, 0], 1000),
        ([128, 0, 256, 64, 32], 300_000),
        ([5, 5, 5, 5, 5], 3),
    ],
)
def test_every_member_has_the_same_bits_of_the_exact_mean(tokens: list[int], size: int) -> None:
    async def scenario() -> None:
        async with group_of(len(tokens)) as group:
            sums = gradients(len(tokens), size)
            results = await group.outcomes(reduce_request(group.peers, tokens), sums)
            assert len({digest(result) for result in results}) == 1
            counted = [s for s, count in zip(sums, tokens, strict=True) if count]
            exact = torch.stack(counted).double().sum(dim=0) / sum(tokens)
            assert torch.allclose(results[0].double(), exact, rtol=1e-5, atol=1e-7)
            in_order = torch.zeros(size)
            for part in counted:
                in_order += part
            assert torch.equal(results[0], in_order / sum(tokens))

    asyncio.run(scenario())


def test_a_member_of_weight_0_adds_nothing_even_if_it_is_not_finite() -> None:
    async def scenario() -> None:
        async with group_of(2) as group:
            sums = [torch.ones(10), torch.full((10,), float("nan"))]
            results = await group.outcomes(reduce_request(group.peers, [4, 0]), sums)
            assert [result.tolist() for result in results] == [[0.25] * 10] * 2

    asyncio.run(scenario())


def test_a_sum_that_is_not_finite_is_not_contributed() -> None:
    """Its owner says so; the others miss it and nobody else."""

    async def scenario() -> None:
        async with group_of(3) as group:
            sums = [*gradients(2, 150), torch.full((150,), float("nan"))]
            *others, culprit = await group.outcomes(reduce_request(group.peers, [4, 4, 4]), sums)
            assert isinstance(culprit, NotFinite)
            for outcome in others:
                assert isinstance(outcome, ReduceFailed)
                assert outcome.unreachable == (group.peers[2],)
            with pytest.raises(NotFinite):
                await group.averagers[0].reduce(reduce_request(group.peers[:1], [4]), sums[2])

    asyncio.run(scenario())


def test_a_group_of_one_divides() -> None:
    async def scenario() -> None:
        async with group_of(1) as group:
            (total,) = gradients(1, 1000)
            result = await group.averagers[0].reduce(reduce_request(group.peers, [7]), total)
            assert torch.equal(result, total / 7)

    asyncio.run(scenario())


def test_requests_that_do_not_add_up_are_refused() -> None:
    async def scenario() -> None:
        async with group_of(2) as group:
            good = reduce_request(group.peers, [1, 2])
            stranger = PeerId("12D3KooWFuLKajH4h8eSTeqvanNn7SvQMnaSEy4ffezzMZ6eFkuC")
            for bad in (
                replace(good, total_tokens=4),
                replace(good, members=good.members[1:]),
                replace(good, members=good.members[:1] * 2, total_tokens=2),
                reduce_request([stranger], [3]),
                reduce_request(group.peers, [0, 0]),
                reduce_request(group.peers, [-1, 2]),
            ):
                with pytest.raises(ReduceFailed):
                    await group.averagers[0].reduce(bad, torch.ones(4))
            for wrong in (torch.ones(2, 2), torch.ones(4, dtype=torch.float64)):
                with pytest.raises(ValueError):
                    await group.averagers[0].reduce(good, wrong)

    asyncio.run(scenario())


def test_group_ids_differ_by_everything_that_was_agreed() -> None:
    peers = [PeerId("a"), PeerId("b")]
    base = reduce_request(peers, [1, 2])
    key = base.key
    others = [
        replace(base, attempt=1),
        reduce_request(peers, [2, 1]),
        reduce_request(peers[::-1], [2, 1]),
        replace(base, key=replace(key, stage=1)),
        replace(base, key=replace(key, run=RunHash("b" * 64))),
        replace(base, key=replace(key, term=Term(2, peers[0]))),
        replace(base, key=replace(key, lineage=replace(key.lineage, generation=1))),
    ]
    assert len({group_id(request) for request in [base, *others]}) == 8
    assert group_id(base) == group_id(replace(base, deadline_seconds=1.0))


# --- failures ---------------------------------------------------------------------


def test_an_absent_member_fails_the_attempt_at_all_others_in_time_and_the_next_attempt_succeeds() -> None:
    async def scenario() -> None:
        async with group_of(3) as group:
            sums = gradients(3, 100_000)
            started = time.monotonic()
            outcomes = await group.outcomes(reduce_request(group.peers, [1, 2, 3]), sums, members=[0, 2])
            assert time.monotonic() - started < 4 * PATIENCE_SECONDS
            for outcome in outcomes:
                assert isinstance(outcome, ReduceFailed)
                assert outcome.unreachable == (group.peers[1],)
            rest = [group.peers[0], group.peers[2]]
            outcomes = await group.outcomes(reduce_request(rest, [1, 3], attempt=1), sums, members=[0, 2])
            assert len({digest(outcome) for outcome in outcomes}) == 1
            assert asyncio.all_tasks() - {asyncio.current_task()} == background(group)

    asyncio.run(scenario())


def background(group: Group) -> set[asyncio.Task[Any]]:
    """Tasks that belong to the nodes and not to an all-reduce."""
    mine = (
        "_read_from_persistent_conn",
        "_write_to_persistent_conn",
        "_read_outputs",
        "listen",
        "_mend_forever",
        "sleep",
    )
    return {task for task in asyncio.all_tasks() if any(name in repr(task.get_coro()) for name in mine)}


# hivemind does not close its own connection to p2pd when p2pd cannot reach the peer.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function StreamWriter:pytest.PytestUnraisableExceptionWarning"
)
def test_a_dead_member_is_found_at_once() -> None:
    async def scenario() -> None:
        async with group_of(3) as group:
            sums = gradients(3, 100_000)
            request = reduce_request(group.peers, [1, 2, 3])
            await group.nodes[2].close()
            started = time.monotonic()
            outcomes = await group.outcomes(request, sums, members=[0, 1])
            assert time.monotonic() - started < 2 * PATIENCE_SECONDS
            assert [outcome.unreachable for outcome in outcomes] == [(group.peers[2],)] * 2

    asyncio.run(scenario())


def test_a_late_member_is_waited_for() -> None:
    async def scenario() -> None:
        async with group_of(3) as group:
            sums = gradients(3, 100_000)
            request = reduce_request(group.peers, [1, 2, 3])
            late = group.averagers[2]
            early = [asyncio.create_task(group.averagers[index].reduce(request, sums[index])) for index in (0, 1)]
            async with asyncio.timeout(PATIENCE_SECONDS):
                while late._groups._early.total() < 2:  # noqa: ASYNC110 - until both others knock at its door
                    await asyncio.sleep(0)
            results = [await late.reduce(request, sums[2]), *[await task for task in early]]
            assert len({digest(result) for result in results}) == 1

    asyncio.run(scenario())


def test_a_cancelled_member_reads_its_gradient_no_more_and_the_others_fail_in_time() -> None:
    async def scenario() -> None:
        async with group_of(3) as group:
            sums = gradients(3, 3_000_000)
            request = reduce_request(group.peers, [1, 2, 3])
            tasks = [asyncio.create_task(a.reduce(request, s)) for a, s in zip(group.averagers, sums, strict=True)]
            runner: ExactAllReduce | None = None
            while runner is None or len(runner.active_senders) < 3:
                await asyncio.sleep(0)
                runner = next(iter(group.averagers[0]._groups._running.values()), None)
            tasks[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await tasks[0]
            assert runner._sums is None
            started = time.monotonic()
            for task in tasks[1:]:
                with pytest.raises(ReduceFailed):
                    await task
            assert time.monotonic() - started < 4 * PATIENCE_SECONDS

    asyncio.run(scenario())


class Watched(torch.Tensor):
    """A gradient that is copied from its device when the test says so, and knows by which thread."""

    copying = threading.Event()
    go = threading.Event()
    reader: int | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cpu:
            cls.reader = threading.get_ident()
            cls.copying.set()
            assert cls.go.wait(5)
            cls.reader = None
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_the_loop_goes_on_while_a_gradient_is_copied_and_a_cancelled_member_waits_for_the_copy() -> None:
    async def scenario() -> None:
        async with group_of(1) as group:
            request = reduce_request(group.peers, [4])
            Watched.copying.clear()
            Watched.go.clear()
            task = asyncio.create_task(group.averagers[0].reduce(request, torch.ones(10).as_subclass(Watched)))
            assert await asyncio.to_thread(Watched.copying.wait, 5)
            assert Watched.reader != threading.get_ident()
            for _ in range(3):  # impatience does not help
                task.cancel()
                for _ in range(10):
                    await asyncio.sleep(0)
            assert not task.done()
            Watched.go.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert Watched.reader is None

    asyncio.run(scenario())


def test_the_deadline_holds() -> None:
    async def scenario() -> None:
        async with group_of(2) as group:
            request = replace(reduce_request(group.peers, [1, 2]), deadline_seconds=0.2)
            started = time.monotonic()
            with pytest.raises(ReduceFailed):
                await group.averagers[0].reduce(request, torch.ones(10))
            assert time.monotonic() - started < 1.0

    asyncio.run(scenario())


def test_the_same_attempt_is_not_made_twice() -> None:
    async def scenario() -> None:
        async with group_of(2) as group:
            request = reduce_request(group.peers, [1, 2])
            sums = gradients(2, 100)
            await group.outcomes(request, sums)
            with pytest.raises(ReduceFailed, match="already"):
                await group.averagers[0].reduce(request, sums[0])
            assert not group.averagers[0]._groups._running

    asyncio.run(scenario())
