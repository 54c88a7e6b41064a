"""Reaching peers by address: which answer, and in plain words why the others do not."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.utils.multiaddr import Multiaddr

from swarm.dht.addresses import PeerAddress
from swarm.dht.peer_id import peer_id_of
from swarm.errors import CannotJoin
from swarm.ids import PeerId

logger = logging.getLogger(__name__)

_BACK_OFF = "no answer"
"""p2pd does not dial again so soon; what it said before was more precise."""
WRONG_ID = "another peer answers there (wrong id)"

_SOCKET_FAMILIES = {"ip4": socket.AF_INET, "ip6": socket.AF_INET6, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}


class _AloofP2P(P2P):  # type: ignore[misc]  # hivemind has no types
    """p2pd in a process group of its own: Ctrl-C at a terminal is for the program, which needs p2pd to say good-bye.

    It still ends with its parent, however that ends.
    """

    @staticmethod
    def _make_process_args(*args: Any, **options: Any) -> list[str]:
        command: list[str] = P2P._make_process_args(*args, **options)
        apart = "import os, sys; os.setpgid(0, 0); os.execv(sys.argv[1], sys.argv[1:])"
        return [sys.executable, "-I", "-S", "-c", apart, *command]


async def create_p2p(sockets: Path, **options: Any) -> P2P:
    """Start a p2pd whose sockets lie in ``sockets``, without NAT traversal and relays.

    Raises CannotJoin if it does not start (the port is taken, say).
    """
    # hivemind names the place by an attribute of the class: a class of our own leaves other nodes alone.
    own: Any = type("_OwnP2P", (_AloofP2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{sockets}/"})
    try:
        return await own.create(
            auto_nat=False, nat_port_map=False, use_relay=False, check_if_identity_free=False, **options
        )
    except P2PDaemonError as error:
        text = str(error)
        if "address already in use" in text:
            text = "the port is in use by another process"
        elif "cannot assign requested address" in text:
            text = "the listening address is not one of this machine"
        raise CannotJoin(f"cannot start the peer-to-peer daemon: {text}") from None


async def dial(p2p: P2P, address: PeerAddress, timeout_seconds: float) -> str | None:
    """Connect to the peer at ``address``; returns why that failed, or None."""
    try:
        async with asyncio.timeout(timeout_seconds):
            # A plain connection first: its errors say more than p2pd's.
            family = _SOCKET_FAMILIES.get(address.kind, socket.AF_UNSPEC)
            _, writer = await asyncio.open_connection(address.host, address.port, family=family)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
            where = Multiaddr(str(address).partition("/p2p/")[0])
            await p2p._client.connect(PeerID.from_base58(address.peer), [where])
    except TimeoutError:
        return f"timed out after {timeout_seconds:g} s"
    except socket.gaierror:
        return f"the host name {address.host} is unknown"
    except ConnectionRefusedError:
        return "connection refused"
    except (OSError, EOFError) as error:
        return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
    except P2PDaemonError as error:
        text = str(error)
        if "backoff" in text:
            return _BACK_OFF
        return WRONG_ID if "mismatch" in text else f"no libp2p peer answers there ({_last_line(text)})"
    return None


async def dial_all(p2p: P2P, addresses: Sequence[PeerAddress], timeout_seconds: float) -> dict[PeerAddress, str | None]:
    """Dial all at once; for each address why it failed, or None."""
    async with asyncio.TaskGroup() as group:
        tasks = {address: group.create_task(dial(p2p, address, timeout_seconds)) for address in addresses}
    return {address: task.result() for address, task in tasks.items()}


async def reach_any(
    p2p: P2P, addresses: Sequence[PeerAddress], timeout_seconds: float
) -> dict[PeerAddress, str | None]:
    """Dial until at least one of ``addresses`` answers: the others may be starting at this very moment.

    Raises CannotJoin, with a reason for each address, if none does in time.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_seconds
    results: dict[PeerAddress, str | None] = {}
    told = False
    while True:
        left = max(0.5, deadline - loop.time())
        for address, reason in (await dial_all(p2p, addresses, min(5.0, left))).items():
            if reason != _BACK_OFF or address not in results:
                results[address] = reason
        if None in results.values():
            return results
        hopeless = all(reason == WRONG_ID for reason in results.values())
        if hopeless or loop.time() + 0.5 >= deadline:
            lines = "; ".join(f"{address}: {reason}" for address, reason in results.items())
            raise CannotJoin(f"none of the addresses to join answers: {lines}")
        if not told:
            told = True
            logger.info("no address to join answers yet; trying for %.0f s", timeout_seconds)
        await asyncio.sleep(0.5)


async def identity_taken(peer: PeerId, addresses: Sequence[PeerAddress], sockets: Path, timeout_seconds: float) -> bool:
    """Whether a living process somewhere in the swarm at ``addresses`` has the identity ``peer``.

    Asked through an anonymous p2pd, so that the one who has it is not disturbed.
    Raises CannotJoin if none of the other addresses answers.
    """
    others = [address for address in addresses if address.peer != peer]
    selves = [address for address in addresses if address.peer == peer]
    with tempfile.TemporaryDirectory(dir=sockets, prefix="q") as folder:
        p2p = await create_p2p(Path(folder), dht_mode="client", no_listen=True, host_maddrs=())
        try:
            if None in (await dial_all(p2p, selves, min(5.0, timeout_seconds))).values():
                return True
            if others:
                await reach_any(p2p, others, timeout_seconds)
                return await find_peer(p2p, peer, min(5.0, timeout_seconds))
            return False
        finally:
            await p2p.shutdown()


async def wait_for_routing(p2p: P2P) -> None:
    """Return once p2pd can look up peers through those that it is connected to (or after 3 s)."""
    nobody = peer_id_of(secrets.token_bytes(32))
    await find_peer(p2p, nobody, 3.0, once_routed_seconds=0.2)


async def find_peer(p2p: P2P, peer: PeerId, timeout_seconds: float, once_routed_seconds: float = math.inf) -> bool:
    """Whether ``peer`` is found through the others and answers.

    Just after the first connection p2pd's own table is still empty: until it is not, ask again.
    """
    deadline = asyncio.get_running_loop().time() + timeout_seconds
    while (left := deadline - asyncio.get_running_loop().time()) > 0:
        try:
            async with asyncio.timeout(min(left, once_routed_seconds)):
                await p2p._client.connect(PeerID.from_base58(peer), [])
        except P2PDaemonError as error:
            if "any peer in table" not in str(error):
                return False
        except (TimeoutError, OSError, EOFError):
            return False
        else:
            return True
        await asyncio.sleep(0.02)
    return False


def _last_line(text: str) -> str:
    # p2pd lists what it tried, one address a line, after a preamble.
    return text.strip().splitlines()[-1].strip(" *")[:200]
