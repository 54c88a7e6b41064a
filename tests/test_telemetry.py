"""What people see: the journal survives its process, events read well, screens fit, reports are whole or not there."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import UsageError
from swarm.ports import Journal
from swarm.telemetry.journal import Event, EventJournal, Value, read_events
from swarm.telemetry.words import describe
from tests.telemetry_case import A, B, HandClock

pytestmark = pytest.mark.fast

FULL = Path("/dev/full")


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
