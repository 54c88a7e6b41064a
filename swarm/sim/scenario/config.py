"""A scenario file: which model, which machines, what befalls them, and which policies are compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from swarm.config import ModelSection, RunConfig, Section, StepSection, problems, read_toml
from swarm.config import parse as parse_run
from swarm.errors import UsageError
from swarm.policy.sizes import stage_parameters
from swarm.sim.weights import Overheads, Weights

Wiring = Literal["stochastic", "uniform", "static"]
OPTIMIZER_BYTES_PER_PARAMETER = 12
"""Parameters and two moments in float32: a stage's state."""


class ScenarioSection(Section):
    """[scenario]: how long, and what the report is called."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.,_ -]{0,63}$")
    hours: float | None = Field(default=None, gt=0, le=24 * 365)
    """Virtual time; or as long as ``steps`` take."""
    steps: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.hours is None) == (self.steps is None):
            raise ValueError("give hours or steps, one of the two")
        return self


class ScenarioModel(ModelSection):
    """[model]: as in a run file, and what only sizes depend on."""

    shared_layers: bool = False
    """One block of parameters a stage, applied once per layer: gradient and state are those of one layer."""
    item_bytes: int = Field(default=4, ge=1, le=8)
    """Of an element of activations and their gradients on the wire."""

    def run_model(self) -> ModelSection:
        """What the roles see."""
        return ModelSection.model_validate(self.model_dump(exclude={"shared_layers", "item_bytes"}))

    def forward_flops(self, tokens: int) -> float:
        """Of one layer: 24 d^2 + 4 d T per token (SWARM, appendix on the square-cube law)."""
        return tokens * (24.0 * self.width**2 + 4.0 * self.width * self.sequence_length)


class TrainerSection(Section):
    """[trainer]: where it runs, and how much it has under way."""

    up_mbit: float | None = Field(default=None, gt=0)
    down_mbit: float | None = Field(default=None, gt=0)
    latency_ms: float = Field(default=2.5, ge=0)
    window: int | None = Field(default=None, ge=1)
    """Microbatches in flight; by default as many as keep all peers busy."""


class OverheadSection(Section):
    """[overhead]: constants fitted to a real swarm (docs/simulation.md, calibration)."""

    call_ms: float = Field(default=1.0, ge=0)
    """Of each call, for packing, unpacking and waking up."""
    reduce_ms: float = Field(default=40.0, ge=0)
    """Of each all-reduce."""
    reduce_over_links: bool = True
    """False: the all-reduce takes another way than the calls, one without latency or limit."""

    def overheads(self) -> Overheads:
        """In seconds."""
        return Overheads(
            call_seconds=self.call_ms / 1e3,
            reduce_seconds=self.reduce_ms / 1e3,
            reduce_over_links=self.reduce_over_links,
        )


class PeerClass(Section):
    """[[peers]]: machines of one kind."""

    name: str = Field(alias="class", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$")
    count: int = Field(ge=0)
    forward_seconds: float | None = Field(default=None, gt=0)
    """Of one microbatch at a stage with the average number of layers; or by ``tflops``."""
    tflops: float | None = Field(default=None, gt=0)
    memory_gb: float | None = Field(default=None, gt=0)
    """For a stage's state and the graphs of microbatches; none: without limit."""
    up_mbit: float | None = Field(default=None, gt=0)
    down_mbit: float | None = Field(default=None, gt=0)
    latency_ms: float = Field(default=2.5, ge=0)
    """One way, to the middle of the network: half of the round trip between two such machines' near ends."""
    jitter: float = Field(default=0.0, ge=0, le=2)
    straggle_chance: float = Field(default=0.0, ge=0, le=1)
    straggle_factor: float = Field(default=10.0, ge=1)
    stages: tuple[int, ...] | None = None
    """How many of them serve each stage at first; by default where the optimal assignment puts them."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.forward_seconds is None) == (self.tflops is None):
            raise ValueError("give forward_seconds or tflops, one of the two")
        if self.stages is not None and sum(self.stages) != self.count:
            raise ValueError(f"stages {list(self.stages)} do not add up to count {self.count}")
        return self


class ChurnSection(Section):
    """[churn]: peers that die and come, by rates or after a trace of how many instances were alive."""

    mean_life_hours: float | None = Field(default=None, gt=0)
    mean_away_minutes: float = Field(default=10.0, gt=0)
    """Until another machine of the same class takes the place of one that died."""
    trace: Path | None = None
    """Lines of `time,instances alive`."""
    trace_unit: Literal["milliseconds", "seconds", "hours"] = "hours"
    trace_times: int = Field(default=1, ge=1)
    """Instances of the scenario for each of the trace; the class is the first one's."""
    slowdown: float = Field(default=1.0, gt=0)
    """How many times slower than in the trace things happen."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.mean_life_hours is None) == (self.trace is None):
            raise ValueError("give mean_life_hours or trace, one of the two")
        return self


class PolicySection(Section):
    """[compare]: one run for each combination."""

    wiring: tuple[Wiring, ...] = ("stochastic",)
    rebalancing: tuple[str, ...] = ("none",)
    """'none', 'oracle' (the optimal assignment, at once), or 'paper-SECONDS' (SWARM, Algorithm 2)."""
    joining: tuple[Literal["least", "random"], ...] = ("least",)
    """Which stage a newcomer takes: the one with the least throughput, or any."""
    move_costs: tuple[bool, ...] = (True,)
    """Whether whoever moves or joins downloads the stage's state over its link."""

    @field_validator("rebalancing")
    @classmethod
    def _rebalancing(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for rule in value:
            if rule not in ("none", "oracle") and not (rule.startswith("paper-") and rule[6:].isdigit()):
                raise ValueError(f"rebalancing is 'none', 'oracle' or 'paper-SECONDS', not {rule!r}")
        return value


class Scenario(Section):
    """All of a file."""

    scenario: ScenarioSection
    model: ScenarioModel
    step: StepSection
    trainer: TrainerSection = TrainerSection()
    overhead: OverheadSection = OverheadSection()
    peers: tuple[PeerClass, ...] = Field(min_length=1)
    churn: ChurnSection | None = None
    compare: PolicySection = PolicySection()

    @model_validator(mode="after")
    def _check(self) -> Self:
        stages = self.model.stage_count
        for peer_class in self.peers:
            if peer_class.stages is not None and len(peer_class.stages) != stages:
                raise ValueError(f"class {peer_class.name}: stages has {len(peer_class.stages)} numbers, not {stages}")
        if len({peer_class.name for peer_class in self.peers}) != len(self.peers):
            raise ValueError("two classes of peers have one name")
        if sum(peer_class.count for peer_class in self.peers) < stages:
            raise ValueError(f"fewer peers than the {stages} stages")
        return self

    def run_config(self) -> RunConfig:
        """What the roles are given."""
        return parse_run(
            {
                "run": {"name": "scenario"},
                "model": self.model.run_model().model_dump(),
                "optimizer": {"learning_rate": 1.0},
                "step": self.step.model_dump(),
            },
            self.scenario.name,
        )

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of one microbatch."""
        return self.step.microbatch_size * self.model.sequence_length

    def layer_seconds(self, peer_class: PeerClass) -> float:
        """Of one microbatch's forward through one layer, on a device of this class."""
        if peer_class.forward_seconds is not None:
            return peer_class.forward_seconds * self.model.stage_count / self.model.layers
        assert peer_class.tflops is not None
        return self.model.forward_flops(self.microbatch_tokens) / (peer_class.tflops * 1e12)

    def weights(self, *, move_costs: bool = True) -> Weights:
        """What messages weigh."""
        model = self.model
        parameters = [stage_parameters(model, stage) for stage in range(model.stage_count)]
        if model.shared_layers:
            layer = 12 * model.width**2 + 13 * model.width
            shared = [(layers - 1) * layer for layers in model.layers_per_stage]
            parameters = [count - repeated for count, repeated in zip(parameters, shared, strict=True)]
        state = OPTIMIZER_BYTES_PER_PARAMETER if move_costs else 0
        return Weights(
            ids_bytes=8 * self.microbatch_tokens,
            boundary_bytes=model.item_bytes * self.microbatch_tokens * model.width,
            gradient_bytes=tuple(4 * count for count in parameters),
            state_bytes=tuple(state * count for count in parameters),
        )


def load(path: Path) -> Scenario:
    """Read a scenario file.  Raises UsageError, one line that names the file and every wrong key."""
    scenario = parse(read_toml(path), str(path))
    churn = scenario.churn
    if churn is not None and churn.trace is not None and not churn.trace.is_absolute():
        churn = churn.model_copy(update={"trace": path.parent / churn.trace})
        scenario = scenario.model_copy(update={"churn": churn})
    return scenario


def parse(raw: Mapping[str, Any], source: str) -> Scenario:
    """Validate a nested mapping.  Raises UsageError."""
    try:
        return Scenario.model_validate(raw)
    except ValidationError as error:
        raise UsageError(f"{source}: " + "; ".join(problems(error))) from None
