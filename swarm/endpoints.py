"""What strangers may say of where they are and what they run on: one strict notion, for the DHT and the wire."""

from __future__ import annotations

import re

MAX_NUMERIC_CLASS = 128
"""Characters of a peer's numeric class."""

_ENDPOINT = re.compile(r"(?:[A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,64}\]):([0-9]{1,5})", re.ASCII)


def is_endpoint(text: str) -> bool:
    """HOST:PORT or [IPV6]:PORT, and nothing that gRPC would take for another kind of address ("unix:...")."""
    match = _ENDPOINT.fullmatch(text)
    return match is not None and 0 < int(match[1]) < 1 << 16


def is_numeric_class(text: str) -> bool:
    """At most :data:`MAX_NUMERIC_CLASS` characters, all of them printable."""
    return len(text) <= MAX_NUMERIC_CLASS and text.isprintable()
