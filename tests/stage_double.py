"""A small StageService for tests of the transport: it echoes, waits, refuses and counts what reached it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from swarm.errors import BadRequest, SwarmError
from swarm.ids import Digest, MicrobatchId, PeerId, RunHash, SessionId
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
    HeldMicrobatch,
    MicrobatchCall,
    PeerReport,
    ReducedMark,
    ReduceReply,
    ReduceRequest,
    StateHead,
    StateMark,
    StateRequest,
    StepKey,
    VoidReply,
    VoidRequest,
)
from swarm.records import CommitRecord, Lineage, PeerState, StageCommit, Term
from swarm.rpc.client import GrpcStageCalls
from swarm.rpc.handlers import Limits, SpecCheck
from swarm.rpc.server import StageServer, any_specs
from swarm.tensors import Buffer, TensorData, TensorSpec

RUN = RunHash("ab" * 32)
PEER = PeerId("12D3KooWTestPeer")
SESSION = SessionId("0123456789abcdef")
TERM = Term(3, PeerId("12D3KooWTrainer"))
LINEAGE = Lineage.root(RUN)
KEY = StepKey(run=RUN, stage=1, term=TERM, lineage=LINEAGE)
DIGEST = Digest("cd" * 32)
MARK = ReducedMark(attempt=2, digest=DIGEST, squared_norm=1.5)
STAGE_COMMIT = StageCommit(members=(PEER,), attempt=2, digest=DIGEST, squared_norm=1.5, samples=4)
COMMIT = CommitRecord(
    step=0,
    term=TERM,
    parent=LINEAGE.chain,
    stages=(STAGE_COMMIT, STAGE_COMMIT),
    microbatches=(MicrobatchId(0), MicrobatchId(1)),
    excluded=(MicrobatchId(2),),
    tokens=(128, 127),
    losses=(0.1 + 0.2, 1e-300),
    clip_factor=1.0,
)


def call(deadline_seconds: float = 30.0) -> MicrobatchCall:
    return MicrobatchCall(
        key=KEY, microbatch=MicrobatchId(5), try_number=1, attempt=0, deadline_seconds=deadline_seconds
    )


def tensor(data: bytes, dtype: str = "uint8", shape: tuple[int, ...] | None = None) -> TensorData:
    return TensorData(spec=TensorSpec(dtype=dtype, shape=(len(data),) if shape is None else shape), data=data)


def forward_request(inputs: TensorData, deadline_seconds: float = 30.0) -> ForwardRequest:
    return ForwardRequest(call=call(deadline_seconds), inputs=inputs)


@dataclass
class EchoStage:
    """Forward and backward echo.  ``gate`` unset: forward waits for it."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: SwarmError | None = None
    """Raised by admit."""
    failure: Exception | None = None
    """Raised by all unary methods."""
    admitted: list[tuple[str, float]] = field(default_factory=list)
    arrivals: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """Released once for each call that asks to be admitted."""
    received: list[ForwardRequest | BackwardRequest] = field(default_factory=list)
    heard: list[object] = field(default_factory=list)
    state_chunks: tuple[Buffer, ...] = ()
    state_repeats: int = 1
    state_bytes: int | None = None

    def __post_init__(self) -> None:
        self.gate.set()

    def admit(self, request_kind: str, deadline_seconds: float) -> None:
        self.admitted.append((request_kind, deadline_seconds))
        self.arrivals.release()
        if self.refusal is not None:
            raise self.refusal

    async def forward(self, request: ForwardRequest) -> TensorData:
        self.received.append(request)
        self.entered.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        self._hear(request)
        return request.inputs

    async def backward(self, request: BackwardRequest) -> BackwardReply:
        self.received.append(request)
        return BackwardReply(input_gradient=request.inputs, loss=2.5, accumulated=request.accumulate)

    async def void(self, request: VoidRequest) -> VoidReply:
        self._hear(request)
        return VoidReply(held=True)

    async def greet(self, request: Greeting) -> PeerReport:
        self._hear(request)
        return report()

    async def freeze(self, request: FreezeRequest) -> FreezeReply:
        self._hear(request)
        held = HeldMicrobatch(microbatch=MicrobatchId(5), try_number=1, tokens=128, samples=2)
        return FreezeReply(session=SESSION, held=(held,))

    async def drop(self, request: DropRequest) -> None:
        self._hear(request)

    async def reduce(self, request: ReduceRequest) -> ReduceReply:
        self._hear(request)
        return ReduceReply(reduced=None, samples=2, unreachable=(PEER,), reason="no weight")

    async def adopt(self, request: AdoptRequest) -> ReducedMark:
        self._hear(request)
        return MARK

    async def apply(self, request: ApplyRequest) -> StateMark:
        self._hear(request)
        return StateMark(lineage=LINEAGE.after(COMMIT), squared_norm=4.0, digest=None, numeric_class="cpu-2.13")

    async def fetch_state(self, request: StateRequest) -> tuple[StateHead, AsyncIterator[Buffer]]:
        self._hear(request)
        total = self.state_repeats * sum(len(chunk) for chunk in self.state_chunks)
        digest = hashlib.sha256()
        for chunk in self.state_chunks:
            digest.update(chunk)
        head = StateHead(
            lineage=LINEAGE,
            commits=(COMMIT,),
            digest=Digest(digest.hexdigest()),
            total_bytes=total if self.state_bytes is None else self.state_bytes,
            layout='[["weight","float32",[1]]]',
        )
        return head, self._data()

    async def fetch_gradient(self, request: GradientRequest) -> AsyncIterator[Buffer]:
        self._hear(request)
        return self._data()

    async def _data(self) -> AsyncIterator[Buffer]:
        try:
            for _ in range(self.state_repeats):
                for chunk in self.state_chunks:
                    yield chunk
            await self.gate.wait()
        finally:
            self.closed.set()

    def _hear(self, request: object) -> None:
        self.heard.append(request)
        if self.failure is not None:
            raise self.failure


def report() -> PeerReport:
    return PeerReport(
        peer=PEER,
        session=SESSION,
        stage=1,
        state=PeerState.READY,
        term=TERM,
        lineage=LINEAGE,
        reduced=MARK,
        commits=(COMMIT,),
        queue=3,
        forward_seconds=0.25,
    )


def width_of_eight(kind: str, specs: Mapping[str, TensorSpec]) -> None:
    """A check of specs such as a stage makes: activations of one width and dtype."""
    for name, spec in specs.items():
        if spec.dtype != "float32" or spec.shape[-1:] != (8,):
            raise BadRequest(f"{kind} {name}: {spec.dtype} {list(spec.shape)}, not float32 (..., 8)")


@asynccontextmanager
async def served(
    stage: EchoStage, limits: Limits | None = None, check: SpecCheck = any_specs
) -> AsyncIterator[tuple[GrpcStageCalls, Contact]]:
    """A server of ``stage`` on loopback, a client and the contact to call."""
    server = StageServer(peer=PEER, session=SESSION, limits=limits, check=check)
    port = await server.bind("127.0.0.1:0")
    await server.start(stage)
    calls = GrpcStageCalls()
    try:
        yield calls, Contact(peer=PEER, session=SESSION, endpoint=f"127.0.0.1:{port}")
    finally:
        await calls.close()
        await server.stop(0)
