"""However a program ends, nothing of it is left: no process, no listening port, no socket file, no shared memory."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from swarm.errors import ExitCode
from swarm.telemetry.journal import Event, read_events
from tests.fault_swarm import run_file

pytestmark = pytest.mark.swarm

GONE_SECONDS = 20.0
START_SECONDS = 60.0
POLL_SECONDS = 0.1
MARK = "SWARM_TEST_MARK"
"""Environment variable by which all descendants of a program are found, whoever their parent is by now."""


@dataclass
class Sandbox:
    """Programs with a temporary folder and a mark of their own."""

    folder: Path
    temporary: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="s")))  # short, for unix sockets
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    shared_memory: set[str] = field(default_factory=lambda: _shared_memory())
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """A program as a shell would start it: in a process group of its own."""
        environment = {**os.environ, "TMPDIR": str(self.temporary), MARK: self.mark}
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "peers", *arguments],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def local(self, peers: str) -> subprocess.Popen[bytes]:
        """``swarm local`` that has made some steps."""
        config, stages = run_file(self.folder), str(self.folder / "logs")
        process = self.start("local", "local", str(config), "--peers", peers, "--steps", "100000", "--keep", stages)
        wait_until(lambda: len(self.events("trainer", "step")) >= 3)
        return process

    def log(self, name: str) -> str:
        """What a program printed."""
        return (self.folder / f"{name}.log").read_text()

    def events(self, name: str, kind: str) -> list[Event]:
        """Of a journal in the logs' folder."""
        journal = self.folder / "logs" / f"{name}.jsonl"
        return [event for event in read_events(journal) if event.kind == kind] if journal.exists() else []

    def living(self) -> list[psutil.Process]:
        """All that descend from the programs, dead ones that nobody has waited for left out."""
        return [process for process in psutil.process_iter() if _is_marked(process, self.mark)]

    def check_nothing_is_left(self) -> None:
        """Within GONE_SECONDS.  A port that listens belongs to a process, so there is none of these either."""
        wait_until(lambda: not self.living(), GONE_SECONDS)
        # Torch keeps a cache there, of its own accord and for its next import.
        assert [name for name in os.listdir(self.temporary) if not name.startswith("torchinductor_")] == []
        assert _shared_memory() - self.shared_memory == set()

    def clear(self) -> None:
        """Whatever a failed test has left."""
        for process in self.living():
            process.kill()
        for started in self.started:
            started.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    box = Sandbox(tmp_path)
    yield box
    box.clear()


@pytest.mark.parametrize(
    ("numbers", "to_group", "codes"),
    [
        pytest.param([signal.SIGINT], True, {ExitCode.INTERRUPTED}, id="ctrl-c"),
        # The second ends the launcher at once, in the way that a shell shows as 130.
        pytest.param([signal.SIGINT] * 2, True, {ExitCode.INTERRUPTED, -signal.SIGINT}, id="ctrl-c twice"),
        pytest.param([signal.SIGTERM], False, {ExitCode.INTERRUPTED}, id="SIGTERM"),
        pytest.param([signal.SIGHUP], False, {ExitCode.INTERRUPTED}, id="SIGHUP"),
        pytest.param([signal.SIGKILL], False, {-signal.SIGKILL}, id="SIGKILL"),
    ],
)
def test_a_local_swarm_ends_with_its_launcher(
    numbers: list[signal.Signals], to_group: bool, codes: set[int], sandbox: Sandbox
) -> None:
    """(pytorch/pytorch#110065)"""
    launcher = sandbox.local("1,1,1")
    before = sandbox.living()
    assert len(before) >= 2 + 2 * 5  # launcher, nursery; bootstrap, trainer and three peers with a p2pd each
    for number in numbers:
        (os.killpg if to_group else os.kill)(launcher.pid, number)
    assert launcher.wait(GONE_SECONDS) in codes
    sandbox.check_nothing_is_left()
    assert "Traceback" not in sandbox.log("local")


