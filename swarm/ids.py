"""Names of things: each id is a type of its own, so that they cannot be mixed up."""

from __future__ import annotations

import secrets
from typing import NewType

RunHash = NewType("RunHash", str)
"""Content hash (64 hex digits) of a run's published config."""

PeerId = NewType("PeerId", str)
"""Base58 libp2p id of an Ed25519 key; the public key can be read from it."""

SessionId = NewType("SessionId", str)
"""One life of a process: 16 hex digits drawn at its start."""

MicrobatchId = NewType("MicrobatchId", int)
"""Index of a microbatch within its step, from 0."""

Digest = NewType("Digest", str)
"""SHA-256 in hex."""


def new_session() -> SessionId:
    """Draw the id of this life of the process."""
    return SessionId(secrets.token_hex(8))


def short(peer: PeerId) -> str:
    """The four characters by which a peer is called on screen (base58 ids share their beginning)."""
    return peer[-4:]
