"""Records on the DHT: who may write what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer, get_dht_time

from swarm.dht.identity import Identity
from swarm.dht.payload import RUNS_KEY, Gone, decode, encode, key_of, peers_key
from swarm.dht.validation import MAX_VALUE_BYTES, SignedRecordValidator, key_bytes
from swarm.endpoints import is_endpoint
from swarm.errors import BadRequest
from swarm.ids import Digest, RunHash, SessionId
from swarm.records import Lineage
from swarm.wire import fields
from tests.dht_case import CONFIG, RUN, lead_record, peer_record

pytestmark = pytest.mark.swarm  # each node starts a p2pd

# --- payloads and validation ------------------------------------------------------


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return Identity.load_or_create(tmp_path / "identity")


def signed(identity: Identity, key: str, subkey: Any, text: Any, *, expiration: float | None = None) -> DHTRecord:
    record = DHTRecord(
        key_bytes(key),
        MSGPackSerializer.dumps(subkey),
        MSGPackSerializer.dumps(text),
        get_dht_time() + 30 if expiration is None else expiration,
    )
    return replace(record, value=SignedRecordValidator(identity).sign_value(record))


def test_payloads_round_trip(identity: Identity) -> None:
    gone = Gone(peer=identity.peer_id, session=SessionId("0123456789abcdef"), run=RUN, stage=4)
    for payload in (peer_record(identity.peer_id), lead_record(identity.peer_id, 7), gone):
        assert decode(encode(payload)) == payload


@pytest.mark.parametrize(
    "changes",
    [
        {"stage": -1},
        {"stage": 1 << 20},
        {"endpoint": "nowhere"},
        {"endpoint": "host:0"},
        {"endpoint": "host:99999"},
        {"endpoint": "a" * 400 + ":1"},
        {"endpoint": "[/x]a:80"},
        {"endpoint": "unix:/run/x:80"},
        {"endpoint": "fe80::1:80"},
        {"endpoint": "[fe80::1]"},
        {"session": "x"},
        {"run": "b"},
        {"forward_seconds": float("nan")},
        {"forward_seconds": -1.0},
        {"queue": -1},
        {"numeric_class": "x" * 129},
        {"numeric_class": "\x1b[2J"},
        {"peer": "QmcZf59bWwK5XFi76CZX8cbJ4BhTzzA3gU1ZjYZcYW3dwt"},
        {"lineage": Lineage(generation=-1, length=0, chain=Digest("a" * 64))},
        {"lineage": Lineage(generation=0, length=0, chain=Digest("xyz"))},
        {"stage": "0"},
        {"state": "gone fishing"},
    ],
)
def test_numbers_and_ids_out_of_range_are_malformed(identity: Identity, changes: dict[str, Any]) -> None:
    record = peer_record(identity.peer_id)
    assert decode(encode(record)) == record
    with pytest.raises(ValueError):
        decode(encode(replace(record, **changes)))


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "null", '{"kind":"peer"}', '{"kind":["peer"],"record":{}}', "[" * 5000, '{"kind":"x"}', "\0"],
)
def test_junk_is_malformed(text: str) -> None:
    with pytest.raises(ValueError):
        decode(text)


@pytest.mark.parametrize(
    "text", ["h:1", "[fe80::1]:31337", "a_b.c-d:65535", "[/x]a:80", "unix:x:1", "h:0", "h:65536", ""]
)
def test_the_wire_takes_the_same_endpoints(identity: Identity, text: str) -> None:
    def taken(check: Callable[[], object], refusal: type[Exception]) -> bool:
        try:
            check()
        except refusal:
            return False
        return True

    record = encode(peer_record(identity.peer_id, endpoint=text))
    verdicts = {
        is_endpoint(text),
        taken(lambda: decode(record), ValueError),
        taken(lambda: fields.endpoint("endpoint", text), BadRequest),
    }
    assert len(verdicts) == 1


def test_own_records_and_configs_are_valid(identity: Identity, tmp_path: Path) -> None:
    record = peer_record(identity.peer_id)
    validator = SignedRecordValidator(Identity.load_or_create(tmp_path / "another"))
    genuine = signed(identity, key_of(record), identity.peer_id, encode(record))
    assert validator.validate(genuine)
    assert MSGPackSerializer.loads(validator.strip_value(genuine)) == encode(record)
    config = signed(identity, RUNS_KEY, f"demo:{CONFIG.hash}", CONFIG.published())
    assert validator.validate(config)
    assert MSGPackSerializer.loads(validator.strip_value(config)) == CONFIG.published()


def test_forgeries_are_refused(identity: Identity, tmp_path: Path) -> None:
    other = Identity.load_or_create(tmp_path / "other")
    record = peer_record(identity.peer_id)
    key, text = key_of(record), encode(record)
    genuine = signed(identity, key, identity.peer_id, text)
    flipped = genuine.value[:-1] + bytes([genuine.value[-1] ^ 1])
    pickled = b"\x80\x04\x95\x0f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."
    forgeries = {
        "unsigned": replace(genuine, value=MSGPackSerializer.dumps(text)),
        "wrong signature": replace(genuine, value=flipped),
        "changed value": replace(genuine, value=genuine.value.replace(b"4000", b"4001")),
        "longer life": replace(genuine, expiration_time=genuine.expiration_time + 1),
        "under another's subkey": replace(genuine, subkey=MSGPackSerializer.dumps(other.peer_id)),
        "signed by another": signed(other, key, identity.peer_id, text),
        "speaks of another": signed(other, key, other.peer_id, text),
        "another stage's key": signed(identity, peers_key(RUN, 1), identity.peer_id, text),
        "another run's key": signed(identity, peers_key(RunHash("b" * 64), 0), identity.peer_id, text),
        "a key of nobody": signed(identity, "anything", identity.peer_id, text),
        "no subkey": signed(identity, key, None, text),
        "subkey is bytes": signed(identity, key, identity.peer_id.encode(), text),
        "subkey is a list": signed(identity, key, [identity.peer_id], text),
        "value is bytes": signed(identity, key, identity.peer_id, text.encode()),
        "value is a tuple": signed(identity, key, identity.peer_id, (text,)),
        "value is a pickle": replace(genuine, value=pickled),
        "value is junk": signed(identity, key, identity.peer_id, "junk"),
        "nothing": replace(genuine, value=b"", subkey=b""),
        "oversize": signed(identity, key, identity.peer_id, text + " " * MAX_VALUE_BYTES),
        "lives for ever": signed(identity, key, identity.peer_id, text, expiration=get_dht_time() + 1e9),
        "never expires": signed(identity, key, identity.peer_id, text, expiration=float("inf")),
        "not a number": signed(identity, key, identity.peer_id, text, expiration=float("nan")),
        "config of another hash": signed(identity, RUNS_KEY, f"demo:{'0' * 64}", CONFIG.published()),
        "config of another name": signed(identity, RUNS_KEY, f"omed:{CONFIG.hash}", CONFIG.published()),
        "config that is none": signed(identity, RUNS_KEY, f"demo:{CONFIG.hash}", "{}"),
        "config without text": signed(identity, RUNS_KEY, f"demo:{CONFIG.hash}", b"x"),
    }
    validator = SignedRecordValidator(identity)
    assert validator.validate(genuine)
    assert [name for name, forgery in forgeries.items() if validator.validate(forgery)] == []
