import subprocess
import sys

import pytest

from swarm.dht.addresses import (
    JOIN_EXAMPLE,
    Endpoint,
    announced,
    multiaddr,
    parse_announce,
    parse_announce_host,
    parse_join,
    parse_listen,
)
from swarm.errors import UsageError

pytestmark = pytest.mark.fast

ID = "12D3KooWFuLKajH4h8eSTeqvanNn7SvQMnaSEy4ffezzMZ6eFkuC"
RSA_ID = "QmcZf59bWwK5XFi76CZX8cbJ4BhTzzA3gU1ZjYZcYW3dwt"
GOOD = f"/ip4/127.0.0.1/tcp/31337/p2p/{ID}"


@pytest.mark.parametrize(
    "address",
    [
        GOOD,
        f"/ip4/127.0.0.1/tcp/1/p2p/{RSA_ID}",
        f"/ip6/::1/tcp/31337/p2p/{ID}",
        f"/dns4/boot.example.org/tcp/65535/p2p/{ID}",
        f"/dns6/boot/tcp/31337/p2p/{ID}",
        f"/dns/boot-1.example.org./tcp/31337/p2p/{ID}",
    ],
)
def test_right_addresses_read_back_as_written(address: str) -> None:
    assert [str(found) for found in parse_join([address])] == [address]


@pytest.mark.parametrize(
    "values",
    [
        [f"  {GOOD} "],
        [f"{GOOD},"],
        [f"{GOOD} , \n"],
        [GOOD, GOOD],
    ],
)
def test_blanks_commas_and_doubles_do_not_matter(values: list[str]) -> None:
    assert [str(found) for found in parse_join(values)] == [GOOD]


