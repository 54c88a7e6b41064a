"""Words for the command line that several tests say, and what it answers to wrong ones."""

from __future__ import annotations

import pytest

from peers.cli import run

TINY = "examples/tiny.toml"


PEER_ID = "12D3KooWSSRLCggrPhcTrM2Rkg2ScHrDHTdAfCGaf4oWRge9Fnib"


CLOSED = f"/ip4/127.0.0.1/tcp/1/p2p/{PEER_ID}"


STATE = "--state-dir=/proc/x"
"""A folder that cannot be made: should a mistake slip through, nothing is trained."""


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and the one line of the error."""
    code = run(arguments)
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("swarm: ")
    assert "Traceback" not in err
    return code, lines[0]
