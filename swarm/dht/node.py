"""A node of the swarm's DHT: this process's place in the peer-to-peer network."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hivemind.dht.protocol import ValidationError
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.timed_storage import MAX_DHT_TIME_DISCREPANCY_SECONDS

from swarm.dht.addresses import Endpoint, PeerAddress, is_wildcard, multiaddr, parse_join
from swarm.dht.dialing import create_p2p, dial_all, identity_taken, reach_any, wait_for_routing
from swarm.dht.guarded_node import GuardedDHTNode
from swarm.dht.identity import Identity, IdentityLock
from swarm.dht.socket_folder import SocketFolder
from swarm.dht.validation import SignedRecordValidator
from swarm.errors import CannotJoin, UsageError
from swarm.ids import PeerId

STARTUP_SECONDS = 15.0
"""How long to try to join before giving up."""
MEND_PERIOD_SECONDS = 10.0
"""How often lost neighbours are looked for; an isolated node is back within this and a dial."""
RPC_SECONDS = 3.0
"""A DHT request without an answer for this long is lost."""

_WARN_PERIOD_SECONDS = 60.0
_REMEMBERED = 32
_CLOCKS = re.compile(r"local: ([0-9.]+), peer: ([0-9.]+)")

logger = logging.getLogger(__name__)


class SwarmNode:
    """A running DHT node; made by :func:`start_node`, ended by :meth:`close`."""

    def __init__(
        self,
        *,
        identity: Identity,
        lock: IdentityLock | None,
        sockets: SocketFolder,
        p2p: P2P,
        dht: GuardedDHTNode,
        join: tuple[PeerAddress, ...],
        addresses: tuple[str, ...],
    ) -> None:
        self.identity = identity
        self.p2p = p2p
        self.dht = dht
        self.addresses = addresses
        """Multiaddrs with /p2p/ID at which others can join through this node."""
        self._lock = lock
        self._sockets = sockets
        self._join = join
        self._remembered: dict[PeerId, PeerAddress] = {}
        self._warned_at = -math.inf
        self._mending = asyncio.create_task(self._mend_forever(), name="dht-mending")

    @property
    def peer_id(self) -> PeerId:
        """This node's id."""
        return self.identity.peer_id

    @property
    def neighbours(self) -> int:
        """DHT nodes that this one knows; 0 for long means that it is cut off (or alone)."""
        return len(self.dht.protocol.routing_table.peer_id_to_uid)

    async def close(self) -> None:
        """Leave the DHT, stop p2pd, remove the sockets and let go of the identity."""
        self._mending.cancel()
        await asyncio.wait({self._mending})
        try:
            async with asyncio.timeout(RPC_SECONDS):
                await self.dht.shutdown()
        except (TimeoutError, P2PDaemonError, OSError, EOFError) as error:
            logger.debug("p2pd was gone already: %r", error)
        finally:
            await self.p2p.shutdown()
            self._sockets.close()
            if self._lock is not None:
                self._lock.release()

    async def _mend_forever(self) -> None:
        while True:
            await asyncio.sleep(MEND_PERIOD_SECONDS)
            try:
                async with asyncio.timeout(2 * MEND_PERIOD_SECONDS):
                    await self.mend()
            except Exception:
                logger.exception("looking for lost DHT neighbours failed; trying again in %g s", MEND_PERIOD_SECONDS)

    async def mend(self) -> None:
        """Dial the peers of ``--join`` that are not neighbours, and if there are none at all, those met before.

        hivemind forgets who does not answer and never dials its first contacts again: without this, a node
        whose network was away stays alone for good, and two halves of a swarm never find each other.
        """
        known = self.dht.protocol.routing_table.peer_id_to_uid
        was_alone = not known
        candidates = [address for address in self._join if PeerID.from_base58(address.peer) not in known]
        if was_alone:
            candidates += self._remembered.values()
        results = await dial_all(self.p2p, candidates, RPC_SECONDS)
        for peer in {PeerID.from_base58(address.peer) for address, why in results.items() if why is None}:
            self.dht.blacklist.register_success(peer)
            node_id = await self.dht.protocol.call_ping(peer)
            if node_id is not None:
                await self.dht.protocol.update_routing_table(node_id, peer)
        if was_alone and self.neighbours:
            await self.dht.find_nearest_nodes([self.dht.node_id])
        if was_alone and not self.neighbours and candidates:
            self._warn("cut off: no other node of the swarm answers; dialing them again every %g s")
        await self._remember()

    async def _remember(self) -> None:
        known = self.dht.protocol.routing_table.peer_id_to_uid
        for info in await self.p2p.list_peers():
            if info.peer_id not in known:
                continue
            for multiaddress in info.addrs:
                with suppress(UsageError):  # relayed, or over another transport
                    (address,) = parse_join([f"{multiaddress}/p2p/{info.peer_id.to_base58()}"])
                    self._remembered.pop(address.peer, None)
                    self._remembered[address.peer] = address
        while len(self._remembered) > _REMEMBERED:
            del self._remembered[next(iter(self._remembered))]

    def _warn(self, message: str) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._warned_at >= _WARN_PERIOD_SECONDS:
            logger.warning(message, MEND_PERIOD_SECONDS)
            self._warned_at = now


