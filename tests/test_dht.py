import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.timed_storage import ValueWithExpiration

from swarm.config import RunConfig
from swarm.dht.directory import HivemindDirectory
from swarm.dht.guarded_node import rebuilt
from swarm.dht.identity import Identity
from swarm.dht.node import SwarmNode, start_node
from swarm.dht.payload import RUNS_KEY, Gone, decode, encode, key_of, peers_key
from swarm.dht.socket_folder import SocketFolder
from swarm.dht.validation import MAX_VALUE_BYTES, SignedRecordValidator, key_bytes
from swarm.endpoints import is_endpoint
from swarm.errors import BadRequest, CannotJoin, UsageError
from swarm.ids import Digest, PeerId, RunHash, SessionId
from swarm.records import LeadRecord, Lineage, PeerRecord, PeerState, Term
from swarm.wire import fields

pytestmark = pytest.mark.swarm  # each node starts a p2pd

RUN = RunHash("a" * 64)
CONFIG = RunConfig.model_validate(
    {
        "run": {"name": "demo"},
        "model": {"layers": 2, "width": 8, "heads": 2, "sequence_length": 8},
        "optimizer": {"learning_rate": 0.1},
        "step": {"microbatches": 2, "microbatch_size": 1},
    }
)


def peer_record(peer: PeerId, **changes: Any) -> PeerRecord:
    record = PeerRecord(
        peer=peer,
        session=SessionId("0123456789abcdef"),
        run=RUN,
        protocol=1,
        stage=0,
        endpoint="127.0.0.1:4000",
        state=PeerState.READY,
        lineage=Lineage.root(RUN),
        forward_seconds=0.25,
        queue=3,
        numeric_class="cpu torch-2",
    )
    return replace(record, **changes)


def lead_record(trainer: PeerId, number: int, counter: int = 0) -> LeadRecord:
    return LeadRecord(
        trainer=trainer,
        session=SessionId("0123456789abcdef"),
        run=RUN,
        term=Term(number, trainer),
        counter=counter,
        lineage=Lineage.root(RUN),
    )


@asynccontextmanager
async def nodes(count: int) -> AsyncIterator[list[SwarmNode]]:
    started = [await start_node()]
    try:
        while len(started) < count:
            started.append(await start_node(join=started[0].addresses))
        yield started
    finally:
        for node in reversed(started):
            await node.close()


# --- payloads and validation ------------------------------------------------------


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return Identity.load_or_create(tmp_path / "identity")


def signed(identity: Identity, key: str, subkey: Any, text: Any, *, expiration: float | None = None) -> DHTRecord:
    record = DHTRecord(
        key_bytes(key),
        MSGPackSerializer.dumps(subkey),
        MSGPackSerializer.dumps(text),
        get_dht_time() + 30 if expiration is None else expiration,
    )
    return replace(record, value=SignedRecordValidator(identity).sign_value(record))


def test_payloads_round_trip(identity: Identity) -> None:
    gone = Gone(peer=identity.peer_id, session=SessionId("0123456789abcdef"), run=RUN, stage=4)
    for payload in (peer_record(identity.peer_id), lead_record(identity.peer_id, 7), gone):
        assert decode(encode(payload)) == payload


@pytest.mark.parametrize(
    "changes",
    [
        {"stage": -1},
        {"stage": 1 << 20},
        {"endpoint": "nowhere"},
        {"endpoint": "host:0"},
        {"endpoint": "host:99999"},
        {"endpoint": "a" * 400 + ":1"},
        {"endpoint": "[/x]a:80"},
        {"endpoint": "unix:/run/x:80"},
        {"endpoint": "fe80::1:80"},
        {"endpoint": "[fe80::1]"},
        {"session": "x"},
        {"run": "b"},
        {"forward_seconds": float("nan")},
        {"forward_seconds": -1.0},
        {"queue": -1},
        {"numeric_class": "x" * 129},
        {"numeric_class": "\x1b[2J"},
        {"peer": "QmcZf59bWwK5XFi76CZX8cbJ4BhTzzA3gU1ZjYZcYW3dwt"},
        {"lineage": Lineage(generation=-1, length=0, chain=Digest("a" * 64))},
        {"lineage": Lineage(generation=0, length=0, chain=Digest("xyz"))},
        {"stage": "0"},
        {"state": "gone fishing"},
    ],
)
def test_numbers_and_ids_out_of_range_are_malformed(identity: Identity, changes: dict[str, Any]) -> None:
    record = peer_record(identity.peer_id)
    assert decode(encode(record)) == record
    with pytest.raises(ValueError):
        decode(encode(replace(record, **changes)))


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "null", '{"kind":"peer"}', '{"kind":["peer"],"record":{}}', "[" * 5000, '{"kind":"x"}', "\0"],
)
def test_junk_is_malformed(text: str) -> None:
    with pytest.raises(ValueError):
        decode(text)


