"""What a user types wrong: one line that quotes it and shows the right form, within seconds, and the exit code.

bacalhau-project/bacalhau#64, ipfs/kubo#3296, learning-at-home/hivemind#428.
"""

from __future__ import annotations

import errno
import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from peers.cli import guarded
from swarm.errors import ExitCode
from tests.cli_case import CLOSED, STATE, TINY, error_of

# --- other options ------------------------------------------------------------------

TRAIN = ["train", TINY, "--join", CLOSED, STATE]


LOCAL = ["local", TINY, "--steps", "1"]


WRONG: dict[str, tuple[list[str], str]] = {
    "no command": ([], "COMMAND"),
    "another command": (["serve"], "'serve'"),
    "no address": (["peer"], "--join"),
    "an address option without a value": (["peer", "--join"], "--join"),
    "unknown option of peer": (["peer", "--join", CLOSED, "--gpu"], "--gpu"),
    "unknown option of train": ([*TRAIN, "--gpu"], "--gpu"),
    "unknown option of local": ([*LOCAL, "--gpu"], "--gpu"),
    "unknown option of status": (["status", "--join", CLOSED, "--gpu"], "--gpu"),
    "unknown option of bootstrap": (["bootstrap", "--join", CLOSED], "--join"),
    "unknown option of reference": (["reference", TINY, "--peers", "1"], "--peers"),
    "a cut-off option is not guessed": (["peer", "--join", CLOSED, "--stag", "1"], "--stag"),
    "stage in words": (["peer", "--join", CLOSED, "--stage", "first"], "'first'"),
    "dht address": (["peer", "--join", CLOSED, "--dht-listen", "node7"], "--dht-listen 'node7': the port is missing"),
    "dht of a trainer": ([*TRAIN, "--steps", "1", "--dht-listen", "x:1"], "--dht-listen 'x:1': "),
    "dht announced": (["peer", "--join", CLOSED, "--dht-listen", "[::]:1", "--dht-announce", "x"], "announce 'x'"),
    "dht announced only": (["peer", "--join", CLOSED, "--dht-announce", "x:1"], "--dht-announce needs --dht-listen"),
    "negative stage": (["peer", "--join", CLOSED, "--stage", "-1"], "--stage -1: stages are numbered from 0"),
    "no threads": (["peer", "--join", CLOSED, "--threads", "0"], "'0' is no positive whole number"),
    "memory in words": (["peer", "--join", CLOSED, "--max-memory", "lots"], "'lots' is no size; examples: 512M, 8G"),
    "no memory": (["peer", "--join", CLOSED, "--max-memory", "0G"], "'0G' is no size"),
    "slowness": (["peer", "--join", CLOSED, "--emulate-slowness", "nan"], "'nan' is no positive number"),
    "no steps": ([*TRAIN, "--steps", "0"], "'0' is no positive whole number"),
    "half a step": ([*TRAIN, "--steps", "1.5"], "'1.5' is no positive whole number"),
    "steps unknown": (TRAIN, "give --steps N, or total_steps"),
    "negative batch": ([*TRAIN, "--steps", "1", "--microbatch-size", "-2"], "step.microbatch_size: "),
    "no microbatches": ([*TRAIN, "--steps", "1", "--microbatches", "0"], "step.microbatches: "),
    "learning rate": ([*TRAIN, "--steps", "1", "--learning-rate", "-1"], "optimizer.learning_rate: "),
    "learning rate is no number": ([*TRAIN, "--steps", "1", "--learning-rate", "nan"], "optimizer.learning_rate: "),
    "seed": ([*TRAIN, "--steps", "1", "--seed", "x"], "'x'"),
    "time-out": ([*TRAIN, "--steps", "1", "--state-timeout", "-5"], "'-5' is no positive number"),
    "time-out without end": ([*TRAIN, "--steps", "1", "--state-timeout", "inf"], "'inf' is no positive number"),
    "report is a folder": ([*TRAIN, "--steps", "1", "--report", "tests"], "tests: cannot write"),
    "report in no folder": ([*TRAIN, "--steps", "1", "--report", "/proc/x/r.json"], "/proc/x/r.json: cannot write"),
    "local report": ([*LOCAL, "--report", "tests"], "tests: cannot write"),
    "reference report": (["reference", TINY, "--steps", "1", "--report", "tests"], "tests: cannot write"),
    "too few stages": ([*LOCAL, "--peers", "1,1"], "the model has 3 stages; give 3 numbers"),
    "no peer of a stage": ([*LOCAL, "--peers", "1,0,1"], "'1,0,1' is no list of peers per stage"),
    "peers in words": ([*LOCAL, "--peers", "two"], "example: 2,2,2"),
    "slow peer": ([*LOCAL, "--slow", "1:4"], "'1:4' is not STAGE.PEER:FACTOR"),
    "slow peer of no stage": ([*LOCAL, "--slow", "7.0:4"], "there is no peer 0 of stage 7"),
    "kill never": ([*LOCAL, "--kill-every", "0"], "'0' is no positive number"),
    "no run file": (["train", "no.toml", "--join", CLOSED, STATE], "no.toml: no such file"),
    "a folder for a run file": (["local", "tests", "--steps", "1"], "tests: Is a directory"),
    "watch and json": (["status", "--join", CLOSED, "--watch", "--json"], "not allowed with"),
}  # fmt: skip


