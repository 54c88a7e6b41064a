import asyncio
import gc
import hashlib
import json
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hivemind.averaging.partition import AllreduceException
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2

from swarm.averaging.averager import ButterflyAverager, group_id
from swarm.averaging.exact_allreduce import LARGEST_PART_BYTES, ExactAllReduce
from swarm.averaging.groups import PREFIX, Groups
from swarm.averaging.part_sums import PartSums
from swarm.averaging.part_wire import decode_part, encode_part
from swarm.dht.node import SwarmNode, start_node
from swarm.errors import NotFinite, ReduceFailed
from swarm.ids import PeerId, RunHash, SessionId
from swarm.messages import Contact, GroupMember, ReduceRequest, StepKey
from swarm.records import Lineage, Term

RUN = RunHash("a" * 64)
PATIENCE_SECONDS = 1.0
LARGE = 6_000_000

pytestmark = pytest.mark.swarm  # each node starts a p2pd


def reduce_request(peers: Sequence[PeerId], tokens: Sequence[int], attempt: int = 0) -> ReduceRequest:
    return ReduceRequest(
        key=StepKey(run=RUN, stage=0, term=Term(1, peers[0]), lineage=Lineage.root(RUN)),
        attempt=attempt,
        members=tuple(
            GroupMember(
                contact=Contact(peer=peer, session=SessionId("0" * 16), endpoint="127.0.0.1:1"),
                microbatches=(),
                tokens=count,
            )
            for peer, count in zip(peers, tokens, strict=True)
        ),
        total_tokens=sum(tokens),
        deadline_seconds=15.0,
    )


def gradients(count: int, size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(size, generator=generator) for _ in range(count)]


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


class Group:
    def __init__(self, nodes: list[SwarmNode], averagers: list[ButterflyAverager]) -> None:
        self.nodes = nodes
        self.averagers = averagers
        self.peers = [node.peer_id for node in nodes]

    async def outcomes(
        self, request: ReduceRequest, sums: Sequence[torch.Tensor], members: Sequence[int] | None = None
    ) -> list[Any]:
        indices = range(len(self.nodes)) if members is None else members
        calls = [self.averagers[index].reduce(request, sums[index]) for index in indices]
        return await asyncio.gather(*calls, return_exceptions=True)


@asynccontextmanager
async def group_of(count: int) -> AsyncIterator[Group]:
    nodes = [await start_node()]
    try:
        while len(nodes) < count:
            nodes.append(await start_node(join=nodes[0].addresses))
        yield Group(nodes, [await ButterflyAverager.start(n.p2p, patience_seconds=PATIENCE_SECONDS) for n in nodes])
    finally:
        for node in reversed(nodes):
            await node.close()


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


# --- hostile members --------------------------------------------------------------


def part(weight: float = 3.0, **changes: Any) -> averaging_pb2.AveragingData:
    fields: dict[str, Any] = {
        "compression": runtime_pb2.NONE,
        "dtype": "float32",
        "size": [50],
        "buffer": b"\0" * 200,
        **changes,
    }
    return averaging_pb2.AveragingData(
        code=averaging_pb2.PART_FOR_AVERAGING, weight=weight, tensor_part=runtime_pb2.Tensor(**fields)
    )


