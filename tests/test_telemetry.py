"""What people see: the journal survives its process, events read well, screens fit, reports are whole or not there."""

from __future__ import annotations

import asyncio
import errno
import io
import itertools
import json
import logging
import math
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from swarm.errors import RunFailed, UsageError
from swarm.ports import Journal
from swarm.telemetry.journal import Event, EventJournal, Value, read_events
from swarm.telemetry.logs import LineFormatter, RateLimit, configure
from swarm.telemetry.plot import plot_losses
from swarm.telemetry.progress import Pace, PeerRow, RunView, StageRow, in_words, line
from swarm.telemetry.report import Failure, Microbatches, Report, Verification, ensure_writable, write_atomically
from swarm.telemetry.screen import Screen, picture
from swarm.telemetry.words import describe

pytestmark = pytest.mark.fast

FULL = Path("/dev/full")


class HandClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


# --- journal ----------------------------------------------------------------------


def test_the_journal_keeps_the_last_events_with_their_time() -> None:
    clock = HandClock()
    journal = EventJournal(keep=2, now_seconds=clock)
    as_port: Journal = journal
    for step in range(3):
        clock.seconds += 1.5
        as_port.record("step", step=step)
    assert [(e.time_seconds, e.fields["step"]) for e in journal.events] == [(3.0, 1), (4.5, 2)]


def test_subscribers_see_each_event_at_once() -> None:
    seen: list[str] = []
    journal = EventJournal()
    journal.record("before")
    journal.subscribe(lambda event: seen.append(event.kind))
    journal.record("after")
    assert seen == ["after"]


def test_a_subscriber_in_a_loop_is_called_in_its_thread() -> None:
    async def main() -> None:
        journal, seen = EventJournal(), asyncio.Queue[tuple[str, int]]()
        journal.subscribe(lambda event: seen.put_nowait((event.kind, threading.get_ident())))
        journal.record("here")
        assert seen.get_nowait() == ("here", threading.get_ident())
        await asyncio.to_thread(journal.record, "there")
        assert await seen.get() == ("there", threading.get_ident())

    asyncio.run(main())


def test_a_subscriber_whose_loop_is_over_harms_nobody() -> None:
    journal = EventJournal()
    seen: list[str] = []

    async def main() -> None:
        journal.subscribe(lambda event: seen.append(event.kind))

    asyncio.run(main())
    thread = threading.Thread(target=journal.record, args=("late",))
    thread.start()
    thread.join()
    assert [event.kind for event in journal.events] == ["late"]
    assert seen == []


def test_events_of_several_threads_are_in_the_order_of_their_times(tmp_path: Path) -> None:
    """While one thread has its time and not yet its place, another tries to record."""
    path = tmp_path / "j"
    ticks = itertools.count()
    other = threading.Thread(target=lambda: journal.record("other"))

    def tick() -> float:
        now = float(next(ticks))
        if now == 1.0:
            other.start()
            other.join(0.2)
        return now

    with EventJournal(path=path, now_seconds=tick) as journal:
        journal.record("first")
        other.join()
    for events in (journal.events, read_events(path)[1:]):
        assert [(event.kind, event.time_seconds) for event in events] == [("first", 1.0), ("other", 2.0)]


def test_the_file_holds_all_lives_and_is_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "new" / "journal.jsonl"
    for life in range(2):
        with EventJournal(path=path) as journal:
            journal.record("step", step=life, loss=math.nan, note=None)
    for text in path.read_text().splitlines():
        json.loads(text, parse_constant=pytest.fail)
    assert [e.kind for e in read_events(path)] == ["journal", "step", "journal", "step"]
    assert read_events(path)[-1].fields == {"step": 1, "loss": "nan", "note": None}


