"""Two of what there should be one of: versions, configs, runs, ports, identities.

bigscience-workshop/petals#201; grpc/grpc#16920, grpc/grpc#10755, ray-project/rayfed#124; learning-at-home/hivemind#511.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from peers.local.children import CLI, Child
from swarm import PROTOCOL_VERSION
from swarm.dht.directory import HivemindDirectory
from swarm.dht.node import start_node
from swarm.errors import ExitCode
from swarm.ids import SessionId
from swarm.telemetry.journal import read_events
from tests.blackhole import free_port
from tests.fault_program import Fault
from tests.fault_swarm import FaultSwarm, Watcher, run_file, run_swarm
from tests.other_version import VERSION

pytestmark = pytest.mark.swarm

OTHER_STEPS = 5


def test_beside_a_living_run(tmp_path: Path) -> None:
    """All mistakes in turn, and a second run, while the first one trains on and ends equal to the reference."""
    identity, port = tmp_path / "identity", free_port()
    scene = Scene(tmp_path, identity, port)
    file = str(tmp_path / "fired")
    # Steps of a quarter of a second: the run lives for a while.
    slow = [Fault(point="compute is emulated", file=file, seconds=0.02)]
    outcome = run_swarm(
        tmp_path,
        peers=(2,),
        stages=1,
        steps=50,
        faults={"peer-0-0": slow, "peer-0-1": slow},
        extra={"peer-0-0": ["--identity", str(identity), "--listen", f"127.0.0.1:{port}"]},
        meanwhile=scene.play,
    )
    outcome.check()
    assert scene.played
    assert outcome.of("peer_suspected") == []
    assert len(outcome.of("peer_joined")) == 2
    (left_out,) = outcome.of("other_version")
    assert f"version {VERSION}" in str(left_out.fields["reason"])
    assert f"program {PROTOCOL_VERSION}" in str(left_out.fields["reason"])


class Scene:
    """What happens beside the run."""

    def __init__(self, folder: Path, identity: Path, port: int) -> None:
        self.folder = folder
        self.identity = identity
        self.port = port
        self.played = False
        self._number = 0

    async def play(self, swarm: FaultSwarm) -> None:
        self.swarm = swarm
        watcher = Watcher(swarm)
        await watcher.step()
        await swarm.until(lambda: all(peer.peer for peer in swarm.peers))
        await self.a_record_of_another_version(watcher)
        await asyncio.gather(
            self.another_version(), self.another_config(), self.the_same_port(), self.the_same_identity()
        )
        await self.another_run()
        self.played = True

    # --- versions and configs ----------------------------------------------------------

    async def a_record_of_another_version(self, watcher: Watcher) -> None:
        """It is never dialed, and said once."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            listener.setblocking(False)
            node = await start_node(join=[self.swarm._address])
            try:
                directory = HivemindDirectory(node)
                run = self.swarm.options.config.hash
                (genuine, *_) = await directory.peers(run, 0)
                record = replace(
                    genuine,
                    peer=node.peer_id,
                    session=SessionId("f" * 16),
                    protocol=VERSION,
                    endpoint=f"127.0.0.1:{listener.getsockname()[1]}",
                )
                await directory.announce(record)
                await watcher.wait_for(lambda event: event.kind == "other_version")
                await watcher.step()
                await watcher.step()
                with pytest.raises(BlockingIOError):
                    listener.accept()
                await directory.withdraw(record)
            finally:
                await node.close()

    async def another_version(self) -> None:
        """The program says both versions."""
        for arguments in (self._peer("--stage", "0"), self._train(self.swarm.options.run_file)):
            child = await self._ended(arguments, entry="tests.other_version:run")
            assert child.exit_code == ExitCode.CANNOT_JOIN
            assert f"protocol version {VERSION}" in child.last_words()
            assert f"speak {PROTOCOL_VERSION}" in child.last_words()

    async def another_config(self) -> None:
        """The program says where they differ, with both values."""
        child = await self._ended([*self._train(self.swarm.options.run_file), "--seed", "9"])
        assert child.exit_code == ExitCode.USAGE
        assert "run.seed is 3 there and 9 here" in child.last_words()

    # --- ports and identities ------------------------------------------------------------

    async def the_same_port(self) -> None:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            held.listen()
            for port in (self.port, held.getsockname()[1]):
                child = await self._ended(self._peer("--stage", "0", "--listen", f"127.0.0.1:{port}"))
                assert child.exit_code == ExitCode.CANNOT_JOIN
                assert f"127.0.0.1:{port}" in child.last_words()

    async def the_same_identity(self) -> None:
        copy = self.folder / "copy"
        shutil.copy(self.identity, copy)
        empty, cut, nowhere = self.folder / "empty", self.folder / "cut", self.folder / "no" / "identity"
        empty.write_bytes(b"")
        cut.write_bytes(self.identity.read_bytes()[:-10])
        before = {path: path.read_bytes() for path in (self.identity, empty, cut)}
        for path, code, words in (
            (self.identity, ExitCode.CANNOT_JOIN, "in use"),
            (copy, ExitCode.CANNOT_JOIN, "in use"),
            (empty, ExitCode.USAGE, "empty"),
            (cut, ExitCode.USAGE, ""),
            (nowhere, ExitCode.USAGE, "no folder"),
        ):
            child = await self._ended(self._peer("--stage", "0", "--identity", str(path)))
            assert child.exit_code == code, child.last_words()
            assert str(path) in child.last_words()
            assert words in child.last_words()
        assert {path: path.read_bytes() for path in before} == before

    # --- another run -------------------------------------------------------------------

    async def another_run(self) -> None:
        """Shares the DHT and nothing else."""
        folder = self.folder / "other"
        folder.mkdir()
        path = run_file(folder, name="other", stages=1)
        journal = folder / "trainer.jsonl"
        trainer = self._start([*self._train(path), "--journal", str(journal)])
        peer_journal = folder / "peer.jsonl"
        peer = self._start(self._peer("--run", "other", "--journal", str(peer_journal)))
        await asyncio.wait_for(trainer.ended.wait(), 60)
        assert trainer.exit_code == ExitCode.DONE, trainer.last_words()
        (serving,) = [event for event in read_events(peer_journal) if event.kind == "serving"]
        joined = [event.fields["peer"] for event in read_events(journal) if event.kind == "peer_joined"]
        assert joined == [serving.fields["peer"]]
        status = await self._ended(["status", "--join", self.swarm._address, "--json"])
        shown = json.loads(status.log.read_text())
        peers = {run["run"]: {p["peer"] for s in run["stages"] for p in s["peers"]} for run in shown["runs"]}
        assert peers == {"tiny": {p.peer for p in self.swarm.peers}, "other": set(joined)}
        undecided = await self._ended(self._peer())
        assert undecided.exit_code == ExitCode.USAGE
        assert "choose one with --run NAME" in undecided.last_words()
        self.swarm.children.signal(peer.name, 15)
        await asyncio.wait_for(peer.ended.wait(), 20)
        assert peer.exit_code == ExitCode.DONE

    # --- programs ------------------------------------------------------------------------

    def _peer(self, *options: str) -> list[str]:
        return ["peer", "--join", self.swarm._address, *options]

    def _train(self, path: Path) -> list[str]:
        state = self.folder / f"state-{self._number}"
        return [
            "train",
            str(path),
            "--join",
            self.swarm._address,
            "--steps",
            str(OTHER_STEPS),
            "--state-dir",
            str(state),
        ]

    def _start(self, arguments: list[str], entry: str = CLI) -> Child:
        self._number += 1
        return self.swarm.children.spawn(f"extra-{self._number}", arguments, entry=entry)

    async def _ended(self, arguments: list[str], entry: str = CLI) -> Child:
        child = self._start(arguments, entry)
        await asyncio.wait_for(child.ended.wait(), 60)
        assert "Traceback" not in child.log.read_text()
        return child
