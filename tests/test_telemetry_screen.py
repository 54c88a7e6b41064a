"""What a person sees: progress, screen, report and logs."""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from swarm.errors import RunFailed, UsageError
from swarm.telemetry.logs import LineFormatter, RateLimit, configure
from swarm.telemetry.plot import plot_losses
from swarm.telemetry.progress import Pace, PeerRow, RunView, StageRow, in_words, line
from swarm.telemetry.report import Failure, Microbatches, Report, Verification, ensure_writable, write_atomically
from swarm.telemetry.screen import Screen, picture
from tests.telemetry_case import A, HandClock

pytestmark = pytest.mark.fast

# --- progress and screen ----------------------------------------------------------


def test_pace_is_a_mean_over_the_window() -> None:
    assert Pace(began_seconds=0.0).tokens_per_second is None
    assert Pace(began_seconds=0.0).eta_seconds(5, 1.0) is None
    pace = Pace(began_seconds=0.0, window=2)
    pace.step(10.0, 100)  # slow, and out of the window two steps later
    assert pace.eta_seconds(5, 10.0) == 50.0
    pace.step(11.0, 100)
    pace.step(12.0, 100)
    assert pace.tokens_per_second == 100.0
    assert pace.eta_seconds(5, 12.0) == 5.0
    assert pace.eta_seconds(5, 12.5) == 4.5
    assert pace.eta_seconds(5, 99.0) == 4.0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "-"), (0.2, "0:00"), (42, "0:42"), (725, "12:05"), (11220, "3:07:00"), (59.6, "1:00"), (190800, "2d 5h")],
)
def test_durations_in_words(seconds: float | None, words: str) -> None:
    assert in_words(seconds) == words


def view(steps_done: int = 12, peers: int = 2, waiting: str = "") -> RunView:
    """A run of three stages."""
    row = PeerRow(name="3f2a", state="ready", version=12, rate=3.25, share=0.5, queue=2)
    stages = tuple(StageRow(stage=stage, peers=(row,) * peers) for stage in range(3))
    return RunView(
        name="demo",
        steps_done=steps_done,
        steps_total=100,
        loss=3.2145,
        tokens_per_second=1234.4,
        eta_seconds=83,
        stages=stages,
        waiting=waiting,
    )


def shown(value: RunView, *, width: int = 80, height: int = 24, events: tuple[str, ...] = ()) -> list[str]:
    """The lines of the live screen."""
    out = io.StringIO()
    Console(file=out, width=width, height=height, color_system=None).print(picture(value, events, height=height))
    return [text.rstrip() for text in out.getvalue().splitlines()]


def test_the_screen_shows_the_run_in_80_columns() -> None:
    lines = shown(view(waiting="stage 1 has no peer " + "x" * 100), events=("peer 3f2a of stage 1 died",))
    assert max(map(len, lines)) <= 80
    assert lines[0] == "demo  step 12/100  loss 3.2145  1234 tokens/s  ETA 1:23"
    assert lines[3].split() == ["stage", "peer", "state", "version", "mb/s", "share", "queue"]
    assert lines[4].split() == ["0", "3f2a", "ready", "12", "3.25", "50%", "2"]
    assert lines[5].split() == ["3f2a", "ready", "12", "3.25", "50%", "2"]
    assert lines[10].startswith("waiting: stage 1 has no peer")
    assert lines[11] == "peer 3f2a of stage 1 died"
    assert len(lines) == 12


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("peers", [0, 1, 3, 500])
def test_the_screen_fits_any_terminal(width: int, peers: int) -> None:
    lines = shown(view(peers=peers, waiting="x" * 300), width=width, events=("y" * 300,) * 6)
    assert max(map(len, lines)) <= width
    assert len(lines) <= 24
    if peers == 500:
        assert sum("more" in text for text in lines) == 3


def test_a_plain_screen_writes_one_line_per_step_and_event() -> None:
    out = io.StringIO()
    with Screen(100, console=Console(file=out, width=40)) as screen:  # no terminal: plain by itself
        screen.update(view(0))
        screen.update(view(1))
        screen.update(view(1))
        screen.event("peer [3f2a] of stage 1 died, 2 microbatches repaired by 9c41")
        screen.update(view(1, waiting="stage 1"))
        screen.update(view(1, waiting="stage 1"))
        screen.update(view(2))
    assert out.getvalue().splitlines() == [
        line(view(1)),
        "peer [3f2a] of stage 1 died, 2 microbatches repaired by 9c41",
        "waiting: stage 1",
        line(view(2)),
    ]
    assert "\x1b" not in out.getvalue()


def test_the_total_is_the_constructors_if_the_view_has_none() -> None:
    out = io.StringIO()
    screen = Screen(7, plain=True, console=Console(file=out))
    screen.update(RunView(steps_done=1))
    assert out.getvalue() == "step 1/7\n"


