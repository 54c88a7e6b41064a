"""None"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.timed_storage import ValueWithExpiration

from swarm.dht.directory import HivemindDirectory
from swarm.dht.guarded_node import rebuilt
from swarm.dht.identity import Identity
from swarm.dht.node import SwarmNode, start_node
from swarm.dht.payload import encode, key_of
from swarm.ids import RunHash
from tests.dht_case import CONFIG, RUN, free_port, lead_record, nodes, peer_record

pytestmark = pytest.mark.swarm  # each node starts a p2pd

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
