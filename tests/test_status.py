"""What strangers write on the DHT is shown as it is written."""

from __future__ import annotations

from typing import Any

import pytest

from peers.status import _show

pytestmark = pytest.mark.fast


def found(endpoint: str, peer: str = "12D3KooWAAAA") -> list[dict[str, Any]]:
    row = {
        "peer": peer,
        "endpoint": endpoint,
        "state": "ready",
        "version": 3,
        "microbatches_per_second": 1.5,
        "queue": 0,
        "compatible": True,
        "reachable": True,
    }
    stages = [{"stage": 0, "peers": [row], "empty": False}]
    return [{"run": "demo", "config_hash": "ab" * 32, "lead": None, "stages": stages}]


@pytest.mark.parametrize("endpoint", ["[/x]a:80", "[fe80::1]:31337", "[red]:80", "node7:1"])
def test_nothing_is_taken_for_markup(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    _show(found(endpoint), clear=False)
    assert endpoint in capsys.readouterr().out


def test_nor_in_a_peers_id(capsys: pytest.CaptureFixture[str]) -> None:
    _show(found("node7:1", peer="12D3KooW[/x]"), clear=False)
    assert "[/x]" in capsys.readouterr().out