async def start_node(
    *,
    identity_path: Path | None = None,
    join: Sequence[str] = (),
    listen_host: str = "127.0.0.1",
    port: int = 0,
    announce_host: str | None = None,
    announce_port: int | None = None,
    client: bool = False,
    socket_root: Path | None = None,
    startup_seconds: float = STARTUP_SECONDS,
) -> SwarmNode:
    """Start p2pd and a DHT node in this event loop, and join the swarm at ``join`` (none: found a new one).

    Without ``identity_path`` the identity is a new one that dies with the node.  A ``client`` stores nothing
    for others, who need not reach it.  ``socket_root`` is the folder in which the private socket folder is made.
    Raises UsageError (addresses, identity file) and CannotJoin (identity in use, port taken, nobody answers).
    """
    use_hivemind_log_handler("nowhere")  # its records go where the program's own go,
    logging.getLogger("hivemind").setLevel(logging.ERROR)  # and strangers cannot fill the log with warnings
    wanted = parse_join(join)
    sockets = SocketFolder(socket_root)
    lock: IdentityLock | None = None
    p2p: P2P | None = None
    try:
        identity = Identity.load_or_create(identity_path or sockets.path / "identity")
        if identity_path is not None:
            lock = IdentityLock(identity_path)
            if wanted and await identity_taken(identity.peer_id, wanted, sockets.path, startup_seconds):
                raise CannotJoin(
                    f"identity {identity_path} is in use: another living process of this swarm is {identity.peer_id}"
                )
        others = tuple(address for address in wanted if address.peer != identity.peer_id)
        listen = Endpoint(host=listen_host, port=port)
        p2p = await _listening_p2p(identity, listen, announce_host, announce_port, sockets, client)
        reached = await _reach(p2p, others, startup_seconds)
        dht = await _start_dht(p2p, identity, reached, client)
        visible = () if client else tuple(str(address) for address in await p2p.get_visible_maddrs())
        # What is of use on this machine only comes last.
        addresses = tuple(sorted(visible, key=lambda text: text.startswith(("/ip4/127.", "/ip6/::1/"))))
        return SwarmNode(
            identity=identity, lock=lock, sockets=sockets, p2p=p2p, dht=dht, join=others, addresses=addresses
        )
    except BaseException:
        if p2p is not None:
            await p2p.shutdown()
        sockets.close()
        if lock is not None:
            lock.release()
        raise


async def _listening_p2p(
    identity: Identity,
    listen: Endpoint,
    announce_host: str | None,
    announce_port: int | None,
    sockets: SocketFolder,
    client: bool,
) -> P2P:
    if client:
        # It listens for one purpose: others on this machine find out that its identity is in use by dialing it.
        return await create_p2p(
            sockets.path, identity_path=str(identity.path), dht_mode="client", host_maddrs=["/ip4/127.0.0.1/tcp/0"]
        )
    bindable = Endpoint(host=listen.host, port=_bindable_port(listen))
    announce = None
    if announce_host is not None:
        if is_wildcard(announce_host):
            raise UsageError(f"--announce {announce_host}: no address that others can dial")
        listen = bindable  # what is announced must be known before p2pd binds
        announce = [multiaddr(Endpoint(host=announce_host, port=announce_port or listen.port))]
    return await create_p2p(
        sockets.path, identity_path=str(identity.path), host_maddrs=[multiaddr(listen)], announce_maddrs=announce
    )


async def _reach(p2p: P2P, addresses: tuple[PeerAddress, ...], startup_seconds: float) -> list[PeerAddress]:
    if not addresses:
        return []
    results = await reach_any(p2p, addresses, startup_seconds)
    for address, reason in results.items():
        if reason is not None:
            logger.warning("cannot reach %s: %s", address, reason)
    await wait_for_routing(p2p)  # else the first look-ups fail, and hivemind shuns those peers for seconds
    return [address for address, reason in results.items() if reason is None]


async def _start_dht(p2p: P2P, identity: Identity, reached: list[PeerAddress], client: bool) -> GuardedDHTNode:
    try:
        node: GuardedDHTNode = await GuardedDHTNode.create(
            p2p=p2p,
            # A process that comes back under its identity is the same node, not a second one beside the dead one.
            node_id=DHTID.generate(source=str(identity.peer_id)),
            initial_peers=[str(address) for address in reached],
            client_mode=client,
            wait_timeout=RPC_SECONDS,
            record_validator=SignedRecordValidator(identity),
            # No caches: what is read is what the responsible nodes hold now.
            cache_locally=False,
            cache_on_store=False,
            cache_nearest=0,
            cache_refresh_before_expiry=0,
            reuse_get_requests=False,
            backoff_rate=1.0,  # a peer that came back is asked again within seconds, however often it went
        )
        return node
    except ValidationError as error:
        raise CannotJoin(_explain(str(error))) from None
    except (RuntimeError, P2PDaemonError, OSError) as error:
        raise CannotJoin(f"cannot join the DHT: {error}") from error


def _explain(refusal: str) -> str:
    # Why hivemind does not join: the clocks are apart, or the others cannot reach this node.
    clocks = _CLOCKS.search(refusal)
    if clocks is None:
        return f"cannot join the DHT: {refusal}"
    offset = float(clocks[1]) - float(clocks[2])
    return (
        f"cannot join the DHT: this machine's clock is {offset:+.1f} s off the swarm's, and at most "
        f"{MAX_DHT_TIME_DISCREPANCY_SECONDS} s are allowed; synchronise it (NTP) and start again"
    )


def _bindable_port(listen: Endpoint) -> int:
    """The port of ``listen``, or a free one for 0.  Raises CannotJoin if it is taken.

    p2pd itself would share a taken port with its owner.
    """
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a former life do not count
        try:
            probe.bind((listen.host, listen.port))
        except OSError as error:
            raise CannotJoin(f"cannot listen on {listen}: {error.strerror}") from None
        return int(probe.getsockname()[1])