@pytest.mark.parametrize(
    "text", ["h:1", "[fe80::1]:31337", "a_b.c-d:65535", "[/x]a:80", "unix:x:1", "h:0", "h:65536", ""]
)
def test_the_wire_takes_the_same_endpoints(identity: Identity, text: str) -> None:
    def taken(check: Callable[[], object], refusal: type[Exception]) -> bool:
        try:
            check()
        except refusal:
            return False
        return True

    record = encode(peer_record(identity.peer_id, endpoint=text))
    verdicts = {
        is_endpoint(text),
        taken(lambda: decode(record), ValueError),
        taken(lambda: fields.endpoint("endpoint", text), BadRequest),
    }
    assert len(verdicts) == 1


def test_own_records_and_configs_are_valid(identity: Identity, tmp_path: Path) -> None:
    record = peer_record(identity.peer_id)
    validator = SignedRecordValidator(Identity.load_or_create(tmp_path / "another"))
    genuine = signed(identity, key_of(record), identity.peer_id, encode(record))
    assert validator.validate(genuine)
    assert MSGPackSerializer.loads(validator.strip_value(genuine)) == encode(record)
    config = signed(identity, RUNS_KEY, f"demo:{CONFIG.hash}", CONFIG.published())
    assert validator.validate(config)
    assert MSGPackSerializer.loads(validator.strip_value(config)) == CONFIG.published()


def test_forgeries_are_refused(identity: Identity, tmp_path: Path) -> None:
    other = Identity.load_or_create(tmp_path / "other")
    record = peer_record(identity.peer_id)
    key, text = key_of(record), encode(record)
    genuine = signed(identity, key, identity.peer_id, text)
    flipped = genuine.value[:-1] + bytes([genuine.value[-1] ^ 1])
    pickled = b"\x80\x04\x95\x0f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."
    forgeries = {
        "unsigned": replace(genuine, value=MSGPackSerializer.dumps(text)),
        "wrong signature": replace(genuine, value=flipped),
        "changed value": replace(genuine, value=genuine.value.replace(b"4000", b"4001")),
        "longer life": replace(genuine, expiration_time=genuine.expiration_time + 1),
        "under another's subkey": replace(genuine, subkey=MSGPackSerializer.dumps(other.peer_id)),
        "signed by another": signed(other, key, identity.peer_id, text),
        "speaks of another": signed(other, key, other.peer_id, text),
        "another stage's key": signed(identity, peers_key(RUN, 1), identity.peer_id, text),
        "another run's key": signed(identity, peers_key(RunHash("b" * 64), 0), identity.peer_id, text),
        "a key of nobody": signed(identity, "anything", identity.peer_id, text),
        "no subkey": signed(identity, key, None, text),
        "subkey is bytes": signed(identity, key, identity.peer_id.encode(), text),
        "subkey is a list": signed(identity, key, [identity.peer_id], text),
        "value is bytes": signed(identity, key, identity.peer_id, text.encode()),
        "value is a tuple": signed(identity, key, identity.peer_id, (text,)),
        "value is a pickle": replace(genuine, value=pickled),
        "value is junk": signed(identity, key, identity.peer_id, "junk"),
        "nothing": replace(genuine, value=b"", subkey=b""),
        "oversize": signed(identity, key, identity.peer_id, text + " " * MAX_VALUE_BYTES),
        "lives for ever": signed(identity, key, identity.peer_id, text, expiration=get_dht_time() + 1e9),
        "never expires": signed(identity, key, identity.peer_id, text, expiration=float("inf")),
        "not a number": signed(identity, key, identity.peer_id, text, expiration=float("nan")),
        "config of another hash": signed(identity, RUNS_KEY, f"demo:{'0' * 64}", CONFIG.published()),
        "config of another name": signed(identity, RUNS_KEY, f"omed:{CONFIG.hash}", CONFIG.published()),
        "config that is none": signed(identity, RUNS_KEY, f"demo:{CONFIG.hash}", "{}"),
        "config without text": signed(identity, RUNS_KEY, f"demo:{CONFIG.hash}", b"x"),
    }
    validator = SignedRecordValidator(identity)
    assert validator.validate(genuine)
    assert [name for name, forgery in forgeries.items() if validator.validate(forgery)] == []


