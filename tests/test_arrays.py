"""Tensors and bytes, and what is measured of them."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.stage.arrays import DTYPES, from_buffer, from_data, spec_of, to_buffer, to_data
from swarm.stage.measures import all_finite, digest, squared_norm
from swarm.tensors import TensorSpec

pytestmark = pytest.mark.fast

_SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@given(name=st.sampled_from(sorted(DTYPES)), shape=_SHAPES, seed=st.integers(0, 1 << 30), offset=st.integers(0, 9))
def test_tensors_survive_as_bytes(name: str, shape: tuple[int, ...], seed: int, offset: int) -> None:
    spec = TensorSpec(dtype=name, shape=shape)
    raw = torch.randint(256, (spec.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    if name == "bool":
        raw %= 2
    # NaNs of all kinds among them, and memory that is not aligned.
    data = bytes(offset) + raw.numpy().tobytes()
    tensor = from_buffer(memoryview(data)[offset:], spec)
    assert spec_of(tensor) == spec
    back = to_data(tensor)
    assert back.spec == spec
    assert bytes(back.data) == data[offset:]
    turned = to_data(tensor.T if tensor.ndim == 2 else tensor.flatten())
    assert from_data(turned).numel() == tensor.numel()


def test_columns_of_a_matrix_are_read_in_row_order() -> None:
    matrix = torch.arange(6.0).view(2, 3)
    assert torch.equal(from_data(to_data(matrix.T)), matrix.T)
    assert torch.equal(from_data(to_data(matrix[:, 1])), matrix[:, 1])


def test_bytes_are_shared_both_ways() -> None:
    tensor = torch.zeros(4)
    view = to_buffer(tensor)
    tensor[0] = 1.0
    shared = from_buffer(view, spec_of(tensor))
    assert shared[0] == 1.0
    assert shared.data_ptr() == tensor.data_ptr()


def test_bytes_that_are_no_tensor() -> None:
    with pytest.raises(ValueError):
        from_buffer(bytes(3), TensorSpec(dtype="float32", shape=(1,)))
    with pytest.raises(ValueError):
        from_buffer(b"\2", TensorSpec(dtype="bool", shape=(1,)))
    with pytest.raises(ValueError):
        from_buffer(bytes(4), TensorSpec(dtype="float32", shape=(-1, -1)))
    with pytest.raises(ValueError):
        to_data(torch.zeros(1, dtype=torch.complex64))


@settings(deadline=None)
@given(values=st.lists(st.floats(width=32), max_size=20), cut=st.integers(0, 20))
def test_finite_means_every_element(values: list[float], cut: int) -> None:
    tensor = torch.tensor(values)
    expected = bool(torch.isfinite(tensor).all())
    assert all_finite([tensor]) == expected
    assert all_finite([tensor[:cut], tensor[cut:]]) == expected


def test_large_is_finite_although_its_square_is_not() -> None:
    large = torch.full((4,), 3e38)
    assert all_finite([large])
    assert all_finite([large, large])
    assert squared_norm([large]) == pytest.approx(4 * 9e76, rel=1e-6)


def test_digest_is_of_the_bytes() -> None:
    a, b = torch.arange(3.0), torch.arange(4.0)
    assert digest([a, b]) == hashlib.sha256(bytes(to_buffer(torch.cat([a, b])))).hexdigest()
    assert digest([torch.tensor([0.0])]) != digest([torch.tensor([-0.0])])
