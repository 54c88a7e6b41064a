"""Addresses on the command line."""

from __future__ import annotations

import pytest

from swarm.errors import ExitCode
from tests.cli_case import CLOSED, PEER_ID, STATE, TINY, error_of

EXAMPLE = "/ip4/203.0.113.7/tcp/31337/p2p/"


# --- addresses --------------------------------------------------------------------

WRONG_JOIN = {
    "": "it is empty",
    "  ": "it is empty",
    "node7": "does not start with '/'",
    "node7.example.org:31337": "does not start with '/'",
    "127.0.0.1:31337": "does not start with '/'",
    "[::1]:31337": "does not start with '/'",
    f"ip4/127.0.0.1/tcp/31337/p2p/{PEER_ID}": "does not start with '/'",
    "/ip4/127.0.0.1/tcp/31337": "does not have the form",
    "/ip4/127.0.0.1/tcp/31337/p2p/": "not a whole peer id",
    f"/ip4/127.0.0.1/tcp/31337/p2p/{PEER_ID[:-5]}": "not a whole peer id",
    f"/ip4/127.0.0.1/tcp/0/p2p/{PEER_ID}": "'0' is not a port from 1 to 65535",
    f"/ip4/127.0.0.1/tcp/70000/p2p/{PEER_ID}": "'70000' is not a port",
    f"/ip4/node7/tcp/31337/p2p/{PEER_ID}": "not an IPv4 address",
    f"/ip4/0.0.0.0/tcp/31337/p2p/{PEER_ID}": "no address that can be dialed",
    "/etc/hosts": "does not have the form",
}


@pytest.mark.fast
@pytest.mark.parametrize("command", [["peer"], ["train", TINY, "--steps", "1", STATE], ["status"]])
@pytest.mark.parametrize("value", WRONG_JOIN)
def test_an_address_to_join(command: list[str], value: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = error_of([*command, "--join", value], capsys)
    assert code == ExitCode.USAGE
    assert repr(value.strip()) in line or repr(value) in line
    assert WRONG_JOIN[value] in line
    assert EXAMPLE in line


WRONG_LISTEN = [
    "",
    " ",
    "127.0.0.1",
    "node7:31337",
    "127.0.0.1:70000",
    "127.0.0.1:x",
    "::1:31337",
    CLOSED,
    "1.2.3.4:5,",
]


@pytest.mark.fast
@pytest.mark.parametrize("command", [["peer", "--join", CLOSED], ["bootstrap"]])
@pytest.mark.parametrize("value", WRONG_LISTEN)
def test_an_address_to_listen_on(command: list[str], value: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = error_of([*command, "--listen", value], capsys)
    assert code == ExitCode.USAGE
    assert f"--listen {value!r}" in line
    assert "it should look like" in line


WRONG_ANNOUNCE = [
    "",
    " ",
    "node7",
    "node7:0",
    "node7:70000",
    "0.0.0.0:31337",
    "[::]:31337",
    "a b:1",
    CLOSED,
    "1.2.3.4:5,",
]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("command", "value"),
    [(["peer", "--join", CLOSED], value) for value in WRONG_ANNOUNCE]
    + [(["bootstrap"], value) for value in WRONG_ANNOUNCE if value != "node7"],
)
def test_an_address_to_announce(command: list[str], value: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = error_of([*command, "--announce", value], capsys)
    assert code == ExitCode.USAGE
    assert f"--announce {value!r}" in line
    assert "it should look like" in line
