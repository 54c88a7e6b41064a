"""A process's identity: an Ed25519 key in a libp2p key file, used by one process at a time."""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarm.dht.peer_id import peer_id_of, public_key_of
from swarm.errors import CannotJoin, UsageError
from swarm.ids import PeerId

_HEADER = bytes.fromhex("08011240")
"""libp2p's protobuf PrivateKey {type: Ed25519, data: 64 bytes (private key, then public key)}."""
_FILE_BYTES = len(_HEADER) + 64


class Identity:
    """A signing key and the file that p2pd reads it from."""

    def __init__(self, path: Path, key: Ed25519PrivateKey) -> None:
        self.path = path
        self._key = key
        self.peer_id: PeerId = peer_id_of(key.public_key().public_bytes_raw())

    @staticmethod
    def load_or_create(path: Path) -> Identity:
        """Read the key file at ``path``, or make one there, readable by its owner only.

        A file that is not a whole Ed25519 key is never touched.  Raises UsageError naming the file.
        """
        if not path.parent.is_dir():
            raise UsageError(f"identity {path}: there is no folder {path.parent}")
        if not path.exists():
            _create(path)
        return _load(path)

    def sign(self, message: bytes) -> bytes:
        """A signature of 64 bytes that :func:`verify` accepts for ``peer_id``."""
        return self._key.sign(message)


def verify(peer: PeerId, message: bytes, signature: bytes) -> bool:
    """Whether ``signature`` over ``message`` was made by ``peer``; its id is all that is needed."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key_of(peer)).verify(signature, message)
    except (ValueError, InvalidSignature):
        return False
    return True


def _create(path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    data = _HEADER + key.private_bytes_raw() + key.public_key().public_bytes_raw()
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, path)  # unlike a rename, it never replaces a file that another process just made
        except FileExistsError:
            pass  # that one is the identity: it is loaded next
        finally:
            draft.unlink()
    except OSError as error:
        raise UsageError(f"identity {path}: cannot be written: {error.strerror}") from None


def _load(path: Path) -> Identity:
    try:
        with path.open("rb") as file:
            data = file.read(_FILE_BYTES + 4096)
    except OSError as error:
        raise UsageError(f"identity {path}: cannot be read: {error.strerror}") from None
    problem = _problem(data)
    if problem:
        raise UsageError(f"identity {path}: {problem}; it is left as it is: move it away, and a new one is made")
    return Identity(path, Ed25519PrivateKey.from_private_bytes(data[len(_HEADER) : len(_HEADER) + 32]))


def _problem(data: bytes) -> str | None:
    if not data:
        return "the file is empty"
    if data[:2] != _HEADER[:2]:
        return "not a libp2p key file of an Ed25519 key"
    if len(data) < _FILE_BYTES:
        return f"the file is cut off ({len(data)} of {_FILE_BYTES} bytes)"
    if len(data) > _FILE_BYTES or not data.startswith(_HEADER):
        return "not a libp2p key file of an Ed25519 key"
    private, public = data[len(_HEADER) : -32], data[-32:]
    if Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw() != public:
        return "the public key in it does not belong to the private key"
    return None


class IdentityLock:
    """Holds an identity file for this process.  The kernel lets go of it when the process dies."""

    def __init__(self, path: Path) -> None:
        """Raises CannotJoin if another process holds ``path``."""
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._handle)
            raise CannotJoin(
                f"identity {path} is in use by another process; give each process an identity of its own"
            ) from None

    def release(self) -> None:
        """Let another process use the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
