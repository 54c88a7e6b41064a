"""A contact and tensor forms that several tests of the wire need."""

from __future__ import annotations

from hypothesis import strategies as st

from swarm.messages import (
    Contact,
)
from swarm.tensors import ITEM_BYTES, TensorSpec
from tests import stage_double as double

CONTACT = Contact(peer=double.PEER, session=double.SESSION, endpoint="[::1]:4000")


specs = st.builds(
    TensorSpec,
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
    shape=st.lists(st.integers(0, 100), max_size=4).map(tuple),
)
