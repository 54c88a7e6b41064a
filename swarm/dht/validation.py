"""Which records a node keeps and believes: signed by their owner, or addressed by their content."""

from __future__ import annotations

import hashlib
import logging
import math
import struct
import time
from collections import OrderedDict

from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer, get_dht_time

from swarm.config import RunConfig
from swarm.dht.identity import Identity, verify
from swarm.dht.payload import RUNS_KEY, decode, key_of, owner_of
from swarm.dht.peer_id import public_key_of
from swarm.ids import PeerId, RunHash

MAX_VALUE_BYTES = 64 * 1024
"""Of a record with its signature."""
MAX_SUBKEY_BYTES = 256
MAX_LIFE_SECONDS = 600.0
"""A record that claims to live longer than this from now on is refused: it would outlive its owner."""

_SIGNATURE_BYTES = 64
_REMEMBERED = 8192
_LOG_PERIOD_SECONDS = 10.0
_CONTEXT = b"swarm.record.v1"

logger = logging.getLogger(__name__)


def key_bytes(key: str) -> bytes:
    """A key as the validator sees it: hivemind hashes keys before they travel."""
    return bytes(DHTID.generate(source=key).to_bytes())


class SignedRecordValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no types
    """Accepts what our nodes write and nothing else, on storing and on reading.

    Peers, leases: subkey is the owner's peer id, the value is followed by its signature over key, subkey,
    value and expiration, and what the value says of itself (owner, run, stage) fits where it stands.
    Configs: subkey is 'name:hash', and the value is a valid config of that name and hash.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._runs = key_bytes(RUNS_KEY)
        # Verdicts depend on nothing but the record, and every read brings every record from several replicas.
        self._verdicts: OrderedDict[bytes, bool] = OrderedDict()
        self._logged_at = -math.inf
        self._refused = 0

    def validate(self, record: DHTRecord) -> bool:
        """Whether to believe ``record``; never raises on what came from outside."""
        problem = self._problem(record)
        if problem is not None:
            self._log(problem)
        return problem is None

    def sign_value(self, record: DHTRecord) -> bytes:
        """Our own records get a signature; configs need none."""
        value: bytes = record.value
        if record.key == self._runs:
            return value
        return value + self._identity.sign(_message(record.key, record.subkey, value, record.expiration_time))

    def strip_value(self, record: DHTRecord) -> bytes:
        """The value as it was before :meth:`sign_value`; called on valid records only."""
        value: bytes = record.value
        return value if record.key == self._runs else value[:-_SIGNATURE_BYTES]

    def _problem(self, record: DHTRecord) -> str | None:
        if len(record.value) > MAX_VALUE_BYTES or len(record.subkey) > MAX_SUBKEY_BYTES:
            return f"a record of {len(record.value)} bytes"
        expiration = record.expiration_time
        if not isinstance(expiration, float) or not math.isfinite(expiration):
            return "an expiration that is not a number"
        if expiration > get_dht_time() + MAX_LIFE_SECONDS:
            return "an expiration too far ahead (is a clock wrong?)"
        mark = hashlib.sha256(_message(record.key, record.subkey, record.value, expiration)).digest()
        if mark not in self._verdicts:
            self._verdicts[mark] = self._is_genuine(record)
            if len(self._verdicts) > _REMEMBERED:
                self._verdicts.popitem(last=False)
        return None if self._verdicts[mark] else "a record that is malformed or not signed by its owner"

    def _is_genuine(self, record: DHTRecord) -> bool:
        try:
            subkey = _text(record.subkey)
            if record.key == self._runs:
                _check_config(subkey, _text(record.value))
            else:
                _check_signed(record, PeerId(subkey))
        except ValueError:
            return False
        return True

    def _log(self, problem: str) -> None:
        self._refused += 1
        now = time.monotonic()
        if now - self._logged_at >= _LOG_PERIOD_SECONDS:
            logger.warning("refused %d DHT record(s), the last one for %s", self._refused, problem)
            self._logged_at, self._refused = now, 0


def _check_config(subkey: str, text: str) -> None:
    name, _, digest = subkey.partition(":")
    if RunConfig.from_published(text, RunHash(digest)).run.name != name:
        raise ValueError("the subkey gives another name")


def _check_signed(record: DHTRecord, owner: PeerId) -> None:
    public_key_of(owner)
    body, signature = record.value[:-_SIGNATURE_BYTES], record.value[-_SIGNATURE_BYTES:]
    if not verify(owner, _message(record.key, record.subkey, body, record.expiration_time), signature):
        raise ValueError("the signature is wrong")
    payload = decode(_text(body))
    if owner_of(payload) != owner or key_bytes(key_of(payload)) != record.key:
        raise ValueError("the record speaks of something else than its key and subkey")


def _text(data: bytes) -> str:
    # msgpack's strings by hand: its decoder also builds hivemind's own types, which nobody needs here.
    # Packing again and comparing leaves one spelling only.
    width = {0xD9: 2, 0xDA: 3, 0xDB: 5}.get(data[0], 1) if data else 0
    text = data[width:].decode("utf-8")
    if MSGPackSerializer.dumps(text) != data:
        raise ValueError("not a text")
    return text


def _message(key: bytes, subkey: bytes, value: bytes, expiration: float) -> bytes:
    head = struct.pack(">IIId", len(key), len(subkey), len(value), expiration)
    return b"".join((_CONTEXT, head, key, subkey, value))
