"""What is written down: lineage, commits, and what peers and trainers say of themselves on the DHT."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from functools import lru_cache
from typing import Any

from swarm.ids import Digest, MicrobatchId, PeerId, RunHash, SessionId


@dataclass(frozen=True, slots=True, order=True)
class Term:
    """Which lead to believe: the greatest one seen."""

    number: int
    trainer: PeerId


NO_TERM = Term(0, PeerId(""))
"""What a peer follows before any lead has spoken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Which parameters these are: the hash chain of all commits that made them.

    ``length`` is the number of commits in the chain, which is the version of the parameters.
    """

    generation: int
    length: int
    chain: Digest

    @staticmethod
    def root(run: RunHash) -> Lineage:
        """The lineage of parameters initialised from the run's seed."""
        return Lineage(generation=0, length=0, chain=Digest(run))

    def after(self, commit: CommitRecord) -> Lineage:
        """The lineage once ``commit`` is applied."""
        digest = hashlib.sha256(f"{self.chain}\n{commit.to_json()}".encode()).hexdigest()
        return Lineage(generation=self.generation, length=self.length + 1, chain=Digest(digest))

    def rank(self) -> tuple[int, int, tuple[int, ...]]:
        """Sort key: of two lineages the greater one wins (generation, then length, then lower hash)."""
        return (self.generation, self.length, tuple(-ord(c) for c in self.chain))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCommit:
    """What one stage contributed to a commit."""

    members: tuple[PeerId, ...]
    attempt: int
    digest: Digest
    squared_norm: float
    samples: int
    """Sequences in the gradient, summed over what the members held at the reduce."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """One optimizer update of all stages: the decision, and all that is needed to apply it.

    ``losses`` are sums over the tokens of each microbatch of ``microbatches``, in nats;
    ``excluded`` were not finite at two peers and are in no stage's gradient.
    """

    step: int
    term: Term
    parent: Digest
    stages: tuple[StageCommit, ...]
    microbatches: tuple[MicrobatchId, ...]
    excluded: tuple[MicrobatchId, ...]
    tokens: tuple[int, ...]
    losses: tuple[float, ...]
    clip_factor: float

    @property
    def loss(self) -> float:
        """Mean loss per token of the step, in nats."""
        return sum(self.losses) / max(1, sum(self.tokens))

    def to_json(self) -> str:
        """Canonical text: the same record gives the same bytes everywhere."""
        return _commit_text(self)

    @staticmethod
    def from_json(text: str) -> CommitRecord:
        """Inverse of :meth:`to_json`.  Raises ValueError, KeyError or TypeError on malformed text."""
        try:
            return CommitRecord._from_raw(json.loads(text))
        except (OverflowError, RecursionError) as error:
            raise ValueError(f"no commit record: {error}") from None

    @staticmethod
    def _from_raw(raw: dict[str, Any]) -> CommitRecord:
        return CommitRecord(
            step=int(raw["step"]),
            term=Term(int(raw["term"]["number"]), PeerId(str(raw["term"]["trainer"]))),
            parent=Digest(str(raw["parent"])),
            stages=tuple(
                StageCommit(
                    members=tuple(PeerId(str(m)) for m in s["members"]),
                    attempt=int(s["attempt"]),
                    digest=Digest(str(s["digest"])),
                    squared_norm=float(s["squared_norm"]),
                    samples=int(s["samples"]),
                )
                for s in raw["stages"]
            ),
            microbatches=tuple(MicrobatchId(int(m)) for m in raw["microbatches"]),
            excluded=tuple(MicrobatchId(int(m)) for m in raw["excluded"]),
            tokens=tuple(int(t) for t in raw["tokens"]),
            losses=tuple(float(x) for x in raw["losses"]),
            clip_factor=float(raw["clip_factor"]),
        )


@lru_cache(maxsize=16)
def _commit_text(commit: CommitRecord) -> str:
    """Kept for a while: it is asked for at every step by whoever hashes, sends or logs the commit."""
    raw = {item.name: getattr(commit, item.name) for item in fields(commit)}
    raw["term"], raw["stages"] = asdict(commit.term), [asdict(stage) for stage in commit.stages]
    return json.dumps(raw, sort_keys=True, separators=(",", ":"))


class PeerState(StrEnum):
    """What a peer is doing, in its own word."""

    JOINING = "joining"
    """Has no usable parameters yet: fetching, or waiting for a donor."""
    READY = "ready"
    """Serves calls at its version."""
    DRAINING = "draining"
    """Takes no new work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRecord:
    """What a peer says of itself on the DHT; signed by its key, expiring, renewed."""

    peer: PeerId
    session: SessionId
    run: RunHash
    protocol: int
    stage: int
    endpoint: str
    """HOST:PORT at which its gRPC server is reached."""
    state: PeerState
    lineage: Lineage
    forward_seconds: float
    """Measured or probed seconds of one microbatch's forward; 0 if unknown."""
    queue: int
    """Calls waiting for its compute thread."""
    numeric_class: str
    """Device type and torch build: peers of one class compute the same bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadRecord:
    """The lead's lease on the DHT: a hint.  ``counter`` moves at each renewal."""

    trainer: PeerId
    session: SessionId
    run: RunHash
    term: Term
    counter: int
    lineage: Lineage
