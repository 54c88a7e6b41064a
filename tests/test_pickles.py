"""Data from outside that runs code when it is unpickled: refused where it comes in, and never run.

ecmwf/anemoi-core#1416.  There is no checkpoint file yet: a stage's state comes from other peers only.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hivemind.averaging.partition import AllreduceException
from hivemind.dht.routing import DHTID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time

from swarm.averaging.part_wire import decode_mean, decode_part
from swarm.config import RunConfig, load
from swarm.dht import payload
from swarm.dht.directory import HivemindDirectory
from swarm.dht.node import start_node
from swarm.dht.payload import peers_key
from swarm.errors import BadReply, BadRequest
from swarm.ids import RunHash
from swarm.messages import StateRequest
from swarm.records import CommitRecord
from swarm.stage.module import TorchStage
from swarm.telemetry.journal import read_events
from swarm.tensors import TensorData, TensorSpec
from swarm.wire import control, failures, frames, heads
from tests.fault_program import Bomb, Fault
from tests.fault_swarm import FaultSwarm, Watcher, fired, run_swarm
from tests.stage_double import RUN, EchoStage, forward_request, served, tensor


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "marker"
    yield path
    assert not path.exists()


def bombs(marker: Path) -> dict[str, bytes]:
    """The same in the forms in which data of this field is passed around."""
    saved, array = io.BytesIO(), io.BytesIO()
    torch.save({"weight": Bomb(str(marker))}, saved)
    np.save(array, np.array([Bomb(str(marker))], dtype=object), allow_pickle=True)
    return {
        **{f"pickle {n}": pickle.dumps(Bomb(str(marker)), protocol=n) for n in range(pickle.HIGHEST_PROTOCOL + 1)},
        "torch": saved.getvalue(),
        "numpy": array.getvalue(),
    }


@pytest.mark.fast
def test_the_bomb_works(tmp_path: Path) -> None:
    """Else the rest of this file would show nothing."""
    for name, data in bombs(tmp_path / "here").items():
        if name.startswith("pickle"):
            pickle.loads(data).close()  # noqa: S301
            assert (tmp_path / "here").exists(), name
            (tmp_path / "here").unlink()


@pytest.mark.fast
def test_no_decoder_runs_it(marker: Path, tmp_path: Path) -> None:
    config = load(Path("examples/tiny.toml"))
    module = TorchStage(config, 1)
    codecs = [c for c in vars(control).values() if isinstance(c, control.Codec)]
    assert len(codecs) > 10
    for data in bombs(marker).values():
        text = data.decode("latin-1")
        layout, _ = module.snapshot()
        for codec in codecs:
            with pytest.raises((BadRequest, ValueError)):
                codec.decode(data)
        for parse in (heads.from_state, lambda f: heads.from_forward(f, 1 << 20), lambda f: heads.from_output(f, 9)):
            with pytest.raises(BadRequest):
                parse(frames.decode(data))
        assert isinstance(failures.decode(data), BadReply)
        with pytest.raises(ValueError):
            payload.decode(text)
        with pytest.raises(ValueError):
            RunConfig.from_published(text, RunHash("a" * 64))
        with pytest.raises((ValueError, KeyError, TypeError)):
            CommitRecord.from_json(text)
        for layout_text in (layout, text, json.dumps([{"name": text, "dtype": "object", "shape": [1]}])):
            with pytest.raises(ValueError):
                module.load(layout_text, data)
        with pytest.raises(ValueError):
            module.load_reduced(data)
        for dtype in ("float32", "object", text):
            part = averaging_pb2.AveragingData(
                code=averaging_pb2.AVERAGED_PART,
                weight=1,
                tensor_part=runtime_pb2.Tensor(buffer=data, dtype="float32", size=[8]),
            )
            part.tensor_part.dtype = "object" if dtype == text else dtype
            with pytest.raises(AllreduceException):
                decode_part(part, 8, 1)
            with pytest.raises(AllreduceException):
                decode_mean(part, 8)


@pytest.mark.fast
def test_as_an_activation_it_is_a_number_or_nothing(marker: Path) -> None:
    """Bytes of the declared size are read as numbers, whatever they are; others are refused."""

    async def main() -> None:
        for data in bombs(marker).values():
            padded = data + bytes(-len(data) % 4)
            async with served(EchoStage()) as (calls, to):
                sent = TensorData(spec=TensorSpec(dtype="float32", shape=(len(padded) // 4,)), data=padded)
                received = await calls.forward(to, forward_request(sent))
                assert bytes(received.data) == padded

    asyncio.run(main())
    for data in bombs(marker).values():
        with pytest.raises(ValueError):
            tensor(data, "float32", (len(data) + 1,))


@pytest.mark.fast
def test_in_the_dht_it_is_not_believed(marker: Path) -> None:
    """Neither as a record nor in hivemind's own packing, from a node that checks nothing."""

    async def main() -> None:
        hostile = await start_node()
        try:
            hostile.dht.protocol.record_validator = None
            run = RunHash("a" * 64)
            key = DHTID.generate(source=peers_key(run, 0))
            later = get_dht_time() + 100
            for number, data in enumerate(bombs(marker).values()):
                for value in (data, MSGPackSerializer.dumps(data), MSGPackSerializer.dumps(data.decode("latin-1"))):
                    hostile.dht.protocol.storage.store_subkey(key, f"peer{number}", value, later)
                    hostile.dht.protocol.storage.store_subkey(key, str(hostile.peer_id), value, later)
            reader = await start_node(join=hostile.addresses)
            try:
                assert await HivemindDirectory(reader).peers(run, 0) == []
            finally:
                await reader.close()
        finally:
            await hostile.close()

    asyncio.run(main())


