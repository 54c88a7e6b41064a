"""Compare what a swarm ended with to the same run in a single process."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from peers import life
from swarm.config import RunConfig, load
from swarm.errors import ExitCode, Refused, Retryable, RunFailed
from swarm.ids import RunHash
from swarm.messages import Contact, StateRequest
from swarm.ports import Directory, StageCalls
from swarm.records import PeerRecord, PeerState
from swarm.telemetry.journal import EventJournal
from swarm.telemetry.progress import Pace, RunView
from swarm.telemetry.report import write_atomically

PARAMETER_TOLERANCE = 5e-4
"""norm(swarm - reference) / norm(reference - initial), the worst stage's: what float additions in another order may
make of a run is 1e-5 to 5e-5; one microbatch of 16 dropped once is 6e-3 or more (docs/exactness.md)."""
LOSS_TOLERANCE = 1e-4
"""Relative, of each step's loss."""
FETCH_SECONDS = 30.0
FIND_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is compared with what."""

    config: RunConfig
    join: str
    steps: int
    losses: tuple[float | None, ...]
    journal: Path
    output: Path


def run(arguments: Sequence[str]) -> int:
    """Entry point in the nursery: the JSON of a task is the only argument."""
    raw = json.loads(arguments[0])
    task = Task(
        config=load(Path(raw["run_file"]), raw["overrides"]),
        join=raw["join"],
        steps=raw["steps"],
        losses=tuple(raw["losses"]),
        journal=Path(raw["journal"]),
        output=Path(raw["output"]),
    )
    life.prepare()
    return life.run(_verify(task), on_sigterm=ExitCode.INTERRUPTED)


async def _verify(task: Task) -> None:
    journal = EventJournal(path=task.journal)
    states = await _fetch_states(task)
    journal.record("states_fetched")  # the swarm is not needed any more, and its cores are
    result = await asyncio.to_thread(_compare, task, states, journal)
    write_atomically(task.output, json.dumps(result).encode())
    journal.close()


async def _fetch_states(task: Task) -> list[tuple[str, bytearray]]:
    from swarm.dht.directory import HivemindDirectory
    from swarm.dht.node import start_node
    from swarm.rpc.client import GrpcStageCalls

    node = await start_node(join=[task.join], client=True)
    calls = GrpcStageCalls()
    try:
        directory = HivemindDirectory(node)
        stages = range(task.config.model.stage_count)
        return [await _fetch_state(task, directory, calls, stage) for stage in stages]
    finally:
        await calls.close()
        await node.close()


async def _fetch_state(task: Task, directory: Directory, calls: StageCalls, stage: int) -> tuple[str, bytearray]:
    run: RunHash = task.config.hash
    deadline = time.monotonic() + FIND_SECONDS
    problem = "no peer is at it"
    while time.monotonic() < deadline:
        for record in await directory.peers(run, stage):
            if record.lineage.length != task.steps or record.state is not PeerState.READY:
                continue
            try:
                return await _download(calls, record)
            except (Retryable, Refused) as error:
                problem = str(error)
        await asyncio.sleep(0.5)
    raise RunFailed(f"stage {stage}: its state at version {task.steps} cannot be fetched: {problem}")


async def _download(calls: StageCalls, record: PeerRecord) -> tuple[str, bytearray]:
    contact = Contact(peer=record.peer, session=record.session, endpoint=record.endpoint)
    head, chunks = await calls.fetch_state(contact, StateRequest(run=record.run, stage=record.stage), FETCH_SECONDS)
    data = bytearray()
    async for chunk in chunks:
        data += chunk
    return head.layout, data


def _compare(task: Task, states: list[tuple[str, bytearray]], journal: EventJournal) -> dict[str, object]:
    import torch

    from swarm.data.text import TextBatches
    from swarm.reference import Reference, relative_difference
    from swarm.stage.module import TorchStage

    torch.set_num_threads(1)
    reference = Reference(task.config, TextBatches(task.config))
    losses: list[float] = []
    pace = Pace(began_seconds=time.monotonic())
    for done in range(1, task.steps + 1):
        result = reference.step()
        losses.append(result.loss)
        now = time.monotonic()
        pace.step(now, result.tokens)
        view = RunView(
            name=f"{task.config.run.name}: the same in one process",
            steps_done=done,
            steps_total=task.steps,
            loss=result.loss,
            tokens_per_second=pace.tokens_per_second,
            eta_seconds=pace.eta_seconds(task.steps - done, now),
        )
        journal.record("view", view=json.dumps(asdict(view)))
    differences, norms, digests = [], [], []
    for stage, (layout, data) in enumerate(states):
        module = TorchStage(task.config, stage)
        module.load(layout, data)
        found = module.flat_parameters()
        differences.append(relative_difference(found, reference.parameters(stage), reference.initial[stage]))
        norms.append(math.sqrt(module.squared_norm()))
        digests.append(module.digest())
    pairs = [(swarm, single) for swarm, single in zip(task.losses, losses, strict=True)]
    loss_difference = max(
        (math.inf if swarm is None else abs(swarm - single) / abs(single) for swarm, single in pairs), default=0.0
    )
    worst = max(differences)
    return {
        "relative_difference": worst,
        "differences": differences,
        "loss_difference": loss_difference,
        "tolerance": PARAMETER_TOLERANCE,
        "ok": worst <= PARAMETER_TOLERANCE and loss_difference <= LOSS_TOLERANCE,
        "reference_losses": losses,
        "reference_tokens_per_second": pace.tokens_per_second,
        "parameter_norms": norms,
        "parameter_digest": digests,
    }
