"""gRPC between a client and a server on loopback: what arrives, what is refused, and when calls end."""

from __future__ import annotations

import hashlib

import psutil
import pytest
import torch

from swarm.errors import (
    BadReply,
    NotFinite,
    Stale,
    TimedOut,
    Unreachable,
)
from swarm.ids import MicrobatchId
from swarm.messages import (
    AdoptRequest,
    ApplyRequest,
    BackwardRequest,
    Contact,
    DropRequest,
    FreezeRequest,
    GradientRequest,
    GroupMember,
    ReduceRequest,
    StateRequest,
    VoidRequest,
)
from swarm.ports import StageCalls, StageService
from swarm.rpc.client import GrpcStageCalls
from swarm.rpc.handlers import Limits
from swarm.stage.arrays import to_data
from swarm.tensors import ITEM_BYTES, TensorData
from tests.rpc_case import GREETING, _counting, run
from tests.stage_double import (
    COMMIT,
    DIGEST,
    KEY,
    LINEAGE,
    MARK,
    PEER,
    RUN,
    SESSION,
    EchoStage,
    call,
    forward_request,
    report,
    served,
    tensor,
)

pytestmark = pytest.mark.fast


def test_adapters_fit_the_ports() -> None:
    """Checked by the type checker: both are used as what the ports say."""

    async def main(calls: StageCalls, service: StageService) -> None:
        assert await service.greet(GREETING) == report()
        with pytest.raises(Unreachable):
            await calls.greet(Contact(peer=PEER, session=SESSION, endpoint="nowhere"), GREETING, 5)

    run(main(GrpcStageCalls(), EchoStage()))


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (2, 3, 8)])
def test_tensors_keep_their_bytes(dtype: str, shape: tuple[int, ...]) -> None:
    async def main() -> None:
        size = ITEM_BYTES[dtype]
        for extent in shape:
            size *= extent
        # Any bytes: NaNs with a payload and negative zeros among them.
        sent = tensor(bytes(255 - i % 256 for i in range(size)), dtype, shape)
        async with served(EchoStage()) as (calls, to):
            received = await calls.forward(to, forward_request(sent))
            assert received.spec == sent.spec
            assert bytes(received.data) == sent.data

    run(main())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_a_caller_may_ask_for_finite_answers(dtype: str, value: float) -> None:
    """Found at once and laid at its sender's door; also where a sum of finite numbers would overflow."""

    def filled(last: float) -> TensorData:
        numbers = torch.full((40,), 60_000.0, dtype=getattr(torch, dtype))
        numbers[-1] = last
        return to_data(numbers)

    async def main() -> None:
        async with served(EchoStage()) as (_, to):
            calls = GrpcStageCalls(check_finite=True)
            good, bad = filled(60_000.0), filled(value)
            assert await calls.forward(to, forward_request(good)) == good
            with pytest.raises(NotFinite, match="output"):
                await calls.forward(to, forward_request(bad))
            seed = tensor(bytes(16), "int64", (1, 2))
            with pytest.raises(NotFinite, match="gradient"):
                await calls.backward(to, BackwardRequest(call=call(), inputs=bad, seed=seed, tokens=2))
            ids = tensor(b"\xff" * 80, "int64", (10,))
            assert await calls.forward(to, forward_request(ids)) == ids
            await calls.close()

    run(main())


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 1, 40_000_000])
def test_any_size_works_with_default_settings(size: int) -> None:
    async def main() -> None:
        pattern = bytes(range(251))
        sent = tensor((pattern * (size // 251 + 1))[:size])
        async with served(EchoStage()) as (calls, to):
            received = await calls.forward(to, forward_request(sent))
            assert received.data == sent.data

    run(main())


def test_backward_with_and_without_input() -> None:
    async def main() -> None:
        stage = EchoStage()
        seed, inputs = tensor(bytes(16), "int64", (1, 2)), tensor(bytes(3 << 20), "bfloat16", (3, 1 << 19))
        async with served(stage) as (calls, to):
            with_inputs = BackwardRequest(call=call(), inputs=inputs, seed=seed, tokens=2)
            reply = await calls.backward(to, with_inputs)
            assert reply.input_gradient == inputs
            assert (reply.loss, reply.accumulated) == (2.5, True)
            without = BackwardRequest(call=call(), inputs=None, seed=seed, tokens=2, accumulate=False)
            reply = await calls.backward(to, without)
            assert (reply.input_gradient, reply.accumulated) == (None, False)
            assert stage.received == [with_inputs, without]
            assert [kind for kind, _ in stage.admitted] == ["backward", "backward"]

    run(main())


def test_control_calls() -> None:
    async def main() -> None:
        stage = EchoStage()
        async with served(stage) as (calls, to):
            void = VoidRequest(key=KEY, microbatch=MicrobatchId(3), below_try=2)
            freeze = FreezeRequest(key=KEY, attempt=1)
            drop = DropRequest(key=KEY, attempt=1)
            member = GroupMember(contact=to, microbatches=(MicrobatchId(1),), tokens=5)
            reduce = ReduceRequest(key=KEY, attempt=1, members=(member,), total_tokens=5, deadline_seconds=3)
            adopt = AdoptRequest(key=KEY, attempt=2, digest=DIGEST, donors=(to,))
            apply = ApplyRequest(key=KEY, commit=COMMIT, donors=(to,))
            assert (await calls.void(to, void, 5)).held
            assert await calls.greet(to, GREETING, 5) == report()
            assert (await calls.freeze(to, freeze, 5)).held[0].tokens == 128
            await calls.drop(to, drop, 5)
            assert (await calls.reduce(to, reduce, 5)).unreachable == (PEER,)
            assert await calls.adopt(to, adopt, 5) == MARK
            assert (await calls.apply(to, apply, 5)).lineage == LINEAGE.after(COMMIT)
            assert stage.heard == [void, GREETING, freeze, drop, reduce, adopt, apply]

    run(main())


def test_bfloat16_takes_two_bytes_a_value() -> None:
    async def main() -> None:
        values = 1 << 18
        request = forward_request(tensor(bytes(2 * values), "bfloat16", (values,)))
        async with served(EchoStage()) as (calls, to), _counting(to) as (counted, counts):
            await calls.forward(counted, request)
            for count in counts.values():
                assert 2 * values < count < 2.02 * values

    run(main())


def test_a_large_state_flows_with_bounded_memory() -> None:
    async def main() -> None:
        chunk = bytes(8 << 20)
        stage = EchoStage(state_chunks=(chunk,), state_repeats=48)
        async with served(stage) as (calls, to):
            process = psutil.Process()
            before = process.memory_info().rss
            head, data = await calls.fetch_state(to, StateRequest(run=RUN, stage=1), 10)
            received, most, digest = 0, 0, hashlib.sha256()
            async for part in data:
                received += len(part)
                if received % (32 << 20) == 0:
                    most = max(most, process.memory_info().rss)
                digest.update(part)
            assert received == head.total_bytes == 48 * len(chunk)
            assert head.commits == (COMMIT,)
            assert digest.digest() == hashlib.sha256(chunk * 48).digest()
            assert most - before < received / 4
            assert stage.closed.is_set()

    run(main())


def test_a_state_of_another_length_than_declared_is_a_bad_reply() -> None:
    async def main() -> None:
        for declared in (9, 11):
            stage = EchoStage(state_chunks=(b"0123456789",), state_bytes=declared)
            async with served(stage) as (calls, to):
                _, data = await calls.fetch_state(to, StateRequest(run=RUN, stage=1), 10)
                with pytest.raises(BadReply, match="10 bytes of the declared"):
                    async for _ in data:
                        pass

    run(main())


def test_a_donor_that_stops_sending_times_out_and_is_cancelled() -> None:
    async def main() -> None:
        stage = EchoStage(state_chunks=(b"0123456789",))
        stage.gate.clear()
        async with served(stage) as (calls, to):
            request = GradientRequest(run=RUN, stage=1, parent=LINEAGE, digest=DIGEST)
            data = await calls.fetch_gradient(to, request, 0.2)
            assert await anext(data) == b"0123456789"
            with pytest.raises(TimedOut):
                await anext(data)
            await stage.closed.wait()

    run(main())


def test_a_fetcher_that_stops_reading_does_not_hold_the_donor() -> None:
    async def main() -> None:
        stage = EchoStage(state_chunks=(bytes(8 << 20),), state_repeats=100)
        async with served(stage, Limits(stall_seconds=0.2)) as (calls, to):
            _, data = await calls.fetch_state(to, StateRequest(run=RUN, stage=1), 10)
            await stage.closed.wait()
            with pytest.raises(TimedOut, match="a frame was not taken within 0.2 s"):
                async for _ in data:
                    pass

    run(main())


def test_a_refusal_of_a_fetch_comes_before_the_iterator() -> None:
    async def main() -> None:
        async with served(EchoStage(failure=Stale("too old"))) as (calls, to):
            with pytest.raises(Stale, match="too old"):
                await calls.fetch_gradient(to, GradientRequest(run=RUN, stage=1, parent=LINEAGE, digest=DIGEST), 5)
            with pytest.raises(Stale, match="too old"):
                await calls.fetch_state(to, StateRequest(run=RUN, stage=1), 5)

    run(main())