@pytest.mark.fast
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, words = WRONG[name]
    code, line = error_of(arguments, capsys)
    assert code == ExitCode.USAGE
    assert words in line


@pytest.mark.fast
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[run\n", "not a TOML file"),
        ('[run]\nname = "a"\n', "model: field required"),
        ("\0", "not a TOML file"),
        ("run = 3\n", "run: "),
    ],
)
def test_a_wrong_run_file(text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    for command in (["train", str(path), "--join", CLOSED, STATE], ["local", str(path)], ["reference", str(path)]):
        code, line = error_of([*command, "--steps", "1"], capsys)
        assert code == ExitCode.USAGE
        assert str(path) in line
        assert words in line


# --- the program as it is started -----------------------------------------------------


def swarm(*arguments: str, limit_file_bytes: int | None = None, seconds: float = 60.0) -> tuple[int, str, str]:
    def limit() -> None:
        if limit_file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_file_bytes, limit_file_bytes))

    done = subprocess.run(
        [sys.executable, "-m", "peers", *arguments], capture_output=True, text=True, timeout=seconds, preexec_fn=limit
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


@pytest.mark.fast
def test_help_comes_at_once_and_without_torch() -> None:
    probe = (
        "import sys, time; began = time.process_time()\n"
        "from peers.cli import parser\n"
        "try: parser().parse_args(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'grpc', 'hivemind', 'numpy', 'pydantic', 'matplotlib', 'rich'} & set(sys.modules)\n"
        "print(time.process_time() - began, sorted(heavy), file=sys.stderr)\n"
    )
    for arguments in (["--help"], ["peer", "--help"], ["train", "--help"], ["local", "--help"], ["status", "--help"]):
        done = subprocess.run([sys.executable, "-c", probe, *arguments], capture_output=True, text=True, timeout=30)
        assert "exit codes: 0 done, 1" in done.stdout
        cpu_seconds, heavy = done.stderr.split(maxsplit=1)
        assert heavy.strip() == "[]"
        assert float(cpu_seconds) < 0.5


@pytest.mark.swarm
def test_nobody_at_the_address_is_3() -> None:
    began = time.monotonic()
    code, out, err = swarm("status", "--join", CLOSED)
    assert (code, out) == (ExitCode.CANNOT_JOIN, "")
    assert "trying for 15 s" in err
    assert CLOSED in last_line(err)
    assert "connection refused" in last_line(err)
    assert time.monotonic() - began < 40


@pytest.mark.swarm
def test_errors_that_only_the_machine_knows(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cases: list[tuple[list[str], ExitCode, str]] = [
        (["peer", "--join", CLOSED, "--device", "tpu"], ExitCode.USAGE, "--device tpu: "),
        (["peer", "--join", CLOSED, "--journal", str(tmp_path)], ExitCode.USAGE, f"{tmp_path}: cannot write"),
        (["bootstrap", "--listen", "192.0.2.1:0"], ExitCode.CANNOT_JOIN, "192.0.2.1:0"),
        (["train", TINY, "--join", CLOSED, "--steps", "1", STATE], ExitCode.USAGE, "/proc/x: "),
        (["local", TINY, "--steps", "1", "--keep", str(tmp_path / "file")], ExitCode.USAGE, f"{tmp_path}/file: "),
        (["local", TINY, "--steps", "1", "--data", "no/where"], ExitCode.USAGE, "no/where: no such file or folder"),
    ]
    for arguments, expected, words in cases:
        code, out, err = swarm(*arguments)
        assert (code, out) == (expected, ""), arguments
        assert len(err.splitlines()) == 1, err
        assert words in err


@pytest.mark.swarm
def test_done_is_0_and_a_full_disk_is_1(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    code, out, _ = swarm("reference", TINY, "--steps", "2", "--report", str(report))
    assert code == ExitCode.DONE
    assert json.loads(report.read_text())["steps"] == 2
    assert str(report) in out
    full = tmp_path / "full.json"
    code, _, err = swarm("reference", TINY, "--steps", "2", "--report", str(full), limit_file_bytes=64)
    assert code == ExitCode.FAILED
    assert f"{full}: cannot write: File too large" in last_line(err)
    assert [path.name for path in tmp_path.iterdir() if "full" in path.name] == []


@pytest.mark.swarm
@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.DONE)]
)
def test_a_bootstrap_prints_one_address_and_ends_when_told_to(number: int, expected: ExitCode) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "peers", "bootstrap", "--listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("/ip4/127.0.0.1/tcp/")
        assert "/tcp/0/" not in address
        code, out, _ = swarm("status", "--join", f" {address}, ")  # blanks and a comma do no harm
        assert code == ExitCode.DONE
        assert "no run is published" in out
        code, _, err = swarm("status", "--join", address, "--run", "other")
        assert code == ExitCode.CANNOT_JOIN
        assert "no run 'other'" in last_line(err)
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out, err) == (expected, "", "")