# --- one process, several nodes ---------------------------------------------------


def test_announce_peers_withdraw_and_lead() -> None:
    async def scenario() -> None:
        async with nodes(3) as (a, b, c):
            da, db, dc = HivemindDirectory(a), HivemindDirectory(b), HivemindDirectory(c)
            mine = peer_record(b.peer_id)
            await db.announce(mine)
            await dc.announce(peer_record(c.peer_id, stage=1))
            assert await da.peers(RUN, 0) == await dc.peers(RUN, 0) == await db.peers(RUN, 0) == [mine]
            assert await da.peers(RUN, 2) == []
            assert await da.peers(RunHash("b" * 64), 0) == []
            renewed = replace(mine, queue=9)
            await db.announce(renewed)
            assert await da.peers(RUN, 0) == await dc.peers(RUN, 0) == [renewed]
            await db.withdraw(renewed)
            assert await da.peers(RUN, 0) == await dc.peers(RUN, 0) == await db.peers(RUN, 0) == []
            await db.announce(mine)  # back at once, although the tombstone still lives
            assert await da.peers(RUN, 0) == [mine]

            assert await da.lead(RUN) is None
            await db.renew_lead(lead_record(b.peer_id, 3))
            assert await da.lead(RUN) == lead_record(b.peer_id, 3)
            await dc.renew_lead(lead_record(c.peer_id, 4))
            await db.renew_lead(lead_record(b.peer_id, 3, counter=1))
            assert await da.lead(RUN) == lead_record(c.peer_id, 4)

            assert await dc.runs() == []
            await da.publish_run(CONFIG)
            assert await dc.runs() == [CONFIG]

    asyncio.run(scenario())


def test_records_expire() -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b):
            da, db = HivemindDirectory(a), HivemindDirectory(b, record_ttl_seconds=1.0)
            started = time.monotonic()
            await db.announce(peer_record(b.peer_id))
            assert len(await da.peers(RUN, 0)) == 1
            async with asyncio.timeout(5):
                while await da.peers(RUN, 0):
                    pass
            assert time.monotonic() - started >= 0.9

    asyncio.run(scenario())


def test_forged_records_are_neither_stored_nor_read() -> None:
    async def scenario() -> None:
        async with nodes(3) as (a, b, hostile):
            record = peer_record(b.peer_id)
            await HivemindDirectory(b).announce(record)
            key = DHTID.generate(source=key_of(record))
            junk = MSGPackSerializer.dumps(encode(replace(record, endpoint="6.6.6.6:6")))
            later = get_dht_time() + 100
            answer = await hostile.dht.protocol.call_store(
                a.p2p.peer_id, keys=[key], values=[junk], expiration_time=[later], subkeys=[b.peer_id]
            )
            assert answer == [False]
            # Now it answers readers with the forgery itself.
            hostile.dht.protocol.record_validator = None
            assert hostile.dht.protocol.storage.store_subkey(key, b.peer_id, junk, later)
            reader = await start_node(join=hostile.addresses)
            try:
                assert await HivemindDirectory(reader).peers(RUN, 0) == [record]
            finally:
                await reader.close()

    asyncio.run(scenario())


def test_a_lie_about_the_dictionary_around_the_records_does_not_stop_readers() -> None:
    async def scenario() -> None:
        async with nodes(4) as (a, b, reader, hostile):
            record, theirs = peer_record(a.peer_id), peer_record(hostile.peer_id)
            await HivemindDirectory(hostile).announce(theirs)
            held = hostile.dht.protocol.storage.data[DHTID.generate(source=key_of(record))].value
            held.maxsize, held.frozen = "many", True
            await HivemindDirectory(a).announce(record)
            for node in (reader, b):
                async with asyncio.timeout(5):
                    found = await HivemindDirectory(node).peers(RUN, 0)
                assert {theirs.peer, record.peer} == {each.peer for each in found}

    asyncio.run(scenario())


def test_a_dictionary_claims_no_more_than_its_records() -> None:
    soon, later = get_dht_time() + 10, get_dht_time() + 20
    dictionary = DictionaryDHTValue()
    assert rebuilt(ValueWithExpiration(dictionary, float("inf"))) is None
    dictionary.store("a", b"1", later)
    dictionary.store("b", b"2", soon)
    found = rebuilt(ValueWithExpiration(dictionary, float("inf")))
    assert found is not None
    assert found.expiration_time == later
    assert {key: item.value for key, item in found.value.items()} == {"a": b"1", "b": b"2"}
    assert rebuilt(ValueWithExpiration(b"regular", later)) is None


