"""Resident or Swap: from sizes alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold_api.scalars import FullWeights
from sixfold_runtime.engine.placement import choose_placement, kv_token_bytes, needed_kv_bytes

GIB = 2**30
BYTES = st.integers(0, 2**40)


@pytest.mark.parametrize(
    ("available", "expected"),
    [(24 * GIB, FullWeights.SWAP), (48 * GIB, FullWeights.RESIDENT), (0, FullWeights.SWAP)],
)
def test_auto_keeps_both_where_they_fit(available: int, expected: FullWeights) -> None:
    """8 B parameters: 16 GiB in bf16, 5 GiB in INT4, 20 GiB for two sets' KV."""
    assert choose_placement(FullWeights.AUTO, available, 16 * GIB, 5 * GIB, 20 * GIB) is expected


@given(st.sampled_from([FullWeights.RESIDENT, FullWeights.SWAP]), BYTES, BYTES, BYTES, BYTES)
def test_what_the_user_says_is_obeyed(setting: FullWeights, available: int, full: int, quantized: int, kv: int) -> None:
    assert choose_placement(setting, available, full, quantized, kv) is setting


@given(BYTES, BYTES, BYTES, BYTES, BYTES)
def test_more_memory_never_means_swap(available: int, more: int, full: int, quantized: int, kv: int) -> None:
    if choose_placement(FullWeights.AUTO, available, full, quantized, kv) is FullWeights.RESIDENT:
        assert full + quantized <= available
        assert choose_placement(FullWeights.AUTO, available + more, full, quantized, kv) is FullWeights.RESIDENT


def test_kv_of_a_token() -> None:
    """Llama 3 8B: 32 layers, 8 heads of 128 for keys and as many for values, 2 bytes each."""
    llama = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    assert kv_token_bytes(llama, 2) == 128 * 1024
    assert kv_token_bytes({"n_layer": 12, "n_head": 12, "n_embd": 768}, 4) == 2 * 12 * 768 * 4


def test_kv_of_eight_long_requests_for_each_set(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 64}
    for context, tokens in ((1000, 1000), (131072, 8192)):
        (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context}))
        assert needed_kv_bytes(tmp_path, 2, 0.5) == 2 * 8 * tokens * 256 / 0.5
