"""``swarm peer``: serves one stage of a run.  Puts real adapters behind the ports of :class:`swarm.roles.peer.Peer`."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from peers import life
from peers.clock import MonotonicClock
from peers.dht_place import DhtPlace, parse_dht_place
from peers.find_run import find_run
from peers.reachability import is_reachable
from swarm import PROTOCOL_VERSION
from swarm.config import RunConfig
from swarm.dht.addresses import Endpoint, announced, parse_announce, parse_join, parse_listen
from swarm.errors import BadRequest, CannotJoin, ExitCode, UsageError
from swarm.ids import new_session, short
from swarm.messages import Contact
from swarm.policy.placement import choose_stage
from swarm.policy.sizes import largest_tensor_bytes, stage_memory_bytes, stage_parameters
from swarm.ports import Averager, Clock, Directory, Executor, StageCalls, StageModule, StageService
from swarm.records import PeerRecord
from swarm.telemetry.journal import Event, EventJournal
from swarm.telemetry.words import describe
from swarm.tensors import TensorSpec

if TYPE_CHECKING:
    from swarm.dht.node import SwarmNode
    from swarm.roles.peer import Peer
    from swarm.stage.executor import ThreadExecutor

SILENT = frozenset({"applied", "serving"})
"""Events that are too many for lines; the summary counts them."""
SUMMARY_SECONDS = 30.0
STOP_SECONDS = 3.0
"""Calls in flight have so long to end when the peer is told to stop."""

_log = logging.getLogger("swarm.peer")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """What ``swarm peer`` was asked for, checked."""

    join: tuple[str, ...]
    listen: Endpoint
    announce: Endpoint | None
    dht: DhtPlace
    run: str | None
    stage: int | None
    device: str
    threads: int
    max_memory_bytes: int | None
    identity: Path | None
    journal: Path | None
    socket_root: Path | None = None
    slowness: float = 1.0
    """Emulation for experiments: forwards and backwards take so many times as long."""
    forward_seconds: float = 0.0
    """Emulation for experiments: least seconds of a forward; a backward takes twice that."""

    @staticmethod
    def parse(options: argparse.Namespace) -> PeerOptions:
        """Raises UsageError."""
        if options.stage is not None and options.stage < 0:
            raise UsageError(f"--stage {options.stage}: stages are numbered from 0")
        join = tuple(str(address) for address in parse_join(options.join))
        listen = parse_listen(options.listen)
        announce = parse_announce(options.announce) if options.announce is not None else None
        return PeerOptions(
            join=join,
            listen=listen,
            announce=announce,
            dht=parse_dht_place(options, listen, announce) or DhtPlace(listen=listen),
            run=options.run,
            stage=options.stage,
            device=options.device,
            threads=options.threads,
            max_memory_bytes=options.max_memory,
            identity=options.identity,
            journal=options.journal,
            slowness=options.emulate_slowness,
            forward_seconds=options.emulate_seconds,
        )


def main(options: argparse.Namespace) -> ExitCode:
    """Runs until it is told to stop; exits 0 then."""
    checked = PeerOptions.parse(options)
    life.prepare()
    return life.run(PeerProgram(checked).run(), on_sigterm=ExitCode.DONE)


class PeerProgram:
    """Composes a peer.  The ``make_...`` methods are its parts: a test-only program may wrap them."""

    def __init__(self, options: PeerOptions) -> None:
        self.options = options
        self.clock: Clock = MonotonicClock()
        self.journal = EventJournal(path=options.journal)

    async def run(self) -> None:
        """Join, take a stage, serve.  Raises UsageError or CannotJoin before anything is announced."""
        from swarm.dht.directory import HivemindDirectory
        from swarm.dht.node import start_node

        self.journal.subscribe(self._say)
        device = await asyncio.to_thread(pick_device, self.options.device)
        node = await start_node(
            identity_path=self.options.identity,
            join=self.options.join,
            listen_host=self.options.dht.listen.host,
            port=self.options.dht.listen.port,
            announce_host=self.options.dht.announce_host,
            announce_port=self.options.dht.announce_port,
            socket_root=self.options.socket_root,
        )
        try:
            _log.info("joined the swarm as %s (%s)", short(node.peer_id), node.peer_id)
            directory = HivemindDirectory(node)
            config = await find_run(directory, self.clock, self.options.run)
            stage = await self._choose_stage(directory, config, str(node.peer_id))
            await self._serve(node, directory, config, stage, device)
        finally:
            await node.close()

    async def _choose_stage(self, directory: Directory, config: RunConfig, seed: str) -> int:
        count = config.model.stage_count
        if self.options.stage is not None and self.options.stage >= count:
            raise UsageError(f"--stage {self.options.stage}: run '{config.run.name}' has stages 0 to {count - 1}")
        records = [await directory.peers(config.hash, stage) for stage in range(count)]
        check_protocol(config, [record for stage in records for record in stage])
        limit = self.options.max_memory_bytes
        sizes = [stage_memory_bytes(config.model, stage) for stage in range(count)]
        if self.options.stage is not None:
            if limit is not None and sizes[self.options.stage] > limit:
                raise UsageError(
                    f"stage {self.options.stage} of run '{config.run.name}' needs {_mib(sizes[self.options.stage])}, "
                    f"and --max-memory allows {_mib(limit)}"
                )
            return self.options.stage
        fitting = [stage for stage in range(count) if limit is None or sizes[stage] <= limit]
        if not fitting:
            raise UsageError(
                f"no stage of run '{config.run.name}' fits: the smallest needs {_mib(min(sizes))}, and --max-memory "
                f"allows {_mib(limit or 0)}"
            )
        index, reason = choose_stage([records[stage] for stage in fitting], seed)
        _log.info("takes stage %d: %s", fitting[index], reason.replace(f"stage {index}", f"stage {fitting[index]}"))
        return fitting[index]

    async def _serve(self, node: SwarmNode, directory: Directory, config: RunConfig, stage: int, device: str) -> None:
        from swarm.averaging.averager import ButterflyAverager
        from swarm.roles.peer import Peer
        from swarm.rpc.client import GrpcStageCalls
        from swarm.rpc.server import StageServer
        from swarm.stage.executor import ThreadExecutor
        from swarm.stage.module import TorchStage, numeric_class

        session = new_session()
        calls = GrpcStageCalls()
        threads = ThreadExecutor(self.options.threads)
        averager = await ButterflyAverager.start(node.p2p)
        server = StageServer(peer=node.peer_id, session=session, check=spec_check(config))
        try:
            port = await server.bind(str(self.options.listen))
            listening = Endpoint(host=self.options.listen.host, port=port)
            endpoint, warnings = announced(listening, self.options.announce, parse_join(self.options.join))
            for warning in warnings:
                _log.warning("%s", warning)
            module = await asyncio.to_thread(TorchStage, config, stage, device)
            peer = Peer(
                config=config,
                stage=stage,
                contact=Contact(peer=node.peer_id, session=session, endpoint=str(endpoint)),
                module=self.make_module(module),
                executor=self.make_executor(threads),
                averager=self.make_averager(averager),
                calls=self.make_calls(calls),
                directory=directory,
                clock=self.clock,
                journal=self.journal,
                numeric_class=numeric_class(device),
            )
            await server.start(self.make_service(peer))
            self.journal.record("serving", peer=node.peer_id, stage=stage, endpoint=str(endpoint), session=session)
            count = stage_parameters(config.model, stage)
            _log.info(
                "serves stage %d of run '%s' at %s on %s: %s parameters, %s of state",
                stage, config.run.name, endpoint, device, f"{count:,}", _mib(stage_memory_bytes(config.model, stage)),
            )  # fmt: skip
            if self.options.announce is not None and not await is_reachable(str(endpoint)):
                _log.warning(
                    "nothing answers at %s, which is announced: unless others see more than this machine does, nobody "
                    "will send work; check --announce and the router's port forwarding", endpoint,
                )  # fmt: skip
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(peer.run(), name="peer")
                tasks.create_task(self._summarise(peer, threads), name="summary")
        finally:
            await server.stop(STOP_SECONDS)
            await calls.close()
            await asyncio.to_thread(threads.close)
            self.journal.close()

    # --- parts, for a test-only program to wrap -----------------------------------------

    def make_module(self, module: StageModule) -> StageModule:
        """The stage's parameters and arithmetic."""
        if self.options.forward_seconds > 0 or self.options.slowness > 1:
            from peers.slowness import PacedModule

            return PacedModule(module, seconds=self.options.forward_seconds, factor=self.options.slowness)
        return module

    def make_executor(self, executor: Executor) -> Executor:
        """The compute thread."""
        return executor

    def make_averager(self, averager: Averager) -> Averager:
        """The all-reduce."""
        return averager

    def make_calls(self, calls: StageCalls) -> StageCalls:
        """Calls to other peers."""
        return calls

    def make_service(self, service: StageService) -> StageService:
        """What answers other processes."""
        return service

    # --- what a volunteer sees ---------------------------------------------------------

    def _say(self, event: Event) -> None:
        if event.kind not in SILENT:
            _log.info("%s", describe(event))

    async def _summarise(self, peer: Peer, threads: ThreadExecutor) -> None:
        """One line now and then: what this machine contributes."""
        before = 0.0
        while True:
            await self.clock.sleep(SUMMARY_SECONDS)
            busy = threads.busy_seconds
            lane = peer.serving.lane
            _log.info(
                "%s at version %d: computing %.0f%% of the time, %.1f ms per forward, %d calls waiting",
                peer.seat.state, peer.seat.lineage.length, 100 * (busy - before) / SUMMARY_SECONDS,
                1000 * lane.seconds_per_unit, threads.waiting,
            )  # fmt: skip
            before = busy


