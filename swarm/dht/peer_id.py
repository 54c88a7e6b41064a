"""libp2p peer ids as text, and the public key that an Ed25519 one contains.

Source: https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
"""

from __future__ import annotations

from swarm.ids import PeerId

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_DIGITS = {character: value for value, character in enumerate(_ALPHABET)}
_LONGEST = 64
"""Characters; real ids have 46 (RSA) or 52 (Ed25519)."""

_ED25519_PREFIX = bytes.fromhex("002408011220")
"""Identity multihash of 36 bytes, holding protobuf PublicKey {type: Ed25519, data: 32 bytes}."""
_ED25519_BYTES = len(_ED25519_PREFIX) + 32
_SHA256_PREFIX = bytes.fromhex("1220")
_SHA256_BYTES = len(_SHA256_PREFIX) + 32


def encode_base58(data: bytes) -> str:
    """Bitcoin's base 58."""
    number = int.from_bytes(data, "big")
    characters: list[str] = []
    while number:
        number, digit = divmod(number, 58)
        characters.append(_ALPHABET[digit])
    zeros = len(data) - len(data.lstrip(b"\0"))
    return _ALPHABET[0] * zeros + "".join(reversed(characters))


def decode_base58(text: str) -> bytes:
    """Inverse of :func:`encode_base58`.  Raises ValueError."""
    number = 0
    for character in text:
        if character not in _DIGITS:
            raise ValueError(f"{character!r} is not a base-58 digit")
        number = number * 58 + _DIGITS[character]
    zeros = len(text) - len(text.lstrip(_ALPHABET[0]))
    return b"\0" * zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")


def peer_id_bytes(text: str) -> bytes:
    """The multihash that ``text`` stands for.  Raises ValueError unless it is a whole peer id."""
    if not text or len(text) > _LONGEST:
        raise ValueError("not a peer id")
    raw = decode_base58(text)
    if raw.startswith(_ED25519_PREFIX) and len(raw) == _ED25519_BYTES:
        return raw
    if raw.startswith(_SHA256_PREFIX) and len(raw) == _SHA256_BYTES:
        return raw
    raise ValueError("not a whole peer id")


def public_key_of(peer: PeerId) -> bytes:
    """The 32-byte Ed25519 public key inside ``peer``.  Raises ValueError if it is an id of another kind."""
    raw = peer_id_bytes(peer)
    if not raw.startswith(_ED25519_PREFIX):
        raise ValueError("not the peer id of an Ed25519 key")
    return raw[len(_ED25519_PREFIX) :]


def peer_id_of(public_key: bytes) -> PeerId:
    """The peer id of an Ed25519 public key of 32 bytes."""
    return PeerId(encode_base58(_ED25519_PREFIX + public_key))
