"""Calls between simulated processes: links, latency, partitions, deaths, and whatever else the weather decides.

A call runs as a task of the callee's process, so a death cancels what it computes and its callers see a broken
connection, and a pause holds what has arrived; a caller's time-out cancels the callee's task as gRPC does.  A peer is
asked for admission when the head of a forward or backward has come, before its tensors.  While two machines are cut off
from each other, what they send waits, as TCP would send it again.  An error that is not the protocol's reaches the
caller as PeerFailed, as over gRPC, and is kept in :attr:`Network.failures`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, TypeVar

from swarm.errors import FAILURES, PeerFailed, TimedOut, Unreachable, WrongRun
from swarm.messages import BackwardRequest, Contact, ForwardRequest
from swarm.ports import StageService
from swarm.sim.links import carry
from swarm.sim.loop import Process, world_later
from swarm.sim.machine import Machine
from swarm.sim.weather import FAIR, Call, FairWeather, Fate, Weather
from swarm.sim.weights import CONTROL_BYTES, Overheads, Weights

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Node:
    """One life of a process on the network."""

    machine: Machine
    process: Process
    contact: Contact | None = None
    """None: it serves nobody (a trainer)."""
    service: StageService | None = None
    kill: Callable[[], None] = lambda: None
    alive: bool = True
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """These machines are cut off from all others, in one direction or both."""

    machines: frozenset[str]
    inward: bool = True
    outward: bool = True

    def blocks(self, source: str, target: str) -> bool:
        """Nothing goes from ``source`` to ``target``."""
        inside, to_inside = source in self.machines, target in self.machines
        return (inside and not to_inside and self.outward) or (to_inside and not inside and self.inward)


class Network:
    """All machines, the processes that listen on them, and the weather."""

    def __init__(
        self,
        weather: Weather | None = None,
        weights: Weights | None = None,
        overheads: Overheads | None = None,
    ) -> None:
        self.weather: Weather = weather or FairWeather()
        self.weights = weights or Weights()
        self.overheads = overheads or Overheads()
        self.machines: dict[str, Machine] = {}
        self.nodes: dict[str, Node] = {}
        """Who listens, by endpoint."""
        self.dark: set[str] = set()
        """Endpoints of which nobody ever says that they are gone: a machine without power."""
        self.cuts: list[Cut] = []
        self.calls: dict[str, int] = {}
        self.before_call: list[Callable[[Call], None]] = []
        """Called when a call is made, before anything of it arrives."""
        self.after_call: list[Callable[[Call, Any], None]] = []
        """Called after each answered call with its answer."""
        self.failures: list[Exception] = []
        """Errors inside of processes that are none of the protocol's, and waits without a deadline."""
        self._late: set[asyncio.Task[None]] = set()
        self._healed = asyncio.Event()

    # --- who is there ---------------------------------------------------------------

    def machine(self, name: str, make: Callable[[], Machine] | None = None) -> Machine:
        """The machine of this name; ``make`` is asked for it the first time."""
        if name not in self.machines:
            self.machines[name] = make() if make is not None else Machine(name=name)
        return self.machines[name]

    def join(self, node: Node) -> Node:
        """A node starts to listen."""
        if node.contact is not None:
            self.nodes[node.contact.endpoint] = node
            self.dark.discard(node.contact.endpoint)
        return node

    def leave(self, node: Node, *, silently: bool = False) -> None:
        """A node is gone, with all that it was computing.  ``silently``: no connection to it is refused or reset."""
        node.alive = False
        if node.contact is not None and self.nodes.get(node.contact.endpoint) is node:
            if silently:
                self.dark.add(node.contact.endpoint)
            del self.nodes[node.contact.endpoint]
        for task in node.tasks:
            task.cancel()

    def cut(self, cut: Cut, seconds: float) -> None:
        """Cut machines off for so long."""
        self.cuts.append(cut)
        world_later(seconds, lambda: self._heal(cut))

    def blocked(self, source: str, target: str) -> bool:
        """Nothing goes from one machine to another now."""
        return any(cut.blocks(source, target) for cut in self.cuts)

    async def healed(self, source: str, target: str) -> None:
        """Wait while nothing goes from one machine to another."""
        while self.cuts and self.blocked(source, target):
            await self._healed.wait()

    def _heal(self, cut: Cut) -> None:
        self.cuts.remove(cut)
        self._healed.set()
        self._healed = asyncio.Event()

    # --- one call -------------------------------------------------------------------

    async def call(self, caller: Node, call: Call, seconds: float, run: Callable[[StageService], Awaitable[T]]) -> T:
        """One call with a time-out."""
        return await self.exchange(caller, call, self.begin(call), seconds, run)

    def begin(self, call: Call) -> Fate:
        """A call is made."""
        self.calls[call.kind] = self.calls.get(call.kind, 0) + 1
        for observer in self.before_call:
            observer(call)
        return self.weather.fate(call)

    async def exchange(
        self, caller: Node, call: Call, fate: Fate, seconds: float, run: Callable[[StageService], Awaitable[T]]
    ) -> T:
        """Request and answer of a call that has begun."""
        if not math.isfinite(seconds) or seconds < 0:
            self.failures.append(ValueError(f"{call.kind} may wait for {seconds} s"))
        if fate.late_copy_seconds is not None:
            # In nobody's process: it is on its way whatever becomes of the caller.
            late = self._arrive_late(fate.late_copy_seconds, call, run)
            task: asyncio.Task[None] = Context().run(asyncio.get_running_loop().create_task, late)
            self._late.add(task)
            task.add_done_callback(self._late.discard)
        try:
            async with asyncio.timeout(seconds):
                answer = await self._deliver(caller, call, fate, run)
        except TimeoutError:
            raise TimedOut(f"{call.kind}: no answer in {seconds:.1f} s") from None
        for observer in self.after_call:
            observer(call, answer)
        return answer

    async def _deliver(self, caller: Node, call: Call, fate: Fate, run: Callable[[StageService], Awaitable[T]]) -> T:
        node = await self._reach(caller, call, fate)
        task = self.spawn(node, self._arrive(caller, node, call, fate, run))
        if fate.repeat:
            self.spawn(node, self._arrive(caller, node, call, FAIR, run))
        answer = await self.outcome(task, call.to)
        if fate.lose_reply:
            await _for_ever()
        if fate.reset_reply:
            raise Unreachable("connection reset")
        seconds = _latency(node.machine, caller.machine) + fate.reply_seconds
        await self._travel(call.kind, node.machine, caller.machine, self.weights.answer(answer), seconds)
        return answer

    async def outcome(self, task: asyncio.Task[T], to: Contact) -> T:
        """What a task of the callee's process gives; whoever gives up waiting ends it."""
        try:
            # Shielded: whether the task or the one who waits was cancelled makes a difference.
            return await asyncio.shield(task)
        except (asyncio.CancelledError, Unreachable):
            this = asyncio.current_task()
            if this is not None and this.cancelling():
                task.cancel()
                raise
            if to.endpoint in self.dark:
                await _for_ever()
            raise Unreachable("connection reset") from None

    async def _reach(self, caller: Node, call: Call, fate: Fate) -> Node:
        """Whoever listens at the endpoint now."""
        if fate.lose_request or call.to.endpoint in self.dark:
            await _for_ever()
        node = self.nodes.get(call.to.endpoint)
        if node is None or fate.reset_request:
            await asyncio.sleep(2 * caller.machine.latency_seconds)
            raise Unreachable("connection reset" if fate.reset_request else "connection refused")
        return node

    async def _travel(self, kind: str, source: Machine, target: Machine, nbytes: int, seconds: float) -> None:
        source.sent_bytes[kind] += nbytes
        target.received_bytes[kind] += nbytes
        await self.healed(source.name, target.name)
        await carry(nbytes, source.up, target.down, connection=(source.name, target.name))
        await asyncio.sleep(seconds)
        await self.healed(source.name, target.name)

    async def _arrive_late(self, seconds: float, call: Call, run: Callable[[StageService], Awaitable[Any]]) -> None:
        await asyncio.sleep(seconds)
        await self.healed(call.caller, call.to.peer)
        node = self.nodes.get(call.to.endpoint)
        if node is not None:
            self.spawn(node, self._serve_late(node, call, run))

    async def _serve_late(self, node: Node, call: Call, run: Callable[[StageService], Awaitable[Any]]) -> None:
        self._admit(node, call)
        await self._serve(node, call, run)

    # --- the callee's side ------------------------------------------------------------

    async def _arrive(
        self, caller: Node, node: Node, call: Call, fate: Fate, run: Callable[[StageService], Awaitable[T]]
    ) -> T:
        """The request's way, the work, and what happens before and after it."""
        seconds = _latency(caller.machine, node.machine) + fate.request_seconds + self.overheads.call_seconds
        await self._travel(call.kind, caller.machine, node.machine, CONTROL_BYTES, seconds)
        self._admit(node, call)
        tensor_bytes = self.weights.request(call.request) - CONTROL_BYTES
        if tensor_bytes:
            await self._travel(call.kind, caller.machine, node.machine, tensor_bytes, 0.0)
        self._happens(node, fate.kill_before, fate.on_request)
        answer = await self._serve(node, call, run)
        self._happens(node, fate.kill_after, fate.on_reply)
        return answer

    @staticmethod
    def _happens(node: Node, kill: bool, what: Callable[[], None] | None) -> None:
        if what is not None:
            what()
        if kill:
            node.kill()
        if not node.alive:
            raise Unreachable("connection reset")

    def spawn(self, node: Node, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task of a process that serves; it ends with it."""
        task = node.process.spawn(work)
        node.tasks.add(task)
        task.add_done_callback(node.tasks.discard)
        task.add_done_callback(_look)
        return task

    def _admit(self, node: Node, call: Call) -> None:
        """Ask for admission, once the head is there.  Raises what the peer answers instead."""
        if isinstance(call.request, ForwardRequest | BackwardRequest):
            with self.root():
                _listening(node, call.to).admit(call.kind, call.request.call.deadline_seconds)

    async def _serve(self, node: Node, call: Call, run: Callable[[StageService], Awaitable[T]]) -> T:
        with self.root():
            return await run(_listening(node, call.to))

    @contextmanager
    def root(self) -> Iterator[None]:
        """The root of the callee's task: the protocol's errors go to the caller as they are, others as PeerFailed."""
        try:
            yield
        except FAILURES:
            raise
        except TimeoutError:
            raise TimedOut("a deadline passed at the peer") from None
        except Exception as error:  # whatever it is, the caller must know
            self.failures.append(error)
            raise PeerFailed(f"{type(error).__name__}: {error}") from error


def _listening(node: Node, to: Contact) -> StageService:
    if node.contact != to or node.service is None:
        raise WrongRun("another process listens there now")
    return node.service


def _latency(source: Machine, target: Machine) -> float:
    return source.latency_seconds + target.latency_seconds


async def _for_ever() -> None:
    """Until the caller gives up."""
    await asyncio.get_running_loop().create_future()


def _look(task: asyncio.Task[Any]) -> None:
    """The caller may be gone: then nobody else asks for the error."""
    if not task.cancelled():
        task.exception()
