"""hivemind's DHT node, with the parts of an answer checked that its record validators never see."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.utils.timed_storage import ValueWithExpiration


class GuardedDHTNode(DHTNode):  # type: ignore[misc]  # hivemind has no types
    """A validator sees single records.  The dictionary around them has an expiration and a size limit of its own:
    by them one bad node could end every search at its own answer, or make it raise and never end."""

    async def _call_find_with_blacklist(self, peer_id: PeerID, keys: Collection[DHTID]) -> Any:
        answer = await super()._call_find_with_blacklist(peer_id, keys)
        if not answer:
            return answer
        return {key: (rebuilt(found), nearest) for key, (found, nearest) in answer.items()}


def rebuilt(found: ValueWithExpiration[Any] | None) -> ValueWithExpiration[Any] | None:
    """A found dictionary with nothing but its records, living as long as the last of them; None for anything else."""
    if found is None or not isinstance(found.value, DictionaryDHTValue):
        return None  # all of our records stand in dictionaries
    found.value.maxsize = math.inf
    clean = DictionaryDHTValue()
    for subkey, (value, expiration) in found.value.items():
        clean.store(subkey, value, expiration)
    latest = max((expiration for _, (_, expiration) in clean.items()), default=None)
    if latest is None:
        return None
    clean.latest_expiration_time = latest
    return ValueWithExpiration(clean, latest)