def check_protocol(config: RunConfig, records: list[PeerRecord]) -> None:
    """Raise CannotJoin if the run's peers speak another protocol version."""
    others = {record.protocol for record in records} - {PROTOCOL_VERSION}
    if others and not any(record.protocol == PROTOCOL_VERSION for record in records):
        raise CannotJoin(
            f"this program speaks protocol version {PROTOCOL_VERSION}, the peers of run '{config.run.name}' speak "
            f"{', '.join(str(other) for other in sorted(others))}: install the same version as theirs"
        )


def spec_check(config: RunConfig) -> Callable[[str, Mapping[str, TensorSpec]], None]:
    """Bounds by the config, before any tensor's bytes are accepted."""
    largest = largest_tensor_bytes(config)

    def check(kind: str, specs: Mapping[str, TensorSpec]) -> None:
        for name, spec in specs.items():
            if spec.nbytes > largest:
                raise BadRequest(f"{kind}: {name} of {spec.nbytes} bytes; this run's are at most {largest}")

    return check


def pick_device(asked: str) -> str:
    """Raises UsageError if torch has no such device."""
    import torch

    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=asked)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        known = "torch knows no such device" if "device string" in reason else reason
        raise UsageError(f"--device {asked}: {known}") from None
    return asked


def _mib(nbytes: int) -> str:
    if nbytes < 2**20:
        return f"{nbytes / 2**10:.0f} KiB"
    return f"{nbytes / 2**20:.0f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:.1f} GiB"