def test_a_live_screen_draws_at_4_hz_and_always_the_last_view() -> None:
    out, clock = io.StringIO(), HandClock()
    console = Console(file=out, force_terminal=True, width=80, height=24)
    with Screen(100, console=console, now_seconds=clock) as screen:
        for step in range(1, 11):  # ten views within a tenth of a second
            clock.seconds += 0.01
            screen.update(view(step))
        assert "step 1/100" in out.getvalue()
        assert "step 2/100" not in out.getvalue()
        clock.seconds += 0.25
        screen.update(view(11))
        assert "step 11/100" in out.getvalue()
        screen.event("peer 3f2a died")
        screen.update(view(12))
    assert "step 12/100" in out.getvalue()
    assert "peer 3f2a died" in out.getvalue()
    screen.close()


# --- report -----------------------------------------------------------------------


def made_report(verify: Verification | None = None) -> Report:
    """A report of two steps over two stages."""
    return Report(
        config_hash="ab" * 32,
        steps=2,
        losses=(3.5, math.nan),
        tokens_per_second=812.5,
        cpu_seconds=20.25,
        wall_seconds=10.5,
        microbatches=Microbatches(sent=9, completed=8, repaired=1),
        samples_per_stage_and_step=((16, 16), (16, 16)),
        failures=(Failure(time_seconds=3.5, peer=A, stage=1, kind="kill"),),
        parameter_norms=(1.5, 2.5),
        parameter_digest=("cd" * 32, "ef" * 32),
        verify=verify,
    )


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "demo" / "report.json"
    verify = Verification(relative_difference=1e-6, loss_difference=1e-7, tolerance=5e-4, ok=True)
    made_report(verify).write(path)
    raw = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert raw["losses"] == [3.5, None]
    assert raw["samples_per_stage_and_step"][1] == [16, 16]
    assert raw["verify"]["ok"] is True
    assert Report.read(path) == made_report(verify)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert os.listdir(path.parent) == ["report.json"]
    made_report().write(path)
    assert Report.read(path).verify is None


def test_a_report_that_cannot_be_written_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "report.json"):
        with pytest.raises(UsageError, match=str(path)):
            made_report().write(path)
        with pytest.raises(UsageError, match=str(path)):
            ensure_writable(path)
    ensure_writable(tmp_path / "later" / "report.json")
    assert sorted(os.listdir(tmp_path)) == ["file", "later"]


def test_a_full_disk_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFailed, match=r"report\.json.*No space left"):
        write_atomically(path, b"new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_file_that_is_no_report_is_named(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("{}")
    with pytest.raises(UsageError, match=str(path)):
        Report.read(path)
    with pytest.raises(UsageError, match="none"):
        Report.read(tmp_path / "none")


def test_the_plot_is_a_picture_with_both_curves_and_the_failures(tmp_path: Path) -> None:
    path = tmp_path / "loss.png"
    losses = [5.5 * 0.97**step for step in range(60)]
    plot_losses(path, losses)
    plain = path.read_bytes()
    assert plain.startswith(b"\x89PNG")
    plot_losses(path, [*losses[:30], None, *losses[31:]], losses, [10.5, 40.25], title="demo")
    assert path.read_bytes() != plain
    with pytest.raises(UsageError, match=str(tmp_path)):
        plot_losses(tmp_path, losses)


# --- logs -------------------------------------------------------------------------


@pytest.fixture
def logging_restored() -> Iterator[None]:
    """configure() changes global state: put it back."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_record_is_one_line_whatever_it_says(logging_restored: None) -> None:
    out = io.StringIO()
    configure(stream=out)
    log = logging.getLogger("swarm.try")
    log.info("from outside: %s", "a\n12:00:00.000 ERROR faked\x1b[2J")
    try:
        raise ValueError("inside")
    except ValueError:
        log.exception("it broke")
    logging.getLogger("hivemind.p2p").info("chatter")
    logging.getLogger("grpc").warning("heard")
    first, second, third = out.getvalue().splitlines()
    assert "INFO swarm.try: from outside: a | 12:00:00.000 ERROR faked\\x1b[2J" in first
    assert "it broke | Traceback" in second
    assert "ValueError: inside" in second
    assert third.endswith("WARNING grpc: heard")
    assert "\x1b" not in out.getvalue()


def test_colours_only_where_asked_for() -> None:
    record = logging.LogRecord("swarm", logging.ERROR, "", 0, "x", None, None)
    assert "\x1b[31mERROR" in LineFormatter(colours=True).format(record)
    assert "\x1b" not in LineFormatter().format(record)


def test_repetition_is_limited_and_counted() -> None:
    clock, passed = HandClock(), []
    limit = RateLimit(burst=2, period_seconds=10, kinds=2, now_seconds=clock)

    def say(template: str, *values: object) -> None:
        record = logging.LogRecord("swarm", logging.WARNING, "", 0, template, values, None)
        if limit.filter(record):
            passed.append(record.getMessage())

    for number in range(5):
        say("bad record from %s", number)
    say("another kind")
    assert passed == ["bad record from 0", "bad record from 1", "another kind"]
    clock.seconds += 10
    say("bad record from %s", 5)
    say("bad record from %s", 6)
    assert passed[3:] == ["bad record from 5 (3 like this left out)", "bad record from 6"]
