"""Addresses as people type them: where to join, listen and announce.  No hivemind here: checks are instant."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.dht.peer_id import peer_id_bytes
from swarm.errors import UsageError
from swarm.ids import PeerId

JOIN_EXAMPLE = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW..."
"""What ``--join`` takes: the line that a peer or bootstrap prints at its start."""

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?"
_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*\.?")
_ALL_DIGITS = re.compile(r"[0-9.]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A TCP host and port."""

    host: str
    """IPv4, IPv6 without brackets, or a DNS name."""
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """A peer of the DHT and where to dial it; its text is a libp2p multiaddr."""

    kind: str
    """ip4, ip6, dns, dns4 or dns6."""
    host: str
    port: int
    peer: PeerId

    def __str__(self) -> str:
        return f"/{self.kind}/{self.host}/tcp/{self.port}/p2p/{self.peer}"


def parse_join(values: Sequence[str]) -> tuple[PeerAddress, ...]:
    """Read the values of ``--join``: one address each, or several separated by commas or blanks.

    Doubles are dropped.  Raises UsageError quoting the wrong value and showing a right one.
    """
    found: dict[PeerAddress, None] = {}
    for value in values:
        parts = value.replace(",", " ").split()
        if not parts:
            raise _wrong("--join", value, "it is empty", JOIN_EXAMPLE)
        for part in parts:
            found[_peer_address(part)] = None
    return tuple(found)


def parse_listen(value: str, option: str = "--listen") -> Endpoint:
    """Read ``--listen HOST:PORT``: an IP address of this machine; port 0 takes a free one.  Raises UsageError."""
    example = "0.0.0.0:31337"
    host, port = _split(option, value, example)
    if host == "localhost":
        host = "127.0.0.1"
    if _ip(host) is None:
        raise _wrong(option, value, f"{host!r} is not an IP address of this machine", example)
    return Endpoint(host=host, port=_port(option, value, port, example, lowest=0))


def parse_announce(value: str, option: str = "--announce") -> Endpoint:
    """Read ``--announce HOST:PORT``: what others dial, an IP address or a DNS name.  Raises UsageError."""
    example = "node7.example.org:31337"
    host, port = _split(option, value, example)
    _check_dialable(option, value, host, example)
    return Endpoint(host=host, port=_port(option, value, port, example, lowest=1))


def parse_announce_host(value: str) -> str:
    """Read ``--announce HOST`` where the port is that of ``--listen``.  Raises UsageError."""
    option, example = "--announce", "node7.example.org"
    host = value.strip()
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    _check_dialable(option, value, host, example)
    return host


def announced(
    listen: Endpoint, announce: Endpoint | None, join: Sequence[PeerAddress] = ()
) -> tuple[Endpoint, list[str]]:
    """What to announce, and warnings, for a server that is bound to ``listen`` (with its real port).

    Of a wildcard it is the address from which this machine speaks to the swarm at ``join``.
    """
    if announce is not None:
        return announce, []
    if not is_wildcard(listen.host):
        return listen, []
    guess = Endpoint(host=_outbound_ip(listen.host, join), port=listen.port)
    return guess, [
        f"listening on {listen} without --announce: others are told to dial {guess}; "
        "if they cannot reach that, give --announce HOST:PORT"
    ]


def is_wildcard(host: str) -> bool:
    """Whether ``host`` means all of this machine's addresses."""
    ip = _ip(host)
    return ip is not None and ip.is_unspecified


def multiaddr(endpoint: Endpoint) -> str:
    """The libp2p form of an endpoint, without a peer id."""
    ip = _ip(endpoint.host)
    kind = "dns4" if ip is None else f"ip{ip.version}"
    return f"/{kind}/{endpoint.host}/tcp/{endpoint.port}"


def _peer_address(value: str) -> PeerAddress:
    def wrong(why: str) -> UsageError:
        return _wrong("--join", value, why, JOIN_EXAMPLE)

    if not value.startswith("/"):
        raise wrong("it does not start with '/'")
    parts = value[1:].split("/")
    if len(parts) != 6 or parts[0] not in ("ip4", "ip6", "dns", "dns4", "dns6") or parts[2] != "tcp":
        raise wrong("it does not have the form /ip4/HOST/tcp/PORT/p2p/ID (or ip6, dns, dns4, dns6)")
    kind, host, _, port, marker, peer = parts
    if marker != "p2p":
        raise wrong("the peer id after '/p2p/' is missing")
    if kind.startswith("ip"):
        ip = _ip(host)
        if ip is None or ip.version != int(kind[2]):
            raise wrong(f"{host!r} is not an IPv{kind[2]} address")
        if ip.is_unspecified:
            raise wrong(f"{host} is no address that can be dialed")
    elif not _is_name(host):
        raise wrong(f"{host!r} is not a host name")
    try:
        peer_id_bytes(peer)
    except ValueError:
        raise wrong(f"{peer!r} is not a whole peer id") from None
    number = _port("--join", value, port, JOIN_EXAMPLE, lowest=1)
    return PeerAddress(kind=kind, host=host, port=number, peer=PeerId(peer))


def _split(option: str, value: str, example: str) -> tuple[str, str]:
    text = value.strip()
    host, colon, port = text.rpartition(":")
    if not text:
        raise _wrong(option, value, "it is empty", example)
    if not colon or (text.startswith("[") and text.endswith("]")):
        raise _wrong(option, value, "the port is missing", example)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if ":" not in host:
            raise _wrong(option, value, "brackets are for IPv6 addresses", example)
    elif ":" in host:
        raise _wrong(option, value, "an IPv6 address needs brackets", "[::1]:31337")
    if not host:
        raise _wrong(option, value, "the host is missing", example)
    return host, port


def _port(option: str, value: str, text: str, example: str, *, lowest: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and lowest <= int(text) <= 65535):
        raise _wrong(option, value, f"{text!r} is not a port from {lowest} to 65535", example)
    return int(text)


def _check_dialable(option: str, value: str, host: str, example: str) -> None:
    if is_wildcard(host):
        raise _wrong(option, value, f"{host} is no address that others can dial", example)
    if "%" in host:
        raise _wrong(option, value, f"the zone of {host!r} means nothing on other machines", example)
    if _ip(host) is None and not _is_name(host):
        raise _wrong(option, value, f"{host!r} is neither an IP address nor a host name", example)


def _is_name(host: str) -> bool:
    return _NAME.fullmatch(host) is not None and _ALL_DIGITS.fullmatch(host) is None


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _outbound_ip(wildcard: str, join: Sequence[PeerAddress]) -> str:
    """The address of this machine towards the swarm; if the swarm is on this machine too, towards the internet."""
    version = 6 if ":" in wildcard else 4
    family, elsewhere, own = (
        (socket.AF_INET6, "2001:db8::1", "::1") if version == 6 else (socket.AF_INET, "192.0.2.1", "127.0.0.1")
    )
    others = [ip for address in join if (ip := _ip(address.host)) and ip.version == version and not ip.is_loopback]
    for target in [*map(str, others), elsewhere]:
        # Connecting a datagram socket sends nothing; it only makes the kernel choose a source address.
        with socket.socket(family, socket.SOCK_DGRAM) as probing:
            try:
                probing.connect((target, 9))
            except OSError:
                continue
            return str(probing.getsockname()[0])
    return own


def _wrong(option: str, value: str, why: str, example: str) -> UsageError:
    return UsageError(f"{option} {value!r}: {why}; it should look like {example}")