def test_nothing_is_left_of_a_killed_peer_or_a_killed_nursery(sandbox: Sandbox) -> None:
    """The swarm outlives the peer; without its nursery the launcher gives up, in one line.  (pytorch/pytorch#110065)"""
    launcher = sandbox.local("1,2,1")
    (serving,) = sandbox.events("peer-1-0", "serving")
    (victim,) = [p for p in sandbox.living() if _listens_at(p, str(serving.fields["endpoint"]))]
    (daemon,) = victim.children()
    victim.kill()
    wait_until(lambda: _is_dead(victim) and _is_dead(daemon), GONE_SECONDS)
    steps = len(sandbox.events("trainer", "step"))
    wait_until(lambda: len(sandbox.events("trainer", "step")) > steps + 3)

    (nursery,) = [p for p in psutil.Process(launcher.pid).children() if "peers.local.nursery" in p.cmdline()]
    nursery.kill()
    assert launcher.wait(GONE_SECONDS) == ExitCode.FAILED
    sandbox.check_nothing_is_left()
    assert sandbox.log("local").splitlines()[-1].startswith("swarm: ")
    assert "Traceback" not in sandbox.log("local")


def test_single_programs_end_cleanly_and_start_again_on_the_same_ports(sandbox: Sandbox) -> None:
    """SIGKILL leaves nothing that hinders the next start; exit codes tell the other ends apart."""
    config = run_file(sandbox.folder, stages=1)
    (sandbox.folder / "logs").mkdir()
    at_bootstrap, at_peer = _free_port(), _free_port()

    def start_bootstrap() -> tuple[subprocess.Popen[bytes], str]:
        identity = ("--identity", str(sandbox.folder / "bootstrap.key"))
        lines = sandbox.log("bootstrap").splitlines() if (sandbox.folder / "bootstrap.log").exists() else []
        process = sandbox.start("bootstrap", "bootstrap", "--listen", f"127.0.0.1:{at_bootstrap}", *identity)
        wait_until(lambda: len(sandbox.log("bootstrap").splitlines()) > len(lines))
        return process, sandbox.log("bootstrap").splitlines()[-1]

    first_bootstrap, address = start_bootstrap()
    first_bootstrap.kill()
    first_bootstrap.wait()
    bootstrap, address_again = start_bootstrap()
    assert address_again == address
    state = ("--state-dir", str(sandbox.folder / "state"))
    trainer = sandbox.start("trainer", "train", str(config), "--join", address, "--steps", "100000", *state)

    def start_peer() -> subprocess.Popen[bytes]:
        served = len(sandbox.events("peer", "serving"))
        process = sandbox.start(
            "peer", "peer", "--join", address, "--listen", f"127.0.0.1:{at_peer}",
            "--identity", str(sandbox.folder / "peer.key"), "--journal", str(sandbox.folder / "logs" / "peer.jsonl"),
        )  # fmt: skip
        wait_until(lambda: len(sandbox.events("peer", "serving")) > served)
        return process

    killed = start_peer()
    (daemon,) = psutil.Process(killed.pid).children()
    (left,) = sandbox.temporary.glob(f"swarm-{killed.pid}-*")
    killed.kill()
    killed.wait()
    peer = start_peer()
    assert _is_dead(daemon)
    assert not left.exists()
    first, second = (event.fields for event in sandbox.events("peer", "serving"))
    assert first["peer"] == second["peer"]
    assert first["endpoint"] == second["endpoint"]
    assert first["session"] != second["session"]

    ends = [
        (peer, signal.SIGTERM, ExitCode.DONE),
        (trainer, signal.SIGTERM, ExitCode.INTERRUPTED),
        (bootstrap, signal.SIGTERM, ExitCode.DONE),
    ]
    for process, number, code in ends:
        process.send_signal(number)
        assert process.wait(GONE_SECONDS) == code
    sandbox.check_nothing_is_left()
    for name in ("bootstrap", "trainer", "peer"):
        assert "Traceback" not in sandbox.log(name)


def wait_until(condition: Callable[[], object], seconds: float = START_SECONDS) -> None:
    """Look again and again; AssertionError after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not come about within {seconds:.0f} s"
        select.select([], [], [], POLL_SECONDS)


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark and not _is_dead(process)
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended meanwhile, also if nobody has waited for it
        return False


def _is_dead(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE or not process.is_running()
    except psutil.NoSuchProcess:
        return True


def _listens_at(process: psutil.Process, endpoint: str) -> bool:
    port = int(endpoint.rpartition(":")[2])
    return port in {c.laddr.port for c in process.net_connections() if c.status == psutil.CONN_LISTEN}


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