@pytest.mark.fast
def test_as_a_donors_state_it_is_refused_by_name(marker: Path) -> None:
    config = load(Path("examples/tiny.toml"))
    module = TorchStage(config, 1)
    before = module.digest()
    layout, _ = module.snapshot()

    async def main(data: bytes) -> None:
        donor = EchoStage(state_chunks=(data,))
        async with served(donor) as (calls, to):
            head, chunks = await calls.fetch_state(to, StateRequest(run=RUN, stage=1), 5)
            received = b"".join([bytes(chunk) async for chunk in chunks])
            assert received == data
            assert hashlib.sha256(received).hexdigest() == head.digest  # all is in order but the content
            for text in (head.layout, layout):
                with pytest.raises(ValueError, match="layout"):
                    module.load(text, received)
        assert module.digest() == before

    for data in bombs(marker).values():
        asyncio.run(main(data))


@pytest.mark.swarm
def test_the_programs_never_unpickle(tmp_path: Path) -> None:
    """Training, joining and averaging with the interpreter told to note each object that unpickling would look up.

    Also: one of the donors gives a pickle for its state; the newcomer goes to the other.
    """
    file, donor_file = tmp_path / "unpickled", tmp_path / "fired"
    watch = Fault(point="something is unpickled", file=str(file))
    bomb = Fault(point="state is a pickle", file=str(donor_file), shared=True)
    slow = Fault(point="compute is emulated", file=str(donor_file), seconds=0.02)
    marker = Path(f"{donor_file}.marker")
    names = ("peer-0-0", "peer-0-1", "peer-0-2", "peer-1-0", "trainer")
    faults = {name: [watch] for name in names}
    faults["peer-0-0"] += [slow, bomb]
    faults["peer-0-1"] += [slow, bomb]

    async def join(swarm: FaultSwarm) -> None:
        watcher = Watcher(swarm)
        await watcher.step(at_least=2)
        guest = swarm.start_peer(0)
        await watcher.joined(guest)

    outcome = run_swarm(tmp_path, peers=(2, 1), stages=2, steps=50, faults=faults, meanwhile=join)
    outcome.check()
    assert fired(donor_file) == ["state is a pickle"]
    refused = [e for e in read_events(outcome.logs / "peer-0-2.jsonl") if e.kind == "donor_failed"]
    assert len(refused) == 1
    assert "does not fit" in str(refused[0].fields["reason"])
    assert not marker.exists()
    assert fired(file) == []
