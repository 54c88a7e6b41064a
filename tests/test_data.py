"""Microbatches are one function of (seed, step); bad texts are refused in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.config import RunConfig, parse
from swarm.data.text import PIECE_BYTES, TextBatches
from swarm.errors import UsageError
from swarm.ids import MicrobatchId
from swarm.tensors import TensorData

pytestmark = pytest.mark.fast

ROWS, COLUMNS = 3, 16


def make_config(path: Path | None, glob: str = "**/*.txt", seed: int = 1) -> RunConfig:
    return parse(
        {
            "run": {"name": "test", "seed": seed},
            "model": {"layers": 1, "width": 8, "heads": 1, "sequence_length": COLUMNS},
            "data": {"path": None if path is None else str(path), "glob": glob},
            "optimizer": {"learning_rate": 0.1},
            "step": {"microbatches": 4, "microbatch_size": ROWS},
        },
        "test",
    )


def numbers(data: TensorData) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    assert data.spec.dtype == "int64"
    return np.frombuffer(data.data, dtype=np.int64).reshape(data.spec.shape)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("text")
    (root / "deep").mkdir()
    (root / "b.txt").write_text(" ".join(map(str, range(500))), encoding="utf-8")
    (root / "a.txt").write_text("first \u00e9\u00e8 " * 50, encoding="utf-8")
    (root / "deep" / "c.txt").write_text("third " * 50, encoding="utf-8")
    (root / "left.out").write_bytes(b"\xff\xfe")
    return root


def test_folder_is_read_in_sorted_order(folder: Path) -> None:
    batches = TextBatches(make_config(folder))
    names = ["a.txt", "b.txt", "deep/c.txt"]
    assert batches.text == b"".join((folder / name).read_bytes() for name in names)
    assert len(batches.digest) == 64


@given(step=st.integers(0, 1 << 40), microbatch=st.integers(0, 1 << 20), seed=st.integers(0, (1 << 63) - 1))
def test_rows_are_pieces_of_the_text(folder: Path, step: int, microbatch: int, seed: int) -> None:
    batches = TextBatches(make_config(folder, seed=seed))
    inputs, targets, tokens = batches.microbatch(step, MicrobatchId(microbatch))
    assert inputs.spec.shape == targets.spec.shape == (ROWS, COLUMNS)
    assert tokens == ROWS * COLUMNS
    for given_, wanted in zip(numbers(inputs), numbers(targets), strict=True):
        assert bytes([*given_.tolist(), wanted[-1]]) in batches.text
        assert given_[1:].tolist() == wanted[:-1].tolist()
    again = TextBatches(make_config(folder, seed=seed)).microbatch(step, MicrobatchId(microbatch))
    assert again == (inputs, targets, tokens)


def test_every_part_of_the_key_counts(folder: Path) -> None:
    batches = TextBatches(make_config(folder))
    other_seed = TextBatches(make_config(folder, seed=2))
    drawn = [
        batches.microbatch(0, MicrobatchId(0)),
        batches.microbatch(1, MicrobatchId(0)),
        batches.microbatch(0, MicrobatchId(1)),
        other_seed.microbatch(0, MicrobatchId(0)),
    ]
    assert len({bytes(inputs.data) for inputs, _, _ in drawn}) == len(drawn)
    assert len({row.tobytes() for row in numbers(drawn[0][0])}) == ROWS


def test_all_of_the_text_can_be_drawn(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(32, 32 + COLUMNS + 3)))
    batches = TextBatches(make_config(tmp_path))
    starts = {int(row[0]) for step in range(20) for row in numbers(batches.microbatch(step, MicrobatchId(0))[0])}
    assert starts == {32, 33, 34}


def test_default_text_is_the_standard_library() -> None:
    batches = TextBatches(make_config(None, glob="*.py"))
    assert b"def " in batches.text
    assert len(batches.text) > 1 << 20


def test_the_cap_of_the_default_text_may_cut_a_character() -> None:
    whole = TextBatches(make_config(None, glob="*.py")).text
    cut = next(index for index, byte in enumerate(whole) if byte > 127) + 1
    assert TextBatches(make_config(None, glob="*.py"), default_cap_bytes=cut).text == whole[:cut]


@pytest.mark.parametrize("files", [1, 3])
def test_a_text_of_ones_own_is_never_cut(tmp_path: Path, files: int) -> None:
    """Not at the cap of the default text, and not at the pieces in which it is read (here within characters)."""
    for number in range(files):
        (tmp_path / f"{number}.txt").write_bytes(b"x" * number + "\u20ac".encode() * (PIECE_BYTES // 2))
    path = tmp_path if files > 1 else tmp_path / "0.txt"
    batches = TextBatches(make_config(path), default_cap_bytes=50)
    assert batches.text == b"".join(file.read_bytes() for file in sorted(tmp_path.iterdir()))


def test_a_bad_byte_of_any_piece_is_named(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    good = "\u20ac".encode() * (PIECE_BYTES // 3 + 10)
    for bad in (b"\xff", b"\xe2\x82"):
        file.write_bytes(good + bad)
        with pytest.raises(UsageError, match=rf"not UTF-8 \(byte {len(good)}\)"):
            TextBatches(make_config(file))
    file.write_bytes(b"x" * (PIECE_BYTES - 1) + b"\xe2x")
    with pytest.raises(UsageError, match=rf"not UTF-8 \(byte {PIECE_BYTES - 1}\)"):
        TextBatches(make_config(file))


def test_a_single_file(folder: Path) -> None:
    assert TextBatches(make_config(folder / "b.txt")).text == (folder / "b.txt").read_bytes()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "no text"),
        (b"x" * COLUMNS, f"{COLUMNS} bytes of text, but a sequence needs {COLUMNS + 1}"),
        (b"abc\xff" * 50, "not UTF-8 .byte 3."),
        (b"x" * 50 + b"\xc3", "not UTF-8 .byte 50."),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=problem) as caught:
        TextBatches(make_config(file))
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone\.txt: no such file"):
        TextBatches(make_config(tmp_path / "gone.txt"))
    with pytest.raises(UsageError, match="no text in it"):
        TextBatches(make_config(tmp_path))
    for glob in ("", "/etc/*"):
        with pytest.raises(UsageError, match=r"data\.glob"):
            TextBatches(make_config(tmp_path, glob=glob))
