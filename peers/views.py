"""A trainer as a screen shows it."""

from __future__ import annotations

from swarm.config import RunConfig
from swarm.ids import short
from swarm.policy.routing import BACKWARD_UNITS, FORWARD_UNITS
from swarm.records import PeerState
from swarm.roles.roster import Member
from swarm.roles.trainer import Trainer
from swarm.telemetry.progress import Pace, PeerRow, RunView, StageRow


def view_of(config: RunConfig, trainer: Trainer, pace: Pace, steps: int, now_seconds: float) -> RunView:
    """The run at this moment."""
    progress = trainer.progress
    done = progress.lineage.length if progress.lineage is not None else 0
    stages = []
    for index, members in enumerate(trainer.roster.stages):
        total = sum(member.credited for member in members.values())
        rows = [_row(member, total) for member in sorted(members.values(), key=lambda m: m.peer)]
        stages.append(StageRow(stage=index, peers=tuple(rows)))
    return RunView(
        name=config.run.name,
        steps_done=done,
        steps_total=steps,
        loss=progress.commits[-1].loss if progress.commits else None,
        tokens_per_second=pace.tokens_per_second,
        eta_seconds=pace.eta_seconds(steps - done, now_seconds),
        stages=tuple(stages),
        waiting=_waiting(trainer),
    )


def _row(member: Member, total: int) -> PeerRow:
    seconds = member.lane.seconds_per_unit * (FORWARD_UNITS + BACKWARD_UNITS)
    return PeerRow(
        name=short(member.peer),
        state="suspect" if member.health.suspected else str(member.state),
        version=member.lineage.length,
        rate=1.0 / seconds if member.lane.measurements else None,
        share=member.credited / total if total else None,
        queue=round(member.lane.outstanding_units / (FORWARD_UNITS + BACKWARD_UNITS)),
    )


def _waiting(trainer: Trainer) -> str:
    if trainer.progress.lineage is None:
        missing = [str(s) for s, m in enumerate(trainer.roster.stages) if not m]
        return f"for peers of stage {', '.join(missing)}" if missing else "for the peers' answers"
    empty = []
    for stage in sorted(trainer.progress.empty):
        joining = sum(m.state is PeerState.JOINING for m in trainer.roster.stages[stage].values())
        empty.append(f"for a peer of stage {stage}" + (f" ({joining} joining)" if joining else ""))
    return "; ".join(empty)