def test_nodes_started_at_the_same_instant_see_the_same_full_set(tmp_path: Path) -> None:
    async def member(join: list[str]) -> tuple[SwarmNode, HivemindDirectory]:
        node = await start_node(join=join)
        directory = HivemindDirectory(node)
        await directory.announce(peer_record(node.peer_id))
        return node, directory

    async def scenario() -> None:
        path = tmp_path / "identity"
        port = free_port()
        join = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{Identity.load_or_create(path).peer_id}"]
        async with asyncio.TaskGroup() as group:
            members = [group.create_task(member(join)) for _ in range(6)]
            bootstrap = group.create_task(start_node(identity_path=path, port=port, join=join))
        started = [task.result() for task in members]
        everyone = sorted(node.peer_id for node, _ in started)
        views = [directory for _, directory in started] + [HivemindDirectory(bootstrap.result())]
        async with asyncio.timeout(20):
            for directory in views:
                while sorted(record.peer for record in await directory.peers(RUN, 0)) != everyone:
                    pass
        for node, _ in started:
            await node.close()
        await bootstrap.result().close()

    asyncio.run(scenario())


def test_client_reads_and_writes_but_takes_no_part() -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b):
            client = await start_node(join=a.addresses, client=True)
            try:
                assert client.addresses == ()
                lease = lead_record(client.peer_id, 1)
                await HivemindDirectory(client).renew_lead(lease)
                assert await HivemindDirectory(b).lead(RUN) == lease
            finally:
                await client.close()

    asyncio.run(scenario())


# --- joining ----------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_one_of_several_addresses_suffices(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with nodes(1) as (a,):
            dead = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{a.peer_id}"
            node = await start_node(join=[dead, *a.addresses])
            assert node.neighbours == 1
            await node.close()
            assert [record.getMessage() for record in caplog.records if record.name == "swarm.dht.node"] == [
                f"cannot reach {dead}: connection refused"
            ]

    asyncio.run(scenario())


def test_no_address_answers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(1) as (a,):
            stranger = Identity.load_or_create(tmp_path / "stranger").peer_id
            dead = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{a.peer_id}"
            wrong = a.addresses[0].replace(a.peer_id, stranger)
            started = time.monotonic()
            with pytest.raises(CannotJoin) as caught:
                await start_node(join=[dead, wrong], startup_seconds=1.5)
            assert time.monotonic() - started < 5
            assert f"{dead}: connection refused" in str(caught.value)
            assert f"{wrong}: another peer answers there" in str(caught.value)

    asyncio.run(scenario())


def test_a_second_process_with_the_same_identity_is_refused_and_the_first_undisturbed(tmp_path: Path) -> None:
    async def scenario() -> None:
        path, copy = tmp_path / "identity", tmp_path / "copy"
        async with nodes(1) as (a,):
            first = await start_node(identity_path=path, join=a.addresses)
            shutil.copy(path, copy)
            with pytest.raises(CannotJoin, match=f"identity {path} is in use by another process"):
                await start_node(identity_path=path, join=a.addresses)
            for join in (a.addresses, first.addresses):
                with pytest.raises(CannotJoin, match=f"identity {copy} is in use: another living process"):
                    await start_node(identity_path=copy, join=join)
            directory = HivemindDirectory(first)
            await directory.announce(peer_record(first.peer_id))
            assert len(await HivemindDirectory(a).peers(RUN, 0)) == 1
            await first.close()
            again = await start_node(identity_path=path, join=a.addresses)  # its last life is over: welcome
            await HivemindDirectory(again).announce(peer_record(again.peer_id, queue=1))
            assert [record.queue for record in await HivemindDirectory(a).peers(RUN, 0)] == [1]
            await again.close()

    asyncio.run(scenario())


def test_the_identity_of_a_client_is_in_use_as_well(tmp_path: Path) -> None:
    path, copy = tmp_path / "identity", tmp_path / "copy"

    async def scenario() -> None:
        async with nodes(2) as (a, b):
            first = await start_node(identity_path=path, join=a.addresses, client=True)
            shutil.copy(path, copy)
            for join in (a.addresses, b.addresses):
                with pytest.raises(CannotJoin, match=f"identity {copy} is in use: another living process"):
                    await start_node(identity_path=copy, join=join, client=True)
            await first.close()

    asyncio.run(scenario())


