"""Attention within packed texts: every way of computing it, against its definition."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold_runtime.engine.packed_attention import PackedAttention, Padded, TextByText

torch.set_num_threads(1)
CPU = torch.device("cpu")
DEVICES = [CPU, *([torch.device("cuda")] if torch.cuda.is_available() else [])]
HEAD_DIM = 8


def reference(heads: torch.Tensor, lengths: list[int], scale: float, causal: bool, window: int | None) -> torch.Tensor:
    """[tokens, kv_heads, group, head_dim], text by text in float64."""
    group = heads.shape[2] - 2
    found = []
    for text in heads.double().split(lengths):
        queries, keys, values = text[:, :, :group], text[:, :, group], text[:, :, group + 1]
        scores = torch.einsum("qhgd,khd->hgqk", queries, keys) * scale
        if causal:
            distance = torch.arange(len(text))[:, None] - torch.arange(len(text))
            scores.masked_fill_((distance < 0) | (distance >= (window or len(text))), -torch.inf)
        found.append(torch.einsum("hgqk,khd->qhgd", scores.softmax(-1), values))
    return torch.cat(found)


def attended(
    kind: type[PackedAttention],
    heads: torch.Tensor,
    lengths: list[int],
    causal: bool,
    window: int | None,
) -> torch.Tensor:
    tokens, kv_heads, parts, head_dim = heads.shape
    result = heads.new_full((tokens, kv_heads, parts - 2, head_dim), torch.nan)
    kind(heads, result, lengths, HEAD_DIM**-0.5, causal)(window)
    return result


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 20), st.sampled_from([224, 225, 240])), min_size=1, max_size=5),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    masks=st.sampled_from([(False, None), (True, None), (True, 1), (True, 5), (True, 230)]),
    kind=st.sampled_from([TextByText, Padded]),
)
def test_each_way_is_the_definition(
    lengths: list[int], kv_heads: int, group: int, masks: tuple[bool, int | None], kind: type[PackedAttention]
) -> None:
    causal, window = masks
    heads = torch.randn(
        sum(lengths), kv_heads, group + 2, HEAD_DIM, generator=torch.Generator().manual_seed(sum(lengths))
    )
    wanted = reference(heads, lengths, HEAD_DIM**-0.5, causal, window)
    torch.testing.assert_close(attended(kind, heads, lengths, causal, window).double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("kind", [TextByText, Padded])
def test_half_types(kind: type[PackedAttention], device: torch.device) -> None:
    lengths = [3, 17, 1]
    heads = torch.randn(sum(lengths), 2, 4, HEAD_DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    wanted = reference(heads, lengths, HEAD_DIM**-0.5, True, None)
    found = attended(kind, heads.to(device), lengths, True, None)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", [TextByText, Padded])
def test_what_is_not_finite_stays_in_its_text(kind: type[PackedAttention]) -> None:
    lengths = [4, 2, 9]
    heads = torch.randn(sum(lengths), 2, 3, HEAD_DIM)
    heads[5] = torch.nan
    for causal in (False, True):
        parts = attended(kind, heads, lengths, causal, None).split(lengths)
        assert [bool(part.isfinite().all()) for part in parts] == [True, False, True]
