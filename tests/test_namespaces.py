"""Peers on one network, trainer and bootstrap on another: what is announced is what is dialed."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import ExitCode
from swarm.ids import PeerId
from swarm.records import CommitRecord
from swarm.storage.commit_log import FileCommitLog
from swarm.telemetry.journal import Event, read_events
from tests.fault_swarm import run_file

pytestmark = pytest.mark.swarm

STEPS = 6
PEERS_HOST, TRAINER_HOST = "10.203.77.1", "10.203.77.2"
PROXIED_PORT, OWN_PORT, UNUSED_PORT = 41000, 42000, 43000
START_SECONDS = 60.0
END_SECONDS = 15.0
POLL_SECONDS = 0.1

PROXY = """
import asyncio, sys
async def pump(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
async def serve(reader, writer):
    there = await asyncio.open_connection("127.0.0.1", int(sys.argv[2]))
    await asyncio.gather(pump(reader, there[1]), pump(there[0], writer), return_exceptions=True)
async def main():
    async with await asyncio.start_server(serve, "0.0.0.0", int(sys.argv[1])) as server:
        await server.serve_forever()
asyncio.run(main())
"""
"""A port of the outside that leads to another one inside, as a router's."""


DIAL = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)"


@dataclass
class Networks:
    """Two network namespaces joined by a cable, and the programs in them."""

    folder: Path
    peers: str = field(default_factory=lambda: f"swarm-peers-{os.getpid()}")
    trainer: str = field(default_factory=lambda: f"swarm-train-{os.getpid()}")
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def lay(self) -> None:
        """Skips the tests where that is not permitted."""
        if shutil.which("ip") is None:
            pytest.skip("iproute2 is not installed")
        made = subprocess.run(["ip", "netns", "add", self.peers], capture_output=True, check=False)
        if made.returncode:
            pytest.skip(f"no network namespaces can be made here: {made.stderr.decode().strip()}")
        _ip("netns", "add", self.trainer)
        ends = (self.peers, PEERS_HOST), (self.trainer, TRAINER_HOST)
        _ip("link", "add", "cable", "netns", self.peers, "type", "veth", "peer", "name", "cable", "netns", self.trainer)
        for namespace, host in ends:
            _ip("-n", namespace, "address", "add", f"{host}/24", "dev", "cable")
            _ip("-n", namespace, "link", "set", "cable", "up")
            _ip("-n", namespace, "link", "set", "lo", "up")

    def clear(self) -> None:
        """End what runs, and remove the namespaces; the cable goes with them."""
        for process in self.running:
            process.terminate()
        for process in self.running:
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for namespace in (self.peers, self.trainer):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)

    def start(self, namespace: str, name: str, *command: str) -> subprocess.Popen[bytes]:
        """Run Python there; what it prints goes to NAME.log."""
        with (self.folder / f"{name}.log").open("wb") as output:
            process = subprocess.Popen(_inside(namespace, *command), stdout=output, stderr=output)
        self.running.append(process)
        return process

    def log(self, name: str) -> str:
        """What a program has printed so far."""
        return (self.folder / f"{name}.log").read_text()

    def call(self, namespace: str, *command: str) -> subprocess.CompletedProcess[bytes]:
        """Run Python there to its end."""
        return subprocess.run(_inside(namespace, *command), capture_output=True, check=False, timeout=START_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run over two networks left behind."""

    trainer_exit: int
    verdict: dict[str, Any]
    commits: list[CommitRecord]
    events: list[Event]
    """The trainer's."""
    serving: dict[str, Event]
    """By the peer's name: what it said when it began to serve."""
    status: dict[str, Any]
    dht_port_is_open: bool
    """The one that a peer was told to take, seen from the other network."""
    logs: dict[str, str]

    def peer(self, name: str) -> PeerId:
        return PeerId(str(self.serving[name].fields["peer"]))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    networks = Networks(tmp_path_factory.mktemp("networks"))
    with ExitStack() as cleanup:
        cleanup.callback(networks.clear)
        networks.lay()
        yield _train(networks)


def test_the_result_equals_one_process(outcome: Outcome) -> None:
    assert outcome.trainer_exit == ExitCode.DONE, outcome.logs["trainer"]
    assert outcome.verdict["ok"], outcome.verdict


def test_the_trainer_dials_what_is_announced_not_what_is_listened_on(outcome: Outcome) -> None:
    """Port and host differ, as behind a router that forwards a port.  (ipfs-cluster/ipfs-cluster#949)"""
    assert outcome.serving["proxied"].fields["endpoint"] == f"{PEERS_HOST}:{PROXIED_PORT}"
    assert _status_of(outcome, "proxied")["endpoint"] == f"{PEERS_HOST}:{PROXIED_PORT}"
    assert _members(outcome, stage=0) == {outcome.peer("proxied"), outcome.peer("far")}


def test_a_wildcard_is_never_announced(outcome: Outcome) -> None:
    """The address towards the swarm is, and a warning says how to give another.  (ipfs-cluster/ipfs-cluster#949)"""
    assert outcome.serving["wildcard"].fields["endpoint"] == f"{PEERS_HOST}:{OWN_PORT}"
    (warning,) = [line for line in outcome.logs["wildcard"].splitlines() if " WARN" in line]
    assert "--announce" in warning
    assert f"{PEERS_HOST}:{OWN_PORT}" in warning
    assert outcome.peer("wildcard") in _members(outcome, stage=1)


def test_nobody_waits_for_an_address_where_nothing_listens(outcome: Outcome) -> None:
    """The peer says so at its start, the status shows it, and no microbatch goes there.
    (ipfs-cluster/ipfs-cluster#949)
    """
    nowhere = outcome.peer("nowhere")
    assert nowhere not in _members(outcome, stage=1)
    assert not [e for e in outcome.events if e.kind in ("peer_joined", "retried") and e.fields["peer"] == nowhere]
    (warning,) = [line for line in outcome.logs["nowhere"].splitlines() if " WARN" in line]
    assert f"{PEERS_HOST}:{UNUSED_PORT}" in warning
    assert _status_of(outcome, "nowhere")["reachable"] is False
    assert _status_of(outcome, "wildcard")["reachable"] is True


def test_the_dht_port_can_be_fixed(outcome: Outcome) -> None:
    assert outcome.dht_port_is_open


def _train(networks: Networks) -> Outcome:
    folder = networks.folder
    config = run_file(folder, stages=2)
    networks.start(
        networks.trainer, "bootstrap", "-m", "peers", "bootstrap",
        "--listen", "0.0.0.0:40000", "--announce", TRAINER_HOST,
    )  # fmt: skip
    _until(lambda: "/p2p/" in networks.log("bootstrap"))
    (address,) = networks.log("bootstrap").splitlines()
    assert address.startswith(f"/ip4/{TRAINER_HOST}/tcp/40000/p2p/")

    def start_peer(name: str, *options: str, namespace: str = networks.peers) -> None:
        command = ("-m", "peers", "peer", "--join", address, "--journal", str(folder / f"{name}.jsonl"), *options)
        networks.start(namespace, name, *command)

    networks.start(networks.peers, "proxy", "-c", PROXY, str(PROXIED_PORT), "44000")
    start_peer("proxied", "--stage", "0", "--listen", "0.0.0.0:44000", "--announce", f"{PEERS_HOST}:{PROXIED_PORT}")
    start_peer("nowhere", "--stage", "1", "--listen", "0.0.0.0:45000", "--announce", f"{PEERS_HOST}:{UNUSED_PORT}")
    far = (
        "--stage", "0", "--listen", "0.0.0.0:46000", "--announce", f"{TRAINER_HOST}:46000",
        "--dht-listen", "0.0.0.0:47000", "--dht-announce", f"{TRAINER_HOST}:47000",
    )  # fmt: skip
    start_peer("far", *far, namespace=networks.trainer)  # its all-reduces with the other go over the cable
    trainer = networks.start(
        networks.trainer, "trainer", "-m", "peers", "train", str(config), "--join", address, "--steps", str(STEPS),
        "--state-dir", str(folder / "state"), "--report", str(folder / "report.json"),
        "--journal", str(folder / "trainer.jsonl"),
    )  # fmt: skip
    # The stage is served by nobody but the one that cannot be reached, until the trainer has tried that.
    _until(lambda: [event for event in _events(folder, "trainer") if event.kind == "peer_suspected"])
    _until(lambda: [event for event in _events(folder, "far") if event.kind == "serving"])
    dht_port_is_open = networks.call(networks.peers, "-c", DIAL, TRAINER_HOST, "47000").returncode == 0
    start_peer("wildcard", "--stage", "1", "--listen", f"0.0.0.0:{OWN_PORT}")
    exit_code = trainer.wait(START_SECONDS)
    status = networks.call(networks.trainer, "-m", "peers", "status", "--join", address, "--json")
    names = ("proxied", "far", "nowhere", "wildcard")
    return Outcome(
        trainer_exit=exit_code,
        verdict=_verify(networks, config, address),
        commits=FileCommitLog(folder / "state" / "commits.jsonl").read(),
        events=_events(folder, "trainer"),
        serving={name: _serving(folder, name) for name in names},
        status=json.loads(status.stdout),
        dht_port_is_open=dht_port_is_open,
        logs={name: networks.log(name) for name in (*names, "trainer")},
    )


def _verify(networks: Networks, config: Path, address: str) -> dict[str, Any]:
    folder = networks.folder
    report = json.loads((folder / "report.json").read_text())
    task = {
        "run_file": str(config),
        "overrides": {},
        "join": address,
        "steps": STEPS,
        "losses": report["losses"],
        "journal": str(folder / "verify.jsonl"),
        "output": str(folder / "verdict.json"),
    }
    program = "import sys; from peers.local.verify import run; sys.exit(run(sys.argv[1:]))"
    verified = networks.call(networks.trainer, "-c", program, json.dumps(task))
    assert verified.returncode == 0, verified.stderr.decode()
    verdict: dict[str, Any] = json.loads((folder / "verdict.json").read_text())
    return verdict


def _events(folder: Path, name: str) -> list[Event]:
    journal = folder / f"{name}.jsonl"
    return list(read_events(journal)) if journal.exists() else []


def _serving(folder: Path, name: str) -> Event:
    return next(event for event in _events(folder, name) if event.kind == "serving")


def _members(outcome: Outcome, stage: int) -> set[PeerId]:
    """Who took part in the stage's all-reduces."""
    return {member for commit in outcome.commits for member in commit.stages[stage].members}


def _status_of(outcome: Outcome, name: str) -> dict[str, Any]:
    (run,) = outcome.status["runs"]
    (found,) = [peer for stage in run["stages"] for peer in stage["peers"] if peer["peer"] == outcome.peer(name)]
    return dict(found)


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        select.select([], [], [], POLL_SECONDS)


def _inside(namespace: str, *command: str) -> list[str]:
    return ["ip", "netns", "exec", namespace, sys.executable, *command]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
