"""How a newcomer, or a peer that fell behind, comes by its stage's state."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import aclosing

from swarm.errors import FAILURES, BadReply, TimedOut
from swarm.ids import RunHash, SessionId
from swarm.messages import Contact, StateHead, StateRequest
from swarm.policy.deadlines import Limits, transfer_deadline
from swarm.policy.sizes import most_state_bytes
from swarm.ports import Chunks, Clock, Directory, Executor, Journal, Priority, StageCalls, StageModule
from swarm.records import Lineage, PeerRecord, PeerState
from swarm.roles.reducing import Reducing
from swarm.roles.seat import Seat

POLL_SECONDS = 1.0
"""Between two looks for a donor."""
DIGEST_BYTES_PER_SECOND = 5e7
"""Of gradient: how fast a busy donor copies and digests its state before it answers."""


class CatchUp:
    """Fetches state until the peer can serve."""

    def __init__(
        self,
        *,
        seat: Seat,
        module: StageModule,
        executor: Executor,
        reducing: Reducing,
        directory: Directory,
        calls: StageCalls,
        clock: Clock,
        journal: Journal,
        limits: Limits,
        run: RunHash,
    ) -> None:
        self._seat = seat
        self._module = module
        self._executor = executor
        self._reducing = reducing
        self._directory = directory
        self._calls = calls
        self._clock = clock
        self._journal = journal
        self._limits = limits
        self._run = run

    async def until_ready(self) -> None:
        """Return once the peer holds parameters that it may serve.

        A newcomer starts from the run's seed only where no peer of the stage is past version 0; that is the state of
        version 0, so a lead that is further takes it for stale and nothing is re-initialised in silence.
        """
        waiting = False
        told: set[SessionId] = set()
        while self._seat.state is PeerState.JOINING:
            donors = await self._donors()
            for donor in donors:
                try:
                    await self._fetch(donor)
                    return
                except (*FAILURES, TimeoutError) as error:
                    if donor.session not in told:  # it is asked again and again, for as long as its record lives
                        told.add(donor.session)
                        self._journal.record("donor_failed", peer=donor.peer, stage=self._seat.stage, reason=str(error))
            if not donors and self._seat.behind in (None, Lineage.root(self._run)):
                await self._reducing.close()
                await self._executor.run(Priority.CONTROL, self._start_over)
                self._seat.behind = None
                self._seat.set_state(PeerState.READY)
                return
            if not waiting:
                waiting = True
                version = self._seat.behind.length if self._seat.behind else None
                self._journal.record("waiting_for_donor", stage=self._seat.stage, version=version)
            await self._clock.sleep(POLL_SECONDS)

    async def _donors(self) -> list[PeerRecord]:
        """Peers of the stage with newer state, the newest first."""
        own, behind = self._seat.lineage, self._seat.behind
        records = [
            record
            for record in await self._directory.peers(self._run, self._seat.stage)
            if record.peer != self._seat.contact.peer
            and record.state is not PeerState.JOINING
            and (record.lineage.rank() > own.rank() or (behind is not None and record.lineage.length >= behind.length))
        ]
        return sorted(records, key=lambda record: record.lineage.rank(), reverse=True)

    async def _fetch(self, donor: PeerRecord) -> None:
        contact = Contact(peer=donor.peer, session=donor.session, endpoint=donor.endpoint)
        started = self._clock.now()
        request = StateRequest(run=self._run, stage=self._seat.stage)
        pause = self._limits.reduce_floor_seconds + self._module.gradient_bytes / DIGEST_BYTES_PER_SECOND
        head, chunks = await self._calls.fetch_state(contact, request, pause)
        async with aclosing(chunks):
            data = await self._receive(head, chunks)
        await self._reducing.close()  # nothing may read the sum that goes with the old parameters
        await self._executor.run(Priority.CONTROL, lambda: self._load(head, data))
        self._seat.behind = None
        self._seat.set_state(PeerState.READY)
        self._journal.record(
            "state_fetched",
            peer=donor.peer,
            stage=self._seat.stage,
            version=head.lineage.length,
            nbytes=head.total_bytes,
            seconds=self._clock.now() - started,
        )

    async def _receive(self, head: StateHead, chunks: Chunks) -> bytearray:
        most = most_state_bytes(self._module.gradient_bytes)
        if not 0 <= head.total_bytes <= most:
            raise BadReply(f"a state of {head.total_bytes} bytes, more than the {most} of any of this stage")
        seconds = transfer_deadline(self._limits, most, 1.0)  # by what we know of the stage, not by a donor's word
        try:
            async with asyncio.timeout(seconds):
                return await _collect(head, chunks)
        except TimeoutError:
            raise TimedOut(f"a state of {head.total_bytes} bytes did not come within {seconds:.0f} s") from None

    def _start_over(self) -> None:
        """A new peer is at version 0 as it is; one that was told to go back there is made so."""
        if self._seat.behind is not None:
            self._module.reset()
            self._seat.replace(Lineage.root(self._run), ())

    def _load(self, head: StateHead, data: bytearray) -> None:
        try:
            self._module.load(head.layout, data)
        except ValueError as error:
            raise BadReply(f"the state does not fit: {error}") from None
        self._seat.replace(head.lineage, head.commits)


async def _collect(head: StateHead, chunks: Chunks) -> bytearray:
    """All of a state.  Raises BadReply if it is not what ``head`` says."""
    data, digest = bytearray(), hashlib.sha256()
    async for chunk in chunks:
        data += chunk
        digest.update(chunk)
        if len(data) > head.total_bytes:
            break
    if len(data) != head.total_bytes or digest.hexdigest() != head.digest:
        raise BadReply(f"the state broke off or is damaged ({len(data)} of {head.total_bytes} bytes)")
    return data
