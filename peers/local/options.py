"""What ``swarm local`` was asked for."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.steps import steps_of
from swarm.config import RunConfig, load
from swarm.errors import UsageError
from swarm.telemetry.report import ensure_writable


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """What ``swarm local`` was asked for, checked."""

    run_file: Path
    overrides: dict[str, Any]
    config: RunConfig
    peers: tuple[int, ...]
    steps: int
    kill_every_seconds: float | None = None
    start_every_seconds: float | None = None
    slowness: dict[tuple[int, int], float]
    state_timeout_seconds: float = 60.0
    verify: bool = False
    report: Path | None = None
    keep: Path | None = None

    @staticmethod
    def parse(options: argparse.Namespace) -> LocalOptions:
        """Raises UsageError."""
        from peers.cli import overrides

        config = load(options.run_file, overrides(options))
        count = config.model.stage_count
        peers = options.peers or (1,) * count
        if len(peers) != count:
            raise UsageError(f"--peers {','.join(map(str, peers))}: the model has {count} stages; give {count} numbers")
        for stage, index, factor in options.slow:
            if stage >= count or index >= peers[stage]:
                raise UsageError(f"--slow {stage}.{index}:{factor:g}: there is no peer {index} of stage {stage}")
        if options.report is not None:
            ensure_writable(options.report)
        return LocalOptions(
            run_file=options.run_file,
            overrides=overrides(options),
            config=config,
            peers=peers,
            steps=steps_of(config, options.steps),
            kill_every_seconds=options.kill_every,
            start_every_seconds=options.start_every,
            slowness={(stage, index): factor for stage, index, factor in options.slow},
            state_timeout_seconds=options.state_timeout,
            verify=options.verify,
            report=options.report,
            keep=options.keep,
        )
