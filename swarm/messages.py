"""What trainers and peers say to each other, as values.  The wire form is proto/swarm/wire/v1."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.ids import Digest, MicrobatchId, PeerId, RunHash, SessionId
from swarm.records import CommitRecord, Lineage, PeerState, Term
from swarm.tensors import TensorData


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """Whom to call: one life of a peer and where its server is."""

    peer: PeerId
    session: SessionId
    endpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKey:
    """Which step of which lineage a message is about, and on whose word.

    ``lineage.length`` is the step: step t computes on the parameters that t commits made.
    """

    run: RunHash
    stage: int
    term: Term
    lineage: Lineage

    @property
    def step(self) -> int:
        """Index of the step, from 0."""
        return self.lineage.length


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchCall:
    """Head of every forward and backward."""

    key: StepKey
    microbatch: MicrobatchId
    try_number: int
    """Raised each time the microbatch's backward is sent to another peer of the stage."""
    attempt: int
    """Attempt at closing the step in which this is sent: 0 until the first close."""
    deadline_seconds: float
    """Time left for the answer, measured from the arrival of the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRequest:
    """Run a stage forward.  ``inputs`` are token ids (B, T) int64 at stage 0, else activations (B, T, D)."""

    call: MicrobatchCall
    inputs: TensorData
    keep_graph: bool = True
    """Cache the autograd graph for the backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardRequest:
    """Run a stage backward and, if ``accumulate``, add the gradient to the step's.

    ``seed`` is the gradient of the stage's output (B, T, D); at the last stage it is the targets (B, T) int64,
    of which negative ones are not trained on.  ``inputs`` may be left out if the peer ran the forward.
    """

    call: MicrobatchCall
    inputs: TensorData | None
    seed: TensorData
    tokens: int
    """Targets that count: the microbatch's weight in the mean."""
    accumulate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardReply:
    """``input_gradient`` (B, T, D): not at stage 0.  ``loss`` (sum over tokens, nats): from the last stage only."""

    input_gradient: TensorData | None
    loss: float | None
    accumulated: bool
    """This peer holds the microbatch's gradient for the step (now, or already before)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VoidRequest:
    """Do not add tries lower than ``below_try`` of this microbatch."""

    key: StepKey
    microbatch: MicrobatchId
    below_try: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VoidReply:
    """``held``: the gradient was added already and stays."""

    held: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """A lead raises its term at a peer and asks what it holds.

    With ``lineage``, that of the run, a peer which is more than one commit away fetches state; with ``distrust``
    (its parameters differ from its group's) it does so even if it claims this lineage.
    """

    run: RunHash
    term: Term
    lineage: Lineage | None = None
    distrust: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedMark:
    """A complete averaged gradient that a peer holds for the step on top of its parameters."""

    attempt: int
    digest: Digest
    squared_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReport:
    """What a peer is and holds.  ``commits`` are the last few applied, oldest first."""

    peer: PeerId
    session: SessionId
    stage: int
    state: PeerState
    term: Term
    lineage: Lineage
    reduced: ReducedMark | None
    commits: tuple[CommitRecord, ...]
    queue: int
    forward_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMicrobatch:
    """One microbatch in a peer's gradient of the step."""

    microbatch: MicrobatchId
    try_number: int
    tokens: int
    samples: int
    """Sequences in it, as the peer counted them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeRequest:
    """Close the step for ``attempt``: add nothing sent in it or before, and say what is held."""

    key: StepKey
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeReply:
    """What this life of the peer holds for the step."""

    session: SessionId
    held: tuple[HeldMicrobatch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropRequest:
    """Throw the whole gradient of the step away (the lead repairs its microbatches elsewhere)."""

    key: StepKey
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """One member of an all-reduce and exactly what it contributes; nothing means weight 0."""

    contact: Contact
    microbatches: tuple[MicrobatchId, ...]
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceRequest:
    """All-reduce the stage's gradient among ``members``; a result counts only with weight ``total_tokens``."""

    key: StepKey
    attempt: int
    members: tuple[GroupMember, ...]
    total_tokens: int
    deadline_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceReply:
    """A complete result, or (``reduced`` is None) who was missed and why it failed.

    ``samples`` are the sequences in this member's own contribution.
    """

    reduced: ReducedMark | None
    samples: int
    unreachable: tuple[PeerId, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptRequest:
    """Fetch the reduced gradient with ``digest`` from one of ``donors`` instead of reducing."""

    key: StepKey
    attempt: int
    digest: Digest
    donors: tuple[Contact, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyRequest:
    """Apply a commit.  ``donors`` hold the stage's reduced gradient, for whoever missed the reduce."""

    key: StepKey
    commit: CommitRecord
    donors: tuple[Contact, ...]
    digest: bool = False
    """Answer with a digest of all parameters as well; their norm is always told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMark:
    """What the parameters of a peer look like after a commit; ``digest`` only if asked for."""

    lineage: Lineage
    squared_norm: float
    digest: Digest | None
    numeric_class: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRequest:
    """Ask a donor for its state: parameters, optimizer, commits."""

    run: RunHash
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateHead:
    """What a donor is about to send, before the bytes: one snapshot, never a mix."""

    lineage: Lineage
    commits: tuple[CommitRecord, ...]
    digest: Digest
    """Of all payload bytes that follow."""
    total_bytes: int
    layout: str
    """JSON: name, dtype and shape of each tensor in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientRequest:
    """Ask a donor for the reduced gradient of the commit on top of ``parent``."""

    run: RunHash
    stage: int
    parent: Lineage
    digest: Digest
