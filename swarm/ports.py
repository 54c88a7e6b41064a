"""The seams: what roles need from the world.  Real adapters and simulated ones implement these."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, TypeVar

from swarm.config import RunConfig
from swarm.ids import Digest, MicrobatchId, RunHash
from swarm.messages import (
    AdoptRequest,
    ApplyRequest,
    BackwardReply,
    BackwardRequest,
    Contact,
    DropRequest,
    ForwardRequest,
    FreezeReply,
    FreezeRequest,
    GradientRequest,
    Greeting,
    PeerReport,
    ReducedMark,
    ReduceReply,
    ReduceRequest,
    StateHead,
    StateMark,
    StateRequest,
    VoidReply,
    VoidRequest,
)
from swarm.records import CommitRecord, LeadRecord, PeerRecord
from swarm.tensors import Buffer, TensorData

T = TypeVar("T")


class Clock(Protocol):
    """Monotonic time and waiting."""

    def now(self) -> float:
        """Seconds since some fixed instant; never goes back."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""


class Directory(Protocol):
    """Who is there.  Records expire unless renewed; views may be stale."""

    async def announce(self, record: PeerRecord) -> None:
        """Publish or renew this process's own record."""

    async def withdraw(self, record: PeerRecord) -> None:
        """Make the own record expire now."""

    async def peers(self, run: RunHash, stage: int) -> list[PeerRecord]:
        """All living records of a stage, invalid ones left out."""

    async def lead(self, run: RunHash) -> LeadRecord | None:
        """The lease of the greatest term, if any."""

    async def renew_lead(self, record: LeadRecord) -> None:
        """Publish or renew this process's own lease."""

    async def publish_run(self, config: RunConfig) -> None:
        """Publish or renew a run's config under its content hash."""

    async def runs(self) -> list[RunConfig]:
        """All published configs, invalid ones left out ([data] is the default section)."""


class Chunks(Protocol):
    """Bytes that a donor sends.  Whoever stops before the end closes them, or the donor keeps its copy for long."""

    def __aiter__(self) -> AsyncIterator[Buffer]: ...

    async def __anext__(self) -> Buffer: ...

    async def aclose(self) -> None:
        """Let the donor go."""


class StageCalls(Protocol):
    """Calls to a peer.  Every call raises Retryable or Refused, within ``timeout_seconds``."""

    async def forward(self, to: Contact, request: ForwardRequest) -> TensorData:
        """Run the stage forward within ``request.call.deadline_seconds``."""

    async def backward(self, to: Contact, request: BackwardRequest) -> BackwardReply:
        """Run the stage backward within ``request.call.deadline_seconds``."""

    async def void(self, to: Contact, request: VoidRequest, timeout_seconds: float) -> VoidReply:
        """Tell a peer that lower tries must not be added."""

    async def greet(self, to: Contact, request: Greeting, timeout_seconds: float) -> PeerReport:
        """Raise the term at a peer and read what it holds."""

    async def freeze(self, to: Contact, request: FreezeRequest, timeout_seconds: float) -> FreezeReply:
        """Close the step at a peer."""

    async def drop(self, to: Contact, request: DropRequest, timeout_seconds: float) -> None:
        """Make a peer throw its gradient of the step away."""

    async def reduce(self, to: Contact, request: ReduceRequest, timeout_seconds: float) -> ReduceReply:
        """Have a peer take part in an all-reduce."""

    async def adopt(self, to: Contact, request: AdoptRequest, timeout_seconds: float) -> ReducedMark:
        """Have a peer fetch a complete reduced gradient from another."""

    async def apply(self, to: Contact, request: ApplyRequest, timeout_seconds: float) -> StateMark:
        """Have a peer apply a commit."""

    async def fetch_state(self, to: Contact, request: StateRequest, timeout_seconds: float) -> tuple[StateHead, Chunks]:
        """Ask a donor for its state.  ``timeout_seconds`` bounds the head and the gap between two chunks."""

    async def fetch_gradient(self, to: Contact, request: GradientRequest, timeout_seconds: float) -> Chunks:
        """Ask a donor for a reduced gradient; same time-out as :meth:`fetch_state`."""


class StageService(Protocol):
    """The peer's side of :class:`StageCalls`: roles implement it, servers call it."""

    async def forward(self, request: ForwardRequest) -> TensorData: ...
    async def backward(self, request: BackwardRequest) -> BackwardReply: ...
    async def void(self, request: VoidRequest) -> VoidReply: ...
    async def greet(self, request: Greeting) -> PeerReport: ...
    async def freeze(self, request: FreezeRequest) -> FreezeReply: ...
    async def drop(self, request: DropRequest) -> None: ...
    async def reduce(self, request: ReduceRequest) -> ReduceReply: ...
    async def adopt(self, request: AdoptRequest) -> ReducedMark: ...
    async def apply(self, request: ApplyRequest) -> StateMark: ...
    async def fetch_state(self, request: StateRequest) -> tuple[StateHead, AsyncIterator[Buffer]]: ...
    async def fetch_gradient(self, request: GradientRequest) -> AsyncIterator[Buffer]: ...

    def admit(self, request_kind: str, deadline_seconds: float) -> None:
        """Called before the tensor of a forward or backward is accepted; raises Busy, Draining or Stale."""


