import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.dht.identity import Identity, IdentityLock, verify
from swarm.dht.peer_id import decode_base58, encode_base58, peer_id_bytes, public_key_of
from swarm.errors import CannotJoin, ExitCode, UsageError
from swarm.ids import PeerId

pytestmark = pytest.mark.fast


def test_missing_file_is_made_once_for_its_owner_only_and_reused(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    first = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]  # no draft is left behind
    content = path.read_bytes()
    assert Identity.load_or_create(path).peer_id == first.peer_id
    assert path.read_bytes() == content
    assert Identity.load_or_create(tmp_path / "other").peer_id != first.peer_id


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (bytes.fromhex("08011240") + b"x" * 40, "cut off"),
        (bytes.fromhex("080012a709") + b"x" * 1191, "not a libp2p key file of an Ed25519 key"),  # RSA
        (b"hello", "not a libp2p key file"),
        (bytes.fromhex("08011240") + b"x" * 65, "not a libp2p key file"),
        (bytes.fromhex("08011240") + b"x" * 64, "does not belong"),
    ],
)
def test_bad_file_is_named_and_never_overwritten(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "identity"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=reason) as caught:
        Identity.load_or_create(path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == content


def test_truncated_copy_of_a_real_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    Identity.load_or_create(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UsageError, match=r"cut off \(67 of 68 bytes\)"):
        Identity.load_or_create(path)


def test_what_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"no folder {tmp_path / 'missing'}"):
        Identity.load_or_create(tmp_path / "missing" / "identity")
    with pytest.raises(UsageError, match=f"{tmp_path}: cannot be read"):
        Identity.load_or_create(tmp_path)


@pytest.mark.skipif(os.getuid() == 0, reason="root reads every file")
def test_unreadable_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    Identity.load_or_create(path)
    path.chmod(0)
    with pytest.raises(UsageError, match="Permission denied"):
        Identity.load_or_create(path)


def test_signature_verifies_against_the_peer_id_alone(tmp_path: Path) -> None:
    identity = Identity.load_or_create(tmp_path / "a")
    other = Identity.load_or_create(tmp_path / "b")
    signature = identity.sign(b"message")
    assert verify(identity.peer_id, b"message", signature)
    assert not verify(identity.peer_id, b"massage", signature)
    assert not verify(identity.peer_id, b"message", signature[:-1])
    assert not verify(other.peer_id, b"message", signature)
    assert not verify(PeerId("junk"), b"message", signature)


def test_peer_id_is_libp2ps(tmp_path: Path) -> None:
    # Source: the test vectors of the libp2p peer-ids specification.
    data = bytes.fromhex(
        "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
        "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
    )
    path = tmp_path / "identity"
    path.write_bytes(data)
    assert public_key_of(Identity.load_or_create(path).peer_id) == data[-32:]


def test_base58_round_trip() -> None:
    for raw in (b"", b"\0", b"\0\0\1", b"hello", bytes(range(60))):
        assert decode_base58(encode_base58(raw)) == raw
    assert encode_base58(b"hello") == "Cn8eVZg"
    for junk in ("", "12D3KooW", "Qm", "0OIl", "1" * 200):
        with pytest.raises(ValueError):
            peer_id_bytes(junk)


def test_lock_is_held_by_one_process_and_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    Identity.load_or_create(path)
    program = (
        "import sys, pathlib; from swarm.dht.identity import IdentityLock;"
        "lock = IdentityLock(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(CannotJoin, match=f"identity {path} is in use by another process") as caught:
            IdentityLock(path)
        assert caught.value.exit_code == ExitCode.CANNOT_JOIN
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    lock = IdentityLock(path)
    with pytest.raises(CannotJoin):
        IdentityLock(path)
    lock.release()
    IdentityLock(path).release()
