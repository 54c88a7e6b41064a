"""What the records on the DHT say, as JSON text: parsed strictly, sizes and numbers checked, never unpickled."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from swarm.dht.peer_id import public_key_of
from swarm.endpoints import is_endpoint, is_numeric_class
from swarm.ids import PeerId, RunHash, SessionId
from swarm.records import LeadRecord, Lineage, PeerRecord

RUNS_KEY = "swarm.runs"
"""Key of the dictionary of published configs; its subkeys are 'name:hash'."""

_HEX64 = re.compile(r"[0-9a-f]{64}")
_HEX16 = re.compile(r"[0-9a-f]{16}")
_LARGEST = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """In the place of a PeerRecord: its owner serves this stage no more."""

    peer: PeerId
    session: SessionId
    run: RunHash
    stage: int


Payload = PeerRecord | LeadRecord | Gone

_KINDS: dict[str, TypeAdapter[Any]] = {
    "peer": TypeAdapter(PeerRecord),
    "lead": TypeAdapter(LeadRecord),
    "gone": TypeAdapter(Gone),
}


def peers_key(run: RunHash, stage: int) -> str:
    """Key of the dictionary of a stage's peers; its subkeys are their ids."""
    return f"swarm.peers/{run}/{stage}"


def lead_key(run: RunHash) -> str:
    """Key of the dictionary of a run's leases; its subkeys are the trainers' ids."""
    return f"swarm.lead/{run}"


def key_of(payload: Payload) -> str:
    """The one key under which ``payload`` may stand."""
    if isinstance(payload, LeadRecord):
        return lead_key(payload.run)
    return peers_key(payload.run, payload.stage)


def owner_of(payload: Payload) -> PeerId:
    """Whose word ``payload`` is."""
    return payload.trainer if isinstance(payload, LeadRecord) else payload.peer


def encode(payload: Payload) -> str:
    """Canonical JSON of a payload."""
    kind = {PeerRecord: "peer", LeadRecord: "lead", Gone: "gone"}[type(payload)]
    return json.dumps({"kind": kind, "record": asdict(payload)}, sort_keys=True, separators=(",", ":"))


def decode(text: str) -> Payload:
    """Inverse of :func:`encode`.  Raises ValueError on anything malformed or out of range."""
    try:
        raw = json.loads(text)
        adapter = _KINDS[raw["kind"]]
        payload: Payload = adapter.validate_json(json.dumps(raw["record"]), strict=True)
    except (KeyError, TypeError, RecursionError, ValidationError) as error:
        raise ValueError(f"malformed record: {type(error).__name__}") from None
    _check(payload)
    return payload


def _check(payload: Payload) -> None:
    public_key_of(owner_of(payload))
    _require(_HEX64.fullmatch(payload.run) is not None, "run")
    _require(_HEX16.fullmatch(payload.session) is not None, "session")
    if isinstance(payload, LeadRecord):
        _require(payload.term.trainer == payload.trainer, "term")
        _require(0 <= payload.term.number < _LARGEST, "term")
        _require(0 <= payload.counter < _LARGEST, "counter")
        _check_lineage(payload.lineage)
        return
    _require(0 <= payload.stage < 1 << 16, "stage")
    if isinstance(payload, PeerRecord):
        _require(0 <= payload.protocol < 1 << 31, "protocol")
        _require(is_endpoint(payload.endpoint), "endpoint")
        _require(math.isfinite(payload.forward_seconds) and payload.forward_seconds >= 0, "forward_seconds")
        _require(0 <= payload.queue < _LARGEST, "queue")
        _require(is_numeric_class(payload.numeric_class), "numeric_class")
        _check_lineage(payload.lineage)


def _check_lineage(lineage: Lineage) -> None:
    _require(0 <= lineage.generation < _LARGEST and 0 <= lineage.length < _LARGEST, "lineage")
    _require(_HEX64.fullmatch(lineage.chain) is not None, "lineage")


def _require(condition: bool, field: str) -> None:
    if not condition:
        raise ValueError(f"malformed record: {field} is out of range")