def test_sigkill_loses_nothing_that_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    code = f"""
import os, signal
from pathlib import Path
from swarm.telemetry.journal import EventJournal
journal = EventJournal(path=Path({str(path)!r}))
for step in range(100):
    journal.record("step", step=step)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [e.fields["step"] for e in read_events(path)[1:]] == list(range(100))


def test_a_torn_line_harms_no_other(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"time_seconds":1.0,"kind":"step","fields":{}}\n{"time_sec')
    with EventJournal(path=path) as journal:
        journal.record("start")
    assert [e.kind for e in read_events(path)] == ["step", "journal", "start"]


def test_a_journal_that_cannot_be_opened_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=str(tmp_path)):
        EventJournal(path=tmp_path)
    with pytest.raises(UsageError, match="none"):
        read_events(tmp_path / "none")


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
def test_a_full_disk_does_not_stop_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "journal.jsonl"
    path.symlink_to(FULL)
    journal = EventJournal(path=path)
    journal.record("step", step=1)
    journal.record("step", step=2)
    assert journal.file_error is not None
    assert str(path) in journal.file_error
    assert len(journal.events) == 2
    assert len(caplog.records) == 1


@given(
    st.dictionaries(
        st.text(min_size=1),
        st.none() | st.text() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False),
    )
)
def test_events_survive_json(fields: dict[str, Value]) -> None:
    event = Event(time_seconds=1.25, kind="x", fields=fields)
    text = event.to_json()
    assert "\n" not in text
    assert Event.from_json(text) == event


# --- words ------------------------------------------------------------------------

A, B = "12D3KooW" + "x" * 40 + "3f2a", "12D3KooW" + "y" * 40 + "9c41"


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("step", {"step": 12, "loss": 3.21456, "tokens": 4096, "seconds": 2.0}, "step 12  loss 3.2146  2048 tokens/s"),
        ("start", {"peer": A, "stage": 1}, "started peer 3f2a of stage 1"),
        ("kill", {"peer": A, "stage": 1}, "killed peer 3f2a of stage 1"),
        ("peer_joined", {"peer": A, "stage": 1}, "peer 3f2a joined stage 1"),
        ("peer_lost", {"peer": A, "stage": 1}, "peer 3f2a of stage 1 died"),
        (
            "peer_lost",
            {"peer": A, "stage": 1, "reason": "no answer\n"},
            "peer 3f2a of stage 1 died: no answer ",
        ),
        (
            "peer_suspected",
            {"peer": A, "stage": 0, "reason": "late"},
            "peer 3f2a of stage 0 failed a call and is left alone for a while: late",
        ),
        ("repaired", {"count": 2, "stage": 1, "by": B}, "2 microbatches of stage 1 repaired by 9c41"),
        (
            "repaired",
            {"microbatches": 1, "stage": 1, "by": B, "peer": A},
            "1 microbatch of peer 3f2a of stage 1 repaired by 9c41",
        ),
        ("repaired", {"microbatches": 3, "stage": 1, "by": None, "peer": None}, "3 microbatches of stage 1 repaired"),
        (
            "repaired",
            {"count": 2, "stage": 1, "by": B, "lost": A},
            "peer 3f2a of stage 1 died, 2 microbatches repaired by 9c41",
        ),
        ("voided", {"microbatch": 7, "peer": A}, "microbatch 7 voided at 3f2a"),
        (
            "retried",
            {"microbatch": 7, "peer": A, "stage": 2, "reason": "no answer"},
            "microbatch 7 taken from peer 3f2a of stage 2: no answer",
        ),
        ("fenced", {"peer": A, "stage": 2, "reason": "x"}, "peer 3f2a of stage 2 sits the step out: x"),
        (
            "dropped",
            {"peer": A, "stage": 2, "microbatches": 3},
            "peer 3f2a of stage 2 dropped its gradient, 3 microbatches to repair",
        ),
        (
            "not_finite",
            {"peer": A, "stage": 2, "microbatch": 0, "where": "output"},
            "microbatch 0 not finite (output) at peer 3f2a of stage 2",
        ),
        ("apply_refused", {"peer": A, "reason": "stale"}, "peer 3f2a refused to apply: stale"),
        (
            "excluded",
            {"microbatch": 7, "step": 3},
            "microbatch 7 left out, not finite at two peers (step 3)",
        ),
        ("stage_empty", {"stage": 2}, "stage 2 has no peer, waiting for one"),
        ("stage_back", {"stage": 2}, "stage 2 has a peer again"),
        ("attempt_failed", {"attempt": 2, "step": 5, "reason": "x"}, "attempt 2 at step 5 failed: x"),
        (
            "attempt_failed",
            {"attempt": 0, "stage": 1, "left_out": 1, "reason": "x"},
            "attempt 0 of stage 1 failed: x (left_out 1)",
        ),
        ("committed", {"step": 5}, "step 5 committed"),
        ("superseded", {"trainer": A}, "another trainer (3f2a) leads this run"),
        ("state_fetched", {"peer": A, "stage": 1, "donor": B}, "peer 3f2a of stage 1 fetched its state from 9c41"),
        ("state_fetched", {"peer": B, "stage": 1}, "state of stage 1 fetched from 9c41"),
        ("something_new", {"a": 1, "b": 0.25, "c": None}, "something_new a=1 b=0.25 c=None"),
        ("peer_lost", {}, "a peer died"),
    ],
)
def test_events_in_words(kind: str, fields: dict[str, Value], words: str) -> None:
    assert describe(Event(time_seconds=0, kind=kind, fields=fields)) == words


@given(
    kind=st.sampled_from(["step", "peer_lost", "repaired", "excluded", "superseded", "attempt_failed", "other"]),
    fields=st.dictionaries(
        st.sampled_from(["peer", "stage", "step", "loss", "tokens", "seconds", "count", "by", "lost", "reason", "x"]),
        st.none() | st.text() | st.integers() | st.floats(),
    ),
)
def test_any_event_is_one_printable_line(kind: str, fields: dict[str, Value]) -> None:
    assert describe(Event(time_seconds=0, kind=kind, fields=fields)).isprintable()


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
