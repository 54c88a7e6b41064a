"""What a single process would hold after the same commits, for every branch of the run that was ever begun."""

from __future__ import annotations

from swarm.config import RunConfig
from swarm.ids import Digest, MicrobatchId
from swarm.messages import ApplyRequest
from swarm.records import CommitRecord, Lineage
from swarm.sim.arithmetic import NumericBatches, Vector, initial, train_step
from swarm.sim.numeric import Poison
from swarm.sim.weather import Call


class Violation(AssertionError):
    """A guarantee of the protocol does not hold."""


class Truth:
    """Parameters of all stages by lineage, from the commits' microbatches alone and independently of any peer.

    Microbatches of ``poisons`` must be left out of a commit, those of ``sick`` may be; any other must be in it.
    """

    def __init__(self, config: RunConfig, poisons: frozenset[Poison], sick: frozenset[Poison]) -> None:
        root = Lineage.root(config.hash)
        self._parameters: dict[Digest, list[Vector]] = {
            root.chain: [initial(stage) for stage in range(config.model.stage_count)]
        }
        self._everything = frozenset(MicrobatchId(m) for m in range(config.step.microbatches))
        self._poisoned = {(poison.step, poison.microbatch) for poison in poisons}
        self._sick = {(poison.step, poison.microbatch) for poison in sick}

    def may_miss(self, step: int, microbatch: MicrobatchId) -> None:
        """It was not finite at a peer, so it may be left out."""
        self._sick.add((step, microbatch))

    def is_hopeless(self, step: int) -> bool:
        """Every microbatch of the step may be left out: a run that ends there ends rightly."""
        return all((step, m) in self._poisoned | self._sick for m in self._everything)

    def saw(self, call: Call) -> None:
        """Learn a commit from the first call that carries it, before any peer can have applied it."""
        if isinstance(call.request, ApplyRequest):
            lineage = call.request.key.lineage
            if lineage.after(call.request.commit).chain not in self._parameters:
                self._learn(call.request.commit, lineage)

    def parameters(self, lineage: Lineage, stage: int) -> Vector:
        """Of one stage at ``lineage``.  Raises Violation if no commit ever led there."""
        found = self._parameters.get(lineage.chain)
        if found is None:
            raise Violation(f"nobody ever committed lineage {lineage.chain[:8]} (version {lineage.length})")
        return found[stage]

    def _learn(self, commit: CommitRecord, parent: Lineage) -> None:
        if commit.parent != parent.chain or commit.step != parent.length:
            raise Violation(f"commit of step {commit.step} was sent for version {parent.length}")
        self._check_microbatches(commit)
        after, losses = train_step(self._parameters[parent.chain], commit.step, commit.microbatches)
        if list(commit.losses) != losses:
            raise Violation(f"step {commit.step} committed losses {commit.losses}, not {losses}")
        self._parameters[parent.after(commit).chain] = after

    def _check_microbatches(self, commit: CommitRecord) -> None:
        kept, excluded = frozenset(commit.microbatches), frozenset(commit.excluded)
        if kept | excluded != self._everything or kept & excluded or len(kept) != len(commit.microbatches):
            raise Violation(f"step {commit.step} committed {commit.microbatches}, excluded {commit.excluded}")
        guilty = {m for m in kept if (commit.step, m) in self._poisoned}
        if guilty:
            raise Violation(f"step {commit.step} contains {sorted(guilty)}, which are finite nowhere")
        innocent = {m for m in excluded if (commit.step, m) not in self._poisoned | self._sick}
        if innocent:
            raise Violation(f"step {commit.step} left out {sorted(innocent)}, which are finite everywhere")
        batches = NumericBatches()
        tokens = tuple(batches.microbatch(commit.step, m)[2] for m in commit.microbatches)
        if commit.tokens != tokens:
            raise Violation(f"step {commit.step} committed tokens {commit.tokens}, not {tokens}")
        for stage, part in enumerate(commit.stages):
            if part.samples != len(kept):
                raise Violation(f"step {commit.step}: {part.samples} samples at stage {stage}, not {len(kept)}")
