"""All-reduce with members that send rubbish, the reducer alone, and several processes."""

from __future__ import annotations

import asyncio
import gc
import json
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest
from hivemind.averaging.partition import AllreduceException
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2

from swarm.averaging.averager import ButterflyAverager, group_id
from swarm.averaging.exact_allreduce import LARGEST_PART_BYTES
from swarm.averaging.groups import PREFIX, Groups
from swarm.averaging.part_sums import PartSums
from swarm.averaging.part_wire import decode_part, encode_part
from swarm.dht.node import SwarmNode, start_node
from swarm.errors import ReduceFailed
from swarm.ids import PeerId
from tests.averaging_case import PATIENCE_SECONDS, digest, gradients, group_of, part, reduce_request

pytestmark = pytest.mark.swarm  # each node starts a p2pd

LARGE = 6_000_000


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
                *(sys.executable, "-m", "tests.test_averaging_hostile", group.nodes[0].addresses[0]),
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
