"""Joining a DHT: addresses that answer and such as do not, and sockets."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hivemind.dht.routing import DHTID

from swarm.dht.directory import HivemindDirectory
from swarm.dht.identity import Identity
from swarm.dht.node import start_node
from swarm.dht.socket_folder import SocketFolder
from swarm.errors import CannotJoin, UsageError
from tests.dht_case import RUN, free_port, nodes, peer_record

pytestmark = pytest.mark.swarm  # each node starts a p2pd


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