class Priority(IntEnum):
    """Order of work in the compute queue; lower runs first."""

    CONTROL = 0
    BACKWARD = 1
    FORWARD = 2
    BACKGROUND = 3


class Executor(Protocol):
    """The peer's one compute thread: jobs run one at a time, so what they share needs no locks."""

    async def run(self, priority: Priority, job: Callable[[], T]) -> T:
        """Run ``job`` there.  A job whose awaiting task is cancelled before it starts is never run."""

    @property
    def waiting(self) -> int:
        """Jobs that are queued or running."""


@dataclass(slots=True, kw_only=True)
class Gradient:
    """A microbatch's gradient, computed apart: nothing is added yet."""

    input_gradient: TensorData | None
    loss: float | None
    finite: bool
    """Of the gradients of the input and of all parameters, and of the loss."""
    samples: int
    handle: Any
    """The parameters' gradients, in the module's own form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The key of a microbatch's randomness (dropout): the same at any peer, device and cut."""

    step: int
    microbatch: MicrobatchId


class StageModule(Protocol):
    """Parameters, optimizer and gradient of one stage.  Methods run on the executor's thread, never in parallel."""

    def check_forward(self, request: ForwardRequest) -> None:
        """Raise BadRequest if the tensors do not fit the stage (dtype, shape; ids are checked by value later)."""

    def check_backward(self, request: BackwardRequest) -> None:
        """Raise BadRequest if the tensors do not fit the stage."""

    def probe(self) -> float:
        """Seconds of one microbatch's forward, measured on made-up data; warms up, and leaves nothing behind."""

    def forward(self, draw: Draw, inputs: TensorData, *, keep_graph: bool) -> TensorData:
        """Raises NotFinite ('input' or 'output') and BadRequest (ids out of range)."""

    def backward(self, draw: Draw, inputs: TensorData | None, seed: TensorData) -> Gradient:
        """Compute a gradient and add nothing.  Raises NeedsInput if ``inputs`` is None and the graph is gone."""

    def accumulate(self, gradient: Gradient) -> None:
        """Add a gradient to the step's sum."""

    def drop_gradient(self) -> None:
        """Zero the step's sum."""

    def gradient_sum(self) -> Any:
        """The step's sum, in the form that the Averager takes; unchanged until the next accumulate or drop."""

    @property
    def gradient_bytes(self) -> int:
        """Size of the averaged gradient in bytes."""

    def set_reduced(self, mean: Any) -> tuple[Digest, float]:
        """Keep the averaged gradient; returns its digest and squared norm."""

    def reduced_bytes(self) -> Buffer:
        """The averaged gradient last set, as raw bytes."""

    def load_reduced(self, data: Buffer) -> tuple[Digest, float]:
        """Inverse of :meth:`reduced_bytes`.  Raises ValueError on a wrong size."""

    def apply(self, step: int, clip_factor: float) -> float:
        """Update the parameters by the averaged gradient, forget graphs and sum; returns their squared norm."""

    def squared_norm(self) -> float:
        """Of all parameters."""

    def digest(self) -> Digest:
        """Of all parameters."""

    def snapshot(self) -> tuple[str, Sequence[Buffer]]:
        """Layout (JSON) and a copy of parameters and optimizer state."""

    def load(self, layout: str, data: Buffer) -> None:
        """Take over a snapshot.  Raises ValueError if it does not fit, and then changes nothing."""

    def reset(self) -> None:
        """Initialise from the run's seed, as at version 0."""


class Averager(Protocol):
    """Decentralized all-reduce within explicit groups."""

    async def reduce(self, request: ReduceRequest, gradient_sum: Any) -> Any:
        """Sum over members divided by ``total_tokens``; bit-equal at all members of one numeric class.

        Raises ReduceFailed if any averaged part lacks weight, or the deadline passes.
        """


class CommitLog(Protocol):
    """The trainer's own memory of what was committed; survives its process."""

    def read(self) -> list[CommitRecord]:
        """All records, oldest first."""

    def append(self, commit: CommitRecord) -> None:
        """Add one record."""


class Batches(Protocol):
    """The trainer's data: one function of (seed, step), whoever trains."""

    def microbatch(self, step: int, microbatch: MicrobatchId) -> tuple[TensorData, TensorData, int]:
        """Inputs (B, T) int64, targets (B, T) int64, and the number of targets that count."""


class Journal(Protocol):
    """What happened, for the screen, the report and tests."""

    def record(self, kind: str, **fields: str | int | float | None) -> None:
        """Note an event; may be called from any thread.  ``peer`` and ``stage`` are the usual fields."""
