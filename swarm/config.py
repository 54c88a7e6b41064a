"""A run's config: read from TOML, validated, frozen, published under its content hash."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from swarm.errors import UsageError
from swarm.ids import RunHash


class Section(BaseModel):
    """A table of a file: unknown keys and numbers that are none are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)


class RunSection(Section):
    """[run]: what the run is called, and the seed of everything drawn at random in it."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    seed: int = Field(default=0, ge=0, lt=2**63)


class ModelSection(Section):
    """[model]: a decoder and how it is cut into stages."""

    kind: Literal["decoder"] = "decoder"
    layers: int = Field(ge=1, le=4096)
    width: int = Field(ge=1, le=1 << 17)
    heads: int = Field(ge=1, le=4096)
    vocabulary: int = Field(default=256, ge=2, le=1 << 24)
    sequence_length: int = Field(ge=1, le=1 << 20)
    stages: int | tuple[int, ...] = 1
    """A number of stages, or the number of layers of each stage."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if isinstance(self.stages, int):
            if not 1 <= self.stages <= self.layers:
                raise ValueError(f"stages must be from 1 to layers ({self.layers}), not {self.stages}")
        elif not self.stages or min(self.stages) < 1 or sum(self.stages) != self.layers:
            raise ValueError(
                f"layers per stage {list(self.stages)} must be positive and add up to layers {self.layers}"
            )
        return self

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Layers of each stage; of an uneven cut the later stages get one more."""
        if not isinstance(self.stages, int):
            return self.stages
        base, extra = divmod(self.layers, self.stages)
        return tuple(base + (i >= self.stages - extra) for i in range(self.stages))

    @property
    def stage_count(self) -> int:
        """Number of stages."""
        return len(self.layers_per_stage)


class DataSection(Section):
    """[data]: where the trainer reads.  Never published."""

    path: str | None = None
    """A file or folder of UTF-8 text; by default the Python standard library's sources."""
    glob: str = "**/*.py"
    tokenizer: Literal["bytes"] = "bytes"


class OptimizerSection(Section):
    """[optimizer]: what happens to the averaged gradient."""

    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = Field(gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or down to zero at ``total_steps``."""
    warmup_steps: int = Field(default=0, ge=0)
    total_steps: int | None = Field(default=None, ge=1)
    weight_decay: float = Field(default=0.0, ge=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Of SGD."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Of AdamW."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Of AdamW."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Greatest norm of the gradient over all stages; none: not clipped."""

    @field_validator("betas")
    @classmethod
    def _betas(cls, value: tuple[float, float]) -> tuple[float, float]:
        if min(value) < 0 or max(value) >= 1:
            raise ValueError(f"betas must lie in [0, 1), not {list(value)}")
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.schedule != "constant" and self.total_steps is None:
            raise ValueError(f"schedule '{self.schedule}' needs total_steps")
        if self.total_steps is not None and self.warmup_steps > self.total_steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} exceeds total_steps {self.total_steps}")
        return self


class StepSection(Section):
    """[step]: what one optimizer step consists of."""

    microbatches: int = Field(ge=1, le=1 << 20)
    microbatch_size: int = Field(ge=1, le=1 << 16)
    """Sequences per microbatch."""
    staleness: Literal[0] = 0
    """Updates by which the parameters of a step may lag; only 0 so far."""


class RunConfig(Section):
    """All that peers must agree on, and (``data``) what stays with the trainer."""

    run: RunSection
    model: ModelSection
    data: DataSection = DataSection()
    optimizer: OptimizerSection
    step: StepSection

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.model.vocabulary < 256:
            raise ValueError(f"model.vocabulary {self.model.vocabulary} is too small: tokenizer 'bytes' needs 256")
        return self

    def published(self) -> str:
        """Canonical JSON of all but [data]: what goes on the DHT."""
        raw = self.model_dump(mode="json", exclude={"data"})
        return json.dumps(raw, sort_keys=True, separators=(",", ":"))

    @property
    def hash(self) -> RunHash:
        """Content hash of :meth:`published`."""
        return RunHash(hashlib.sha256(self.published().encode()).hexdigest())

    @staticmethod
    def from_published(text: str, expected: RunHash) -> RunConfig:
        """Parse a published config.  Raises ValueError if it is malformed or does not have the expected hash."""
        config = RunConfig.model_validate_json(text)
        if config.hash != expected:
            raise ValueError(f"config hash is {config.hash}, not {expected}")
        return config


def read_toml(path: Path) -> dict[str, Any]:
    """What a file says, unchecked.  Raises UsageError, one line that names the file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path}: not a TOML file: {error}") from None


def load(path: Path, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Read ``path`` (TOML); ``overrides`` maps 'section.key' to a value that wins over the file's.

    Raises UsageError, one line that names the file and the wrong key.
    """
    raw = read_toml(path)
    for key, value in (overrides or {}).items():
        section, _, name = key.partition(".")
        if not isinstance(raw.setdefault(section, {}), dict):
            raise UsageError(f"{path}: [{section}] must be a table")
        raw[section][name] = value
    return parse(raw, str(path))


def parse(raw: Mapping[str, Any], source: str) -> RunConfig:
    """Validate a nested mapping.  Raises UsageError, one line that names ``source`` and every wrong key."""
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        raise UsageError(f"{source}: " + "; ".join(problems(error))) from None


def problems(error: ValidationError) -> list[str]:
    """One line for each wrong key of a file, in words."""
    found: dict[str, str] = {}
    for item in error.errors(include_url=False):
        where = [str(part) for part in item["loc"] if part not in ("int", "tuple[int, ...]")]
        message = "no such key" if item["type"] == "extra_forbidden" else item["msg"].removeprefix("Value error, ")
        given = item["input"]
        if isinstance(given, str | int | float) and item["type"] != "extra_forbidden" and repr(given) not in message:
            message += f", not {given!r}"
        found.setdefault(".".join(where) or "config", message[0].lower() + message[1:])
    return [f"{key}: {message}" for key, message in found.items()]
