"""What roles rely on of a commit log and of a journal."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from swarm.ports import CommitLog, Executor, Journal, Priority
from swarm.sim.executor import SimulatedExecutor
from swarm.sim.lives import EventList, MemoryLog
from swarm.stage.executor import ThreadExecutor
from swarm.storage.commit_log import FileCommitLog
from swarm.telemetry.journal import EventJournal
from tests.contract.worlds import FAST, REAL, Real, Simulated, World, world_fixture
from tests.stage_double import COMMIT, LINEAGE


@dataclass(frozen=True)
class Storage:
    open_log: Callable[[], CommitLog]
    """The log as the next process of the same trainer finds it."""
    journal: Journal
    events: Callable[[], list[tuple[float, str, Mapping[str, Any]]]]
    executor: Executor


@asynccontextmanager
async def simulated() -> AsyncIterator[Storage]:
    log, journal = MemoryLog(), EventList()
    yield Storage(lambda: log, journal, lambda: list(journal.events), SimulatedExecutor())


@asynccontextmanager
async def real() -> AsyncIterator[Storage]:
    executor = ThreadExecutor()
    with TemporaryDirectory() as folder, EventJournal(path=Path(folder) / "events.jsonl") as journal:
        yield Storage(
            lambda: FileCommitLog(Path(folder) / "commits.jsonl"),
            journal,
            lambda: [(event.time_seconds, event.kind, event.fields) for event in journal.events],
            executor,
        )
    executor.close()


world = world_fixture((Simulated, simulated, FAST), (Real, real, REAL))

NEXT = replace(COMMIT, step=1, parent=LINEAGE.after(COMMIT).chain, losses=(5e-324, 1.7e308))


# --- commit log ---------------------------------------------------------------------------


def test_a_log_gives_back_what_was_appended_oldest_first(world: World[Storage]) -> None:
    async def test(storage: Storage) -> None:
        log = storage.open_log()
        assert log.read() == []
        log.append(COMMIT)
        assert log.read() == [COMMIT]
        log.append(NEXT)
        assert log.read() == [COMMIT, NEXT]

    world.run(test)


def test_a_log_survives_its_process(world: World[Storage]) -> None:
    """Bit for bit: the lineage is a hash of the records."""

    async def test(storage: Storage) -> None:
        storage.open_log().append(COMMIT)
        log = storage.open_log()
        assert log.read() == [COMMIT]
        log.append(NEXT)
        first, second = storage.open_log().read()
        assert LINEAGE.after(first).after(second) == LINEAGE.after(COMMIT).after(NEXT)
        assert second.parent == LINEAGE.after(first).chain

    world.run(test)


def test_what_is_read_is_the_readers_own(world: World[Storage]) -> None:
    async def test(storage: Storage) -> None:
        log = storage.open_log()
        log.append(COMMIT)
        log.read().clear()
        before = log.read()
        log.append(NEXT)
        assert before == [COMMIT]
        assert log.read() == [COMMIT, NEXT]

    world.run(test)


# --- journal ------------------------------------------------------------------------------


def test_a_journal_keeps_events_in_order_with_their_fields(world: World[Storage]) -> None:
    async def test(storage: Storage) -> None:
        storage.journal.record("began")
        storage.journal.record("state_fetched", peer="p", stage=1, seconds=0.5, version=None)
        events = storage.events()
        assert [(kind, dict(fields)) for _, kind, fields in events] == [
            ("began", {}),
            ("state_fetched", {"peer": "p", "stage": 1, "seconds": 0.5, "version": None}),
        ]
        assert [at for at, _, _ in events] == sorted(at for at, _, _ in events)

    world.run(test)


def test_a_journal_takes_numbers_that_are_not_finite(world: World[Storage]) -> None:
    async def test(storage: Storage) -> None:
        storage.journal.record("odd", loss=math.inf)
        assert storage.events()[0][2]["loss"] == math.inf

    world.run(test)


def test_a_job_of_the_compute_thread_may_record(world: World[Storage]) -> None:
    async def test(storage: Storage) -> None:
        await storage.executor.run(Priority.CONTROL, lambda: storage.journal.record("applied", step=3))
        storage.journal.record("after")
        assert [kind for _, kind, _ in storage.events()] == ["applied", "after"]

    world.run(test)
