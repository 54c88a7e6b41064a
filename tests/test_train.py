"""How a run ended is told by its exit, whatever becomes of its screen and report."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peers.train import TrainOptions, TrainProgram
from swarm.config import load
from swarm.errors import StateLost, UsageError
from swarm.ids import Digest, PeerId
from swarm.messages import StateMark
from swarm.records import CommitRecord, Lineage, StageCommit, Term
from swarm.roles.trainer import Progress, Trainer
from swarm.telemetry.screen import Screen

pytestmark = pytest.mark.fast

CONFIG = load(Path("examples/tiny.toml"))
PEER = PeerId("12D3KooWSSRLCggrPhcTrM2Rkg2ScHrDHTdAfCGaf4oWRge9Fnib")
ROOT = Lineage.root(CONFIG.hash)
STAGE = StageCommit(members=(PEER,), attempt=0, digest=Digest("a" * 64), squared_norm=1.0, samples=4)


def commit(step: int, loss: float) -> CommitRecord:
    return CommitRecord(
        step=step, term=Term(1, PEER), parent=ROOT.chain, stages=(STAGE,) * CONFIG.model.stage_count,
        microbatches=(), excluded=(), tokens=(10,), losses=(10 * loss,), clip_factor=1.0,
    )  # fmt: skip


class EndedTrainer:
    """Has made two steps, one of them in an earlier life; then ends as it is told to."""

    def __init__(self, end: Exception | None) -> None:
        self.end = end
        self.roster = SimpleNamespace(stages=[{} for _ in range(CONFIG.model.stage_count)])
        mark = StateMark(lineage=ROOT, squared_norm=4.0, digest=Digest("b" * 64), numeric_class="cpu")
        self.progress = Progress(
            lineage=Lineage(generation=0, length=2, chain=Digest("c" * 64)),
            commits=[commit(0, 5.5), commit(1, 4.25)],
            marks=[{PEER: mark}, {}, {PEER: mark}],
            step_seconds={1: 0.5},
        )

    async def run(self, steps: int) -> None:
        await asyncio.sleep(0)
        if self.end is not None:
            raise self.end


def conclude(end: Exception | None, report: Path | None) -> None:
    options = TrainOptions(
        config=CONFIG, join=(), steps=2, state_dir=Path("none"), state_timeout_seconds=60.0, report=report, journal=None
    )

    async def main() -> None:
        with Screen(2) as screen:
            await TrainProgram(options)._train(cast(Trainer, EndedTrainer(end)), screen)

    asyncio.run(main())


def unwritable(folder: Path) -> Path:
    (folder / "report.json").mkdir()
    return folder / "report.json"


def test_a_report_that_fails_does_not_hide_how_the_run_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StateLost, match="held by nobody"):
        conclude(StateLost("held by nobody"), unwritable(tmp_path))
    assert "2 steps (1 of them by this process)" in capsys.readouterr().out
    (record,) = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert record.getMessage() == "and the report failed"


def test_after_a_good_end_it_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"report\.json: cannot write"):
        conclude(None, unwritable(tmp_path))
    assert "microbatches 0 completed" in capsys.readouterr().out


def test_a_screen_that_fails_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(Screen, "update", fail)
    conclude(None, tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["steps"] == 2
    (record,) = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert record.getMessage() == "the run is not shown any more"


def test_the_end_in_words_and_in_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    conclude(None, path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].startswith("2 steps (1 of them by this process) in 0 s, 20 tokens/s, loss 5.500 -> 4.250")
    assert lines[-2] == "microbatches 0 completed, 0 retried, 0 repaired, 0 excluded"
    assert lines[-1] == f"report: {path}, plot: {path.with_suffix('.png')}"
    report = json.loads(path.read_text())
    assert report["parameter_norms"] == [2.0, None, 2.0]  # a stage that nobody could tell of keeps its place
    assert report["parameter_digest"] == ["b" * 64, "", "b" * 64]