def test_a_node_that_comes_back_is_no_second_one(tmp_path: Path) -> None:
    """Else every record would be offered to it twice, and the second refusal be taken for the swarm's."""
    path = tmp_path / "identity"

    async def scenario() -> None:
        async with nodes(2) as (a, b):
            for _ in range(3):
                back = await start_node(identity_path=path, join=a.addresses)
                await HivemindDirectory(back).announce(peer_record(back.peer_id))
                await HivemindDirectory(b).announce(peer_record(b.peer_id))
                node_id = back.dht.node_id
                await back.close()
            assert node_id == DHTID.generate(source=str(back.peer_id))
            known = a.dht.protocol.routing_table.uid_to_peer_id
            assert [str(peer) for peer in known.values()].count(back.peer_id) <= 1

    asyncio.run(scenario())


def test_taken_port_and_foreign_address() -> None:
    async def scenario() -> None:
        async with nodes(1) as (a,):
            port = int(a.addresses[0].split("/")[4])
            with pytest.raises(CannotJoin, match=f"127.0.0.1:{port}: Address already in use"):
                await start_node(port=port)
            with pytest.raises(CannotJoin, match="Cannot assign requested address"):
                await start_node(listen_host="192.0.2.1")

    asyncio.run(scenario())


def test_announced_address_has_the_real_port() -> None:
    async def scenario() -> None:
        node = await start_node(listen_host="0.0.0.0", announce_host="localhost")
        assert len(node.addresses) == 1
        assert node.addresses[0].startswith("/dns4/localhost/tcp/")
        other = await start_node(join=node.addresses)
        assert other.neighbours == 1
        await other.close()
        await node.close()

    asyncio.run(scenario())


def test_a_node_that_lost_all_neighbours_finds_them_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        # It comes back on another port: p2pd would not dial the old one again for 5 s.
        path, ports = tmp_path / "identity", [free_port(), free_port()]
        peer = Identity.load_or_create(path).peer_id
        bootstrap = await start_node(identity_path=path, port=ports[0])
        node = await start_node(join=[f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}" for port in ports])
        await bootstrap.close()
        await HivemindDirectory(node).announce(peer_record(node.peer_id))  # finds that nobody answers
        assert node.neighbours == 0
        await node.mend()
        await node.mend()
        assert node.neighbours == 0
        assert ["cut off" in record.getMessage() for record in caplog.records].count(True) == 1
        bootstrap = await start_node(identity_path=path, port=ports[1])
        await node.mend()
        assert node.neighbours == 1
        await HivemindDirectory(node).announce(peer_record(node.peer_id))
        assert len(await HivemindDirectory(bootstrap).peers(RUN, 0)) == 1
        await node.close()
        await bootstrap.close()

    asyncio.run(scenario())


def test_a_founder_finds_those_again_whom_it_met() -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b):
            await a.mend()  # remembers
            a.dht.protocol.routing_table.__init__(a.dht.node_id, 20, 5)  # as after an outage that ended
            assert a.neighbours == 0
            await a.mend()
            assert a.neighbours == 1
            assert b.neighbours == 1

    asyncio.run(scenario())


# --- sockets ----------------------------------------------------------------------


def test_socket_folder_of_a_dead_process_is_removed(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, os; from swarm.dht.socket_folder import SocketFolder;"
        "print(SocketFolder(pathlib.Path(sys.argv[1])).path, flush=True); sys.stdin.read()"
    )
    root = Path("/tmp") / f"sf{os.getpid()}"  # pytest's own folders are too long for a socket's path
    root.mkdir()
    try:
        with subprocess.Popen(
            [sys.executable, "-c", program, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as owner:
            assert owner.stdout is not None
            theirs = Path(owner.stdout.readline().strip())
            mine = SocketFolder(root)
            assert mine.path.name.startswith(f"swarm-{os.getpid()}-")
            assert theirs.is_dir()
            owner.kill()
        (root / "swarm-notes").mkdir()
        second = SocketFolder(root)
        assert sorted(folder.name for folder in root.iterdir()) == sorted(
            ["swarm-notes", mine.path.name, second.path.name]
        )
        mine.close()
        second.close()
        assert [folder.name for folder in root.iterdir()] == ["swarm-notes"]
    finally:
        shutil.rmtree(root)


def test_socket_folder_too_long_or_missing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        SocketFolder(tmp_path / "missing")
    deep = tmp_path / ("x" * 80)
    deep.mkdir()
    with pytest.raises(UsageError, match="too long"):
        SocketFolder(deep)
    assert list(deep.iterdir()) == []