HOSTILE = {
    "another weight": part(weight=4.0),
    "weight is not a number": part(weight=float("nan")),
    "too short": part(buffer=b"\0" * 196),
    "too long": part(buffer=b"\0" * 204),
    "another shape": part(size=[5, 10]),
    "huge shape": part(size=[(1 << 31) - 1]),
    "another dtype": part(dtype="float64"),
    "object": part(dtype="O"),
    "compressed": part(compression=runtime_pb2.BLOCKWISE_8BIT),
    "nothing": averaging_pb2.AveragingData(),
    "not a number": part(buffer=struct.pack("<50f", *[0.0] * 49, float("nan"))),
    "infinite": part(buffer=struct.pack("<50f", float("-inf"), *[0.0] * 49)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_malformed_parts_are_refused(name: str) -> None:
    assert decode_part(part(), 50, 3) is not None
    with pytest.raises(AllreduceException):
        decode_part(HOSTILE[name], 50, 3)


def test_a_member_of_weight_0_may_send_no_values() -> None:
    empty = averaging_pb2.AveragingData(weight=0.0, tensor_part=encode_part(None))
    assert decode_part(empty, 50, 0) is None
    with pytest.raises(AllreduceException):
        decode_part(part(weight=0.0), 50, 0)


# Nor when the call is cancelled while the connection opens, as those to a banned member are.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_a_hostile_member_costs_the_attempt_and_nothing_else() -> None:
    async def scenario() -> None:
        async with group_of(3) as group:
            sums = gradients(3, 150)
            for attempt, name in enumerate(["another weight", "too long", "nothing", "not a number"]):
                request = reduce_request(group.peers, [1, 2, 3], attempt)
                bad = averaging_pb2.AveragingData()
                bad.CopyFrom(HOSTILE[name])
                bad.group_id = group_id(request)
                honest = asyncio.create_task(group.outcomes(request, sums, members=[0, 1]))
                codes = [await answers(group.nodes[2], group.nodes[index], bad) for index in (0, 1)]
                assert {code for found in codes for code in found} == {averaging_pb2.INTERNAL_ERROR}
                for outcome in await honest:
                    assert isinstance(outcome, ReduceFailed)
                    assert outcome.unreachable == (group.peers[2],)
            results = await group.outcomes(reduce_request(group.peers, [1, 2, 3], attempt=9), sums)
            assert len({digest(result) for result in results}) == 1

    asyncio.run(scenario())
    gc.collect()  # here, and not in a later test


def test_a_stranger_is_turned_away_and_the_group_is_undisturbed() -> None:
    async def scenario() -> None:
        async with group_of(3) as group:
            sums = gradients(2, 100)
            request = reduce_request(group.peers[:2], [1, 2])
            first = asyncio.create_task(group.averagers[0].reduce(request, sums[0]))
            knock = averaging_pb2.AveragingData()
            knock.CopyFrom(part())
            knock.group_id = group_id(request)
            assert await answers(group.nodes[2], group.nodes[0], knock) == [averaging_pb2.PROTOCOL_VIOLATION]
            results = [await group.averagers[1].reduce(request, sums[1]), await first]
            assert len({digest(result) for result in results}) == 1
            # A group that is over is answered at once.
            assert await answers(group.nodes[2], group.nodes[0], knock) == [averaging_pb2.BAD_GROUP_ID]

    asyncio.run(scenario())


def test_a_strangers_early_streams_leave_room_for_members() -> None:
    async def scenario() -> None:
        async with group_of(2) as group:
            sums = gradients(2, 100)
            request = reduce_request(group.peers, [1, 2])
            groups = group.averagers[0]._groups
            own, member = (node.p2p.peer_id for node in group.nodes)
            stranger = PeerID(b"a stranger")
            knocks = [asyncio.create_task(knock(groups, own, stranger, bytes([n % 256, n // 256]))) for n in range(300)]
            turned_away, waiting = await asyncio.wait(knocks, timeout=0.1)
            assert {task.result() for task in turned_away} == {averaging_pb2.BAD_GROUP_ID}
            other = asyncio.create_task(group.averagers[1].reduce(request, sums[1]))
            while member not in groups._early:  # noqa: ASYNC110 - it counts, and tells nobody
                await asyncio.sleep(0)
            results = [await group.averagers[0].reduce(request, sums[0]), await other]
            assert len({digest(result) for result in results}) == 1
            assert len(waiting) < 10
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
            assert not groups._early

    asyncio.run(scenario())


def test_a_large_first_message_is_not_kept() -> None:
    async def scenario() -> None:
        groups = Groups(early_seconds=30.0)
        message = averaging_pb2.AveragingData(
            group_id=b"g", tensor_part=runtime_pb2.Tensor(buffer=bytes(LARGEST_PART_BYTES + 4096))
        )
        async with asyncio.timeout(5):
            code = await knock(groups, PeerID(b"me"), PeerID(b"a stranger"), b"g", message)
        assert code == averaging_pb2.BAD_GROUP_ID

    asyncio.run(scenario())


async def knock(
    groups: Groups, own: PeerID, sender: PeerID, group: bytes, message: averaging_pb2.AveragingData | None = None
) -> int:
    """The code that a stream for ``group`` is answered with."""

    async def stream() -> AsyncIterator[averaging_pb2.AveragingData]:
        yield averaging_pb2.AveragingData(group_id=group) if message is None else message

    context = P2PContext(handle_name="rpc_aggregate_part", local_id=own, remote_id=sender)
    (code,) = [int(answer.code) async for answer in groups.rpc_aggregate_part(stream(), context)]
    return code


async def answers(sender: SwarmNode, to: SwarmNode, message: averaging_pb2.AveragingData) -> list[int]:
    async def one() -> AsyncIterator[averaging_pb2.AveragingData]:
        yield message

    stub = Groups.get_stub(sender.p2p, to.p2p.peer_id, namespace=PREFIX)
    return [answer.code async for answer in await stub.rpc_aggregate_part(one())]


# --- the reducer alone ------------------------------------------------------------


def test_sums_do_not_depend_on_the_order_of_arrival() -> None:
    async def total(order: Sequence[int]) -> bytes:
        rng = np.random.default_rng(0)
        values = [rng.standard_normal(1000, dtype=np.float32) for _ in range(4)]
        sums = PartSums([1000], [1, 2, 3, 4])
        means = await asyncio.gather(*(sums.add(sender, 0, values[sender]) for sender in order))
        assert {mean.weight for mean in means} == {10.0}
        return means[0].values.tobytes()

    assert len({asyncio.run(total(order)) for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1])}) == 1


def test_a_failed_sender_is_missing_from_the_weight_and_its_later_parts_are_refused() -> None:
    async def scenario() -> None:
        sums = PartSums([2, 2], [1, 2])
        one = np.ones(2, dtype=np.float32)
        first = asyncio.create_task(sums.add(0, 0, one))
        assert (await sums.add(1, 0, one)).weight == 3.0
        await first
        second = asyncio.create_task(sums.add(0, 1, one))
        await asyncio.sleep(0)
        sums.on_sender_failed(1)
        assert (await second).weight == 1.0
        with pytest.raises(AllreduceException):
            await sums.add(1, 1, one)

    asyncio.run(scenario())


def test_who_waits_is_told_when_it_is_over() -> None:
    async def scenario() -> None:
        sums = PartSums([2], [1, 2])
        waiting = asyncio.create_task(sums.add(0, 0, np.ones(2, dtype=np.float32)))
        await asyncio.sleep(0)
        sums.finalize()
        with pytest.raises(AllreduceException, match="over"):
            await waiting

    asyncio.run(scenario())


# --- several processes ------------------------------------------------------------


async def _child(join: str) -> None:
    node = await start_node(join=[join])
    averager = await ButterflyAverager.start(node.p2p)
    print(node.peer_id, flush=True)
    peers, tokens = json.loads(await asyncio.to_thread(sys.stdin.readline))
    await averager.reduce(reduce_request(peers, tokens), gradients(3, LARGE)[2])


def test_a_process_killed_half_way_fails_the_attempt_at_the_others_and_they_go_on() -> None:
    async def scenario() -> None:
        async with group_of(2) as group:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.test_averaging", group.nodes[0].addresses[0]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert child.stdout is not None
            assert child.stdin is not None
            peer = PeerId((await child.stdout.readline()).decode().strip())
            peers, tokens = [*group.peers, peer], [1, 2, 3]
            sums = gradients(3, LARGE)
            request = reduce_request(peers, tokens)
            child.stdin.write(json.dumps([peers, tokens]).encode() + b"\n")
            outcomes = asyncio.create_task(group.outcomes(request, sums))
            async with asyncio.timeout(10):
                while not half_way(group.averagers[0]):  # noqa: ASYNC110 - there is no event for it
                    await asyncio.sleep(0)
            child.kill()
            started = time.monotonic()
            for outcome in await outcomes:
                assert isinstance(outcome, ReduceFailed)
                assert outcome.unreachable == (peer,)
            assert time.monotonic() - started < 3 * PATIENCE_SECONDS
            await child.wait()
            results = await group.outcomes(reduce_request(group.peers, tokens[:2], attempt=1), sums)
            assert len({digest(result) for result in results}) == 1

    asyncio.run(scenario())


def half_way(averager: ButterflyAverager) -> bool:
    """Whether a part of the mean is there, of the first member's own span: all members have begun to send."""
    runner = next(iter(averager._groups._running.values()), None)
    if runner is None:
        return False
    mean = runner._part_sums._slots[1].mean
    return mean is not None and mean.done()


if __name__ == "__main__":
    asyncio.run(_child(sys.argv[1]))
