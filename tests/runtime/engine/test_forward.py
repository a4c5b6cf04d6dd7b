"""The batched forward over the ragged KV cache, against transformers' own forward on each sequence alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.forward import CausalForward
from sixfold_runtime.engine.kv_cache import RaggedCache
from sixfold_runtime.engine.loader import LoadedModel, load

CLOSE = {"rtol": 0, "atol": 1e-5}
ARCHITECTURES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {"tie_word_embeddings": True}),
    ("Llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0,
                                   "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}),
    ("Qwen2", {}),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ("Qwen3", {"head_dim": 16}),
    ("Mistral", {"sliding_window": 5}),
    ("Phi3", {"pad_token_id": 0, "sliding_window": None}),
]  # fmt: skip


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def alone(model: LoadedModel, ids: list[int]) -> torch.Tensor:
    """transformers' logits after the last token, without our cache, masks or padding."""
    return model.module(torch.tensor([ids])).logits[0, -1].float()


def check(model: LoadedModel) -> None:
    """Ragged prefill in chunks, then decode steps, with rows that join and leave."""
    forward, cache = CausalForward(model), RaggedCache([0, 0, 0])
    texts = [tokens(length, seed) for seed, length in enumerate((3, 17, 9))]
    for start, end in ((0, 2), (2, 30)):
        pieces = [text[start:end] for text in texts]
        logits = forward(pieces, cache)
        for row, text in enumerate(texts):
            torch.testing.assert_close(logits[row], alone(model, text[:end]), **CLOSE)
    for step in range(3):
        for row, text in enumerate(texts):
            text.append(20 + 7 * row + step)
        logits = forward([text[-1:] for text in texts], cache)
        for row, text in enumerate(texts):
            torch.testing.assert_close(logits[row], alone(model, text), **CLOSE)
    cache.remove(0)
    texts[0] = texts.pop()
    joining = RaggedCache([0])
    texts.append(tokens(40, 9))
    forward([texts[-1]], joining)
    cache.append(joining, 0)
    for text in texts:
        text.append(33)
    logits = forward([text[-1:] for text in texts], cache)
    for row, text in enumerate(texts):
        torch.testing.assert_close(logits[row], alone(model, text), **CLOSE)


@pytest.mark.parametrize(("architecture", "changes"), ARCHITECTURES)
def test_batch_and_alone_agree(
    architecture: str, changes: dict[str, Any], new_decoder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = new_decoder(tmp_path, architecture, **changes)
    check(load(ServedModel(name="m", task=Task.GENERATION, path=str(folder)), torch.device("cpu")))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batch_and_alone_agree_on_cuda(chat: ServedModel) -> None:
    model = load(chat, torch.device("cuda"))
    forward, cache = CausalForward(model), RaggedCache([0, 0])
    texts = [tokens(3), tokens(50, 1)]
    logits = forward(texts, cache)
    for row, text in enumerate(texts):
        with torch.inference_mode():
            expected = model.module(torch.tensor([text], device="cuda")).logits[0, -1].float()
        torch.testing.assert_close(logits[row], expected, rtol=1e-3, atol=1e-3)


def test_rows_grow_shrink_and_free_their_memory(decoder: LoadedModel) -> None:
    forward, cache = CausalForward(decoder), RaggedCache([0])
    long = tokens(200)
    forward([long], cache)
    grown = cache.allocated_bytes
    assert cache.bytes_per_token == 3 * 2 * 2 * 8 * 4, "layers x (keys, values) x KV heads x head dim x fp32"
    short = RaggedCache([0])
    forward([tokens(4)], short)
    cache.append(short, 0)
    cache.remove(0)
    assert cache.lengths == [4]
    for _ in range(3):
        cache.append(short, 0)
    assert cache.allocated_bytes < grown * 2, "growing rows gave back the columns of the long sequence that left"
    for _ in range(4):
        cache.remove(0)
    assert (cache.lengths, cache.allocated_bytes, cache.bytes_per_token) == ([], 0, 0)


def test_nan_left_by_one_sequence_never_reaches_the_next(decoder: LoadedModel) -> None:
    forward, cache = CausalForward(decoder), RaggedCache([0, 0])
    forward([tokens(6), tokens(30, 1)], cache)
    poisoned = RaggedCache([0])
    forward([tokens(20, 2)], poisoned)
    with torch.inference_mode():
        for layer in poisoned._layers:
            layer.keys.fill_(float("nan"))
            layer.values.fill_(float("nan"))
    cache.append(poisoned, 0)
    cache.remove(2)
    clean = RaggedCache([0])
    text = tokens(5, 3)
    forward([text], clean)
    cache.append(clean, 0)
    logits = forward([[8], [9], [10]], cache)
    torch.testing.assert_close(logits[2], alone(decoder, [*text, 10]), **CLOSE)


def test_layers_that_are_no_attention_are_refused(decoder: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder.module.config, "layer_types", ["full_attention", "linear_attention"], raising=False)
    with pytest.raises(ModelLoadError, match="linear_attention"):
        CausalForward(decoder)
