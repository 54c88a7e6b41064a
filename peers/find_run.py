"""Which run of a swarm is meant."""

from __future__ import annotations

import logging

from swarm.config import RunConfig
from swarm.errors import UsageError
from swarm.ports import Clock, Directory

POLL_SECONDS = 1.0
REMIND_SECONDS = 30.0

_log = logging.getLogger(__name__)


async def find_run(directory: Directory, clock: Clock, name: str | None) -> RunConfig:
    """The run called ``name``, or the only one; waits until it is published.

    Raises UsageError if several could be meant.
    """
    said = float("-inf")
    while True:
        runs = [config for config in await directory.runs() if name in (None, config.run.name)]
        if len({config.hash for config in runs}) > 1:
            runs = await _living(directory, runs) or runs
        if len(runs) == 1:
            return runs[0]
        if runs:
            found = ", ".join(f"{config.run.name} ({config.hash[:12]})" for config in runs)
            raise UsageError(f"several runs share this swarm: {found}; choose one with --run NAME")
        if clock.now() - said > REMIND_SECONDS:
            said = clock.now()
            what = f"run '{name}'" if name else "a run"
            _log.info("waiting for %s to be published by `swarm train`", what)
        await clock.sleep(POLL_SECONDS)


async def _living(directory: Directory, runs: list[RunConfig]) -> list[RunConfig]:
    """Runs that a peer serves or a trainer leads; others only linger on the DHT."""
    living = []
    for config in runs:
        stages = range(config.model.stage_count)
        if await directory.lead(config.hash) or any([await directory.peers(config.hash, s) for s in stages]):
            living.append(config)
    return living
