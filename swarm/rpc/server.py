"""Server: a peer's gRPC endpoint, with health and reflection."""

from __future__ import annotations

from collections.abc import Mapping

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from swarm.errors import CannotJoin
from swarm.ids import PeerId, SessionId
from swarm.ports import StageService
from swarm.rpc.handlers import Limits, SpecCheck, StageHandlers
from swarm.rpc.options import SERVER_OPTIONS, SERVICE
from swarm.tensors import TensorSpec


def any_specs(kind: str, specs: Mapping[str, TensorSpec]) -> None:
    """A check that leaves shapes and dtypes to the service (sizes stay bounded by Limits)."""


class StageServer:
    """A peer's endpoint: ``bind`` (the port is known), ``start`` (a service answers), ``stop``; each once.

    Two steps, because a service wants to know the endpoint at which it will be reached.
    ``peer`` and ``session`` are this process's: calls meant for another are refused as WrongRun.
    """

    def __init__(
        self, *, peer: PeerId, session: SessionId, check: SpecCheck = any_specs, limits: Limits | None = None
    ) -> None:
        self._peer = peer
        self._session = session
        self._check = check
        self._limits = limits if limits is not None else Limits()
        self._server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()

    async def bind(self, listen: str) -> int:
        """Take ``listen`` ("HOST:PORT", port 0 for any free one); returns the port.  Callers wait until ``start``.

        Raises CannotJoin if the port is taken or the host is not of this machine.
        """
        server = grpc.aio.server(options=SERVER_OPTIONS)
        try:
            port = server.add_insecure_port(listen)
        except RuntimeError:
            await server.stop(None)
            raise CannotJoin(f"cannot listen on {listen}: port in use, or no such address here") from None
        self._server = server
        return port

    async def start(self, service: StageService) -> None:
        """Answer calls with ``service``."""
        if self._server is None:
            raise RuntimeError("bind before start")
        handlers = StageHandlers(
            service, peer=self._peer, session=self._session, check=self._check, limits=self._limits
        )
        self._server.add_generic_rpc_handlers((handlers.generic(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        for name in ("", SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()

    async def stop(self, grace_seconds: float) -> None:
        """Take no new calls; those in flight have ``grace_seconds`` to end, then they are cancelled."""
        if self._server is None:
            return
        server, self._server = self._server, None
        await self._health.enter_graceful_shutdown()
        await server.stop(grace_seconds)
