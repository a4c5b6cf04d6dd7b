"""Which differences of a matrix are low-rank updates."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold_runtime.prepare.slice_diff import core, low_rank

OUT, IN = 48, 40
MOST = (OUT * IN - 1) // (2 * (OUT + IN))
"""Ranks that take less than half of the matrix."""


def matrix(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=20, deadline=None)
@given(rank=st.integers(1, MOST), seed=st.integers(0, 1000), scale=st.sampled_from([1e-3, 0.02, 1.0]))
def test_a_merged_update_is_found_with_its_rank(rank: int, seed: int, scale: float) -> None:
    before = matrix(seed, OUT, IN)
    after = before + scale * matrix(seed + 1, OUT, rank) @ matrix(seed + 2, rank, IN)
    found = low_rank(before, after)
    assert found is not None
    a, b = found
    assert a.shape == (len(a), IN) and b.shape == (OUT, len(a)) and len(a) <= rank
    assert torch.allclose(before + b @ a, after, rtol=0, atol=1e-6 * float(after.abs().max()))


@settings(max_examples=20, deadline=None)
@given(rank=st.integers(MOST + 3, min(OUT, IN)), seed=st.integers(0, 1000))
def test_what_would_take_more_than_half_of_the_matrix_is_none(rank: int, seed: int) -> None:
    before = matrix(seed, OUT, IN)
    assert low_rank(before, before + matrix(seed + 1, OUT, rank) @ matrix(seed + 2, rank, IN)) is None


def test_rounding_to_half_a_type_is_no_low_rank_update() -> None:
    before = matrix(0, OUT, IN).bfloat16()
    merged = (before.float() + matrix(1, OUT, 2) @ matrix(2, 2, IN)).bfloat16()
    assert low_rank(before, merged) is None


def test_names_are_compared_inside_of_the_trunk() -> None:
    assert core("bert.encoder.layer.0.output.dense.weight") == core("encoder.layer.0.output.dense.weight")
    assert core("model.layers.1.mlp.up_proj.weight") == core("layers.1.mlp.up_proj.weight")