def test_several_in_one_value() -> None:
    other = f"/ip6/::1/tcp/31337/p2p/{ID}"
    assert [str(found) for found in parse_join([f"{GOOD},{other}"])] == [GOOD, other]
    assert [str(found) for found in parse_join([f"{GOOD} {other}", GOOD])] == [GOOD, other]
    assert parse_join([]) == ()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("", "empty"),
        ("  ", "empty"),
        (",", "empty"),
        ("boot.example.org", "does not start with '/'"),
        ("127.0.0.1:31337", "does not start with '/'"),
        (GOOD[1:], "does not start with '/'"),
        ("/home/me/identity", "form"),
        ("/etc/passwd", "form"),
        ("/ip4/127.0.0.1/tcp/31337", "form"),
        ("/ip4/127.0.0.1/tcp/31337/p2p", "form"),
        ("/ip4/127.0.0.1/tcp/31337/p2p/", "not a whole peer id"),
        (f"/ip4/127.0.0.1/udp/31337/p2p/{ID}", "form"),
        (f"/ip4/127.0.0.1/tcp/31337/p3p/{ID}", "peer id after '/p2p/' is missing"),
        (GOOD[:-1], "not a whole peer id"),
        (f"/ip4/127.0.0.1/tcp/31337/p2p/{ID[:-10]}", "not a whole peer id"),
        (f"/ip4/127.0.0.1/tcp/31337/p2p/{ID[:-1]}0", "not a whole peer id"),
        (f"/ip4/127.0.0.1/tcp/31337/p2p/{RSA_ID[:-1]}", "not a whole peer id"),
        (f"/ip4/127.0.0.1/tcp/31337/p2p/{'z' * 5000}", "not a whole peer id"),
        (f"{GOOD}/extra", "form"),
        (f"/ip4/127.0.0.1/tcp/0/p2p/{ID}", "port"),
        (f"/ip4/127.0.0.1/tcp/70000/p2p/{ID}", "port"),
        (f"/ip4/127.0.0.1/tcp/-1/p2p/{ID}", "port"),
        (f"/ip4/127.0.0.1/tcp/http/p2p/{ID}", "port"),
        (f"/ip4/boot.example.org/tcp/1/p2p/{ID}", "not an IPv4 address"),
        (f"/ip4/::1/tcp/1/p2p/{ID}", "not an IPv4 address"),
        (f"/ip4/0.0.0.0/tcp/1/p2p/{ID}", "dialed"),
        (f"/ip6/127.0.0.1/tcp/1/p2p/{ID}", "not an IPv6 address"),
        (f"/dns4/-bad-/tcp/1/p2p/{ID}", "not a host name"),
        (f"/dns4/1.2.3.4/tcp/1/p2p/{ID}", "not a host name"),
    ],
)
def test_wrong_addresses_are_quoted_with_an_example(value: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        parse_join([value])
    message = str(caught.value)
    assert repr(value.strip()) in message or repr(value) in message
    assert JOIN_EXAMPLE in message


def test_one_wrong_address_among_right_ones_is_refused() -> None:
    with pytest.raises(UsageError, match="'nonsense'"):
        parse_join([f"{GOOD},nonsense"])


@pytest.mark.parametrize(
    ("value", "host", "port"),
    [
        ("0.0.0.0:0", "0.0.0.0", 0),
        (" 127.0.0.1:31337 ", "127.0.0.1", 31337),
        ("[::1]:8", "::1", 8),
        ("localhost:8", "127.0.0.1", 8),
    ],
)
def test_listen(value: str, host: str, port: int) -> None:
    assert parse_listen(value) == Endpoint(host=host, port=port)


WRONG_LISTEN = ["", " ", ":", "8000", "1.2.3.4", "1.2.3.4:", ":80", "1.2.3.4:70000", "1.2.3.4:x", "::1:80", "[::1]"]
WRONG_LISTEN += ["[1.2.3.4]:80", "example.org:80", "1.2.3.4:+1", "/ip4/1.2.3.4/tcp/80"]


@pytest.mark.parametrize("value", WRONG_LISTEN)
def test_wrong_listen(value: str) -> None:
    with pytest.raises(UsageError, match="--listen") as caught:
        parse_listen(value)
    assert repr(value) in str(caught.value)


def test_announce() -> None:
    assert parse_announce("node7.example.org:1") == Endpoint(host="node7.example.org", port=1)
    assert parse_announce("203.0.113.7:65535") == Endpoint(host="203.0.113.7", port=65535)
    assert str(parse_announce("[2001:db8::1]:80")) == "[2001:db8::1]:80"
    assert parse_announce_host(" node7 ") == "node7"
    assert parse_announce_host("[::1]") == "::1"


@pytest.mark.parametrize(
    "value", ["", "host:0", "0.0.0.0:80", "[::]:80", "a b:80", "host", "host:70000", "300.1.1.1:80"]
)
def test_wrong_announce(value: str) -> None:
    with pytest.raises(UsageError, match="--announce"):
        parse_announce(value)


@pytest.mark.parametrize("value", ["", " ", "0.0.0.0", "host:80", "a b", "/x"])
def test_wrong_announce_host(value: str) -> None:
    with pytest.raises(UsageError, match="--announce"):
        parse_announce_host(value)


def test_what_is_announced_by_default() -> None:
    listen = Endpoint(host="127.0.0.1", port=5)
    assert announced(listen, None) == (listen, [])
    other = Endpoint(host="x", port=6)
    assert announced(Endpoint(host="0.0.0.0", port=5), other) == (other, [])
    endpoint, warnings = announced(Endpoint(host="0.0.0.0", port=5), None)
    assert endpoint.port == 5
    assert endpoint.host != "0.0.0.0"
    assert len(warnings) == 1
    assert "--announce" in warnings[0]


def test_multiaddr() -> None:
    assert multiaddr(Endpoint(host="1.2.3.4", port=5)) == "/ip4/1.2.3.4/tcp/5"
    assert multiaddr(Endpoint(host="::1", port=5)) == "/ip6/::1/tcp/5"
    assert multiaddr(Endpoint(host="localhost", port=5)) == "/dns4/localhost/tcp/5"


def test_neither_hivemind_nor_torch_is_imported_for_a_check() -> None:
    program = "import sys, swarm.dht.addresses; sys.exit('hivemind' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