FULL = OSError(errno.ENOSPC, "No space left on device", "/data/x")


GONE = BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.mark.fast
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FULL, "swarm: /data/x: No space left on device\n"),
        (ExceptionGroup("tasks", [ExceptionGroup("more", [FULL])]), "swarm: /data/x: No space left on device\n"),
        (OSError(errno.EMFILE, "Too many open files"), "swarm: Too many open files\n"),
        (GONE, ""),
        (ExceptionGroup("tasks", [GONE]), ""),
    ],
)
def test_what_the_machine_lacks_is_one_line(
    error: Exception, said: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> ExitCode:
        raise error

    assert guarded(fails) == ExitCode.FAILED
    assert capsys.readouterr().err == said
    assert caplog.records == []


@pytest.mark.fast
def test_other_errors_keep_their_trace(caplog: pytest.LogCaptureFixture) -> None:
    """Of asyncio's TimeoutError, which is an OSError as well, a line would say nothing."""

    def late() -> ExitCode:
        raise TimeoutError

    def several() -> ExitCode:
        raise ExceptionGroup("tasks", [FULL, KeyError("x")])

    with pytest.raises(TimeoutError):
        guarded(late)
    assert guarded(several) == ExitCode.FAILED
    (record,) = caplog.records
    assert record.exc_info is not None


@pytest.mark.fast
def test_the_second_signal_ends_at_once() -> None:
    """Also when the program does not end by itself after the first."""
    program = (
        "import asyncio, os, signal\n"
        "from peers import life\n"
        "from swarm.errors import ExitCode\n"
        "async def stubborn():\n"
        "    print('ready', flush=True)\n"
        "    while True:\n"
        "        try: await asyncio.sleep(60)\n"
        "        except asyncio.CancelledError: print('no', flush=True)\n"
        "life.run(stubborn(), on_sigterm=ExitCode.DONE)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "no\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == -signal.SIGINT


@pytest.mark.fast
def test_a_signal_before_the_program_has_begun(tmp_path: Path) -> None:
    """Ctrl-C during the imports is no traceback."""
    code, err = _interrupted_while("time.sleep(60)")
    assert code == ExitCode.INTERRUPTED
    assert err == ""


def _interrupted_while(doing: str) -> tuple[int, str]:
    program = (
        "import sys, time, types\n"
        "import peers.cli\n"
        "def main(options):\n"
        "    print('ready', flush=True)\n"
        f"    {doing}\n"
        "sys.modules['peers.status'] = types.SimpleNamespace(main=main)\n"
        f"sys.argv = ['swarm', 'status', '--join', '{CLOSED}']\n"
        "peers.cli.main()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
        return process.returncode, err
