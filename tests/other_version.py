"""The real program as it would be if it spoke another protocol version; test-only entry point for the nursery."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from peers import cli

VERSION = 99


def run(arguments: Sequence[str]) -> int:
    """In a process of its own: all modules that know the version are told another one."""
    for module in list(sys.modules.values()):
        if hasattr(module, "PROTOCOL_VERSION"):
            module.PROTOCOL_VERSION = VERSION  # type: ignore[attr-defined]
    return cli.run(arguments)
