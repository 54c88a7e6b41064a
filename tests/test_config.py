"""The run's config: what is refused and in which words, what is published, and what its hash stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from swarm import config
from swarm.config import RunConfig
from swarm.errors import ExitCode, UsageError
from swarm.ids import RunHash

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parent.parent

RIGHT: dict[str, dict[str, Any]] = {
    "run": {"name": "try", "seed": 3},
    "model": {"layers": 5, "width": 32, "heads": 4, "sequence_length": 16, "stages": 3},
    "data": {"path": "/somewhere"},
    "optimizer": {"learning_rate": 1e-3},
    "step": {"microbatches": 8, "microbatch_size": 2},
}

MISSING = object()


def changed(key: str, value: object) -> dict[str, Any]:
    """RIGHT with one 'section.key' set, or left out."""
    raw = {section: dict(keys) for section, keys in RIGHT.items()}
    section, _, name = key.partition(".")
    target = raw.setdefault(section, {})
    if value is MISSING:
        del target[name]
    else:
        target[name] = value
    return raw


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("run.name", "", "run.name"),
        ("run.name", "a b", "run.name"),
        ("run.name", "../up", "run.name"),
        ("run.name", "x" * 65, "run.name"),
        ("run.name", MISSING, "run.name: field required"),
        ("run.seed", -1, "run.seed"),
        ("run.seed", 2**63, "run.seed"),
        ("run.sede", 1, "run.sede: no such key"),
        ("model.kind", "encoder", "model.kind"),
        ("model.layers", 0, "model.layers"),
        ("model.layers", "six", "model.layers"),
        ("model.width", 30, "width 30 is not a multiple of heads 4"),
        ("model.heads", MISSING, "model.heads"),
        ("model.vocabulary", 255, "vocabulary 255 is too small"),
        ("model.sequence_length", 0, "model.sequence_length"),
        ("model.stages", 0, "stages must be from 1 to layers (5), not 0"),
        ("model.stages", 6, "stages must be from 1 to layers (5), not 6"),
        ("model.stages", [2, 2], "[2, 2] must be positive and add up to layers 5"),
        ("model.stages", [5, 0], "[5, 0] must be positive"),
        ("model.stages", [], "layers per stage [] must be positive"),
        ("model.dropout", 1.0, "model.dropout"),
        ("model.dropout", float("nan"), "model.dropout"),
        ("data.tokenizer", "words", "data.tokenizer"),
        ("optimizer.name", "lion", "optimizer.name"),
        ("optimizer.learning_rate", 0, "optimizer.learning_rate"),
        ("optimizer.learning_rate", float("inf"), "optimizer.learning_rate"),
        ("optimizer.learning_rate", MISSING, "optimizer.learning_rate"),
        ("optimizer.schedule", "cosine", "schedule 'cosine' needs total_steps"),
        ("optimizer.schedule", "step", "optimizer.schedule"),
        ("optimizer.warmup_steps", -1, "optimizer.warmup_steps"),
        ("optimizer.momentum", 1.0, "optimizer.momentum"),
        ("optimizer.betas", [0.9], "optimizer.betas"),
        ("optimizer.betas", [0.9, 1.0], "optimizer.betas: betas must lie in [0, 1)"),
        ("optimizer.epsilon", 0, "optimizer.epsilon"),
        ("optimizer.clip_norm", 0, "optimizer.clip_norm"),
        ("step.microbatches", 0, "step.microbatches"),
        ("step.microbatches", 1.5, "step.microbatches"),
        ("step.microbatch_size", 0, "step.microbatch_size"),
        ("step.staleness", 2, "step.staleness"),
        ("steps.microbatches", 1, "steps: no such key"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_key(key: str, value: object, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        config.parse(changed(key, value), "run.toml")
    message = str(caught.value)
    assert message.startswith("run.toml: ")
    assert words in message
    assert "\n" not in message
    assert caught.value.exit_code is ExitCode.USAGE


def test_all_wrong_keys_are_named_at_once() -> None:
    raw = changed("model.layers", 0)
    raw["step"] = {"microbatches": 0, "microbatch_size": 0}
    with pytest.raises(UsageError, match=r"model\.layers.*step\.microbatches.*step\.microbatch_size"):
        config.parse(raw, "run.toml")


def test_more_warmup_than_steps() -> None:
    raw = changed("optimizer.total_steps", 5)
    raw["optimizer"]["warmup_steps"] = 6
    with pytest.raises(UsageError, match="warmup_steps 6 exceeds total_steps 5"):
        config.parse(raw, "run.toml")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file"),
        (b"[run\n", "line 1"),
        (b"run = 3\n", "run:"),
        (b"\xff\xfe", "utf-8"),
        (b"", "run: field required"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        config.load(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


def test_a_folder_is_no_config(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=str(tmp_path)):
        config.load(tmp_path)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_the_examples_are_valid(path: Path) -> None:
    assert config.load(path).run.name == path.stem


def test_overrides_win_and_are_checked() -> None:
    path = ROOT / "examples" / "tiny.toml"
    assert config.load(path, {"run.seed": 9, "data.path": "/x"}).run.seed == 9
    with pytest.raises(UsageError, match=r"model\.layers"):
        config.load(path, {"model.layers": -1})
    with pytest.raises(UsageError, match=r"model\.depth: no such key"):
        config.load(path, {"model.depth": 1})


def test_the_hash_is_that_of_what_is_published() -> None:
    one = config.parse(RIGHT, "a")
    assert one.hash == config.parse(RIGHT, "b").hash
    assert one.hash == RunConfig.from_published(one.published(), one.hash).hash
    # Fails when the canonical form changes: peers of the old and new code would then not find each other's runs,
    # which is a change of the protocol.
    assert one.hash == "2b84bce7134e3a830ef2f056b3a1589a94b1a015d2d4c85222e641699c864347"


def test_data_is_not_published() -> None:
    one = config.parse(RIGHT, "a")
    assert "data" not in json.loads(one.published())
    assert "/somewhere" not in one.published()
    assert one.hash == config.parse(changed("data.path", "/elsewhere"), "a").hash
    assert RunConfig.from_published(one.published(), one.hash).data.path is None


def test_a_default_left_out_or_written_gives_the_same_hash() -> None:
    assert config.parse(changed("optimizer.momentum", 0.9), "a").hash == config.parse(RIGHT, "a").hash


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.name", "other"),
        ("run.seed", 4),
        ("model.layers", 6),
        ("model.stages", 2),
        ("model.dropout", 0.1),
        ("optimizer.learning_rate", 1.0001e-3),
        ("optimizer.clip_norm", 1.0),
        ("step.microbatches", 9),
    ],
)
def test_any_published_change_is_another_run(key: str, value: object) -> None:
    assert config.parse(changed(key, value), "a").hash != config.parse(RIGHT, "a").hash


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"run": 1}', "\x00", "9" * 5000])
def test_published_junk_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        RunConfig.from_published(text, RunHash("0" * 64))


def test_a_published_config_under_another_hash_is_refused() -> None:
    one = config.parse(RIGHT, "a")
    with pytest.raises(ValueError, match="config hash"):
        RunConfig.from_published(one.published(), RunHash("0" * 64))


def test_a_config_cannot_be_changed() -> None:
    one = config.parse(RIGHT, "a")
    with pytest.raises(ValidationError):
        one.run.seed = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (5, 1, (5,)),
        (6, 3, (2, 2, 2)),
        (5, 3, (1, 2, 2)),
        (7, 4, (1, 2, 2, 2)),
        (5, (3, 1, 1), (3, 1, 1)),
    ],
)
def test_layers_per_stage(layers: int, stages: int | tuple[int, ...], expected: tuple[int, ...]) -> None:
    raw = changed("model.layers", layers)
    raw["model"]["stages"] = stages
    model = config.parse(raw, "a").model
    assert model.layers_per_stage == expected
    assert model.stage_count == len(expected)


@given(layers=st.integers(1, 200), data=st.data())
def test_an_even_cut_loses_no_layer(layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, layers))
    raw = changed("model.layers", layers)
    raw["model"]["stages"] = stages
    cut = config.parse(raw, "a").model.layers_per_stage
    assert (len(cut), sum(cut)) == (stages, layers)
    assert max(cut) - min(cut) <= 1
    assert list(cut) == sorted(cut)


def test_the_manual_names_every_key() -> None:
    sections = (ROOT / "docs" / "config.md").read_text().split("\n## ")
    for name, field in RunConfig.model_fields.items():
        (text,) = [part for part in sections if part.startswith(f"[{name}]")]
        section = field.annotation
        assert isinstance(section, type)
        assert issubclass(section, BaseModel)
        named = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
        assert named == set(section.model_fields)
