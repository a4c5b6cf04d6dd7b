"""Both forwards over ragged batches, against transformers' own forward on each sequence alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.forward import Forward, make_forward
from sixfold_runtime.engine.kv_cache import KVCache
from sixfold_runtime.engine.loader import LoadedModel, load

Reference = Callable[[LoadedModel], Any]
CLOSE = {"rtol": 0, "atol": 1e-4}
ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", **ROPE, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CHECKED: list[tuple[str, str, dict[str, Any]]] = [
    ("sixfold", "Llama", {"tie_word_embeddings": True}),
    ("sixfold", "Llama", {"num_key_value_heads": 1, "rope_parameters": LLAMA3}),
    ("sixfold", "Llama", {"rope_parameters": {"rope_type": "linear", **ROPE}, "attention_bias": True}),
    ("sixfold", "Llama", {"rope_parameters": {"rope_type": "yarn", **ROPE}, "mlp_bias": True, "head_dim": 16}),
    ("sixfold", "Qwen2", {"num_key_value_heads": 4}),
    ("sixfold", "Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ("sixfold", "Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    ("sixfold", "Qwen3", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 9}),
    ("transformers", "Llama", {"rope_parameters": {"rope_type": "dynamic", **ROPE}}),
    ("transformers", "Llama", {"hidden_act": "gelu"}),
    ("transformers", "Mistral", {"sliding_window": 5}),
    ("transformers", "Phi3", {"pad_token_id": 0, "sliding_window": None}),
]  # fmt: skip


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def alone(module: Any, ids: list[int]) -> torch.Tensor:
    """transformers' logits after each token, without our cache, masks or padding."""
    return module(torch.tensor([ids], device=module.device)).logits[0].float()


class Batch:
    """Texts that grow in a batch; every forward is checked."""

    def __init__(self, forward: Forward, module: Any, rows: int) -> None:
        self.forward, self.module = forward, module
        self.texts: list[list[int]] = [[] for _ in range(rows)]
        self.cache: KVCache = forward.new_cache(rows)

    def feed(self, *pieces: list[int], every_position: bool = False) -> None:
        logits = self.forward(pieces, self.cache, every_position=every_position)
        assert logits.dtype == torch.float32
        for row, piece in enumerate(pieces):
            self.texts[row] += piece
            expected = alone(self.module, self.texts[row])
            if every_position:
                torch.testing.assert_close(logits[row, : len(piece)], expected[-len(piece) :], **CLOSE)
            else:
                torch.testing.assert_close(logits[row], expected[-1], **CLOSE)
        assert self.cache.lengths == [len(text) for text in self.texts]

    def join(self, text: list[int]) -> None:
        joining = self.forward.new_cache(1)
        self.forward([text], joining)
        self.cache.append(joining, 0)
        self.texts.append(list(text))

    def leave(self, row: int) -> None:
        self.cache.remove(row)
        last = self.texts.pop()
        if row < len(self.texts):
            self.texts[row] = last

    def roll_back(self, *counts: int) -> None:
        self.texts = [text[: len(text) - count] for text, count in zip(self.texts, counts, strict=True)]
        self.cache.truncate([len(text) for text in self.texts])


@pytest.mark.parametrize(("kernel", "architecture", "changes"), CHECKED)
def test_batch_and_alone_agree(
    kernel: str,
    architecture: str,
    changes: dict[str, Any],
    new_decoder: Callable[..., Path],
    reference: Reference,
    tmp_path: Path,
) -> None:
    folder = new_decoder(tmp_path, architecture, **changes)
    model = load(ServedModel(name="m", task=Task.GENERATION, path=str(folder)), torch.device("cpu"))
    forward, module = make_forward(model), reference(model)
    assert forward.kernel == kernel
    assert forward.embeddings.equal(module.get_input_embeddings().weight)
    batch = Batch(forward, module, 3)
    batch.feed(tokens(2), tokens(2, 1), tokens(2, 2))  # prefill in chunks, all of one length
    batch.feed(tokens(1), tokens(61, 1), tokens(40, 2))
    for step in range(3):
        batch.feed([20 + step], [27 + step], [34 + step])
    batch.feed([5, 6, 7], [8], [9, 10], every_position=True)  # drafts of different lengths, and partly rejected
    batch.roll_back(2, 0, 1)
    batch.feed([11], [12], [13])
    batch.leave(0)
    batch.join(tokens(40, 9))
    batch.feed([33], [34], [35])
    batch.feed([4, 4], [5, 5], [6, 6], every_position=True)
    batch.leave(2)
    batch.leave(0)
    batch.feed([8])  # one row, no padding: no mask
    batch.feed([8, 9, 10], every_position=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("architecture", ["Llama", "Qwen3"])
def test_batch_and_alone_agree_on_cuda(
    architecture: str,
    new_decoder: Callable[..., Path],
    reference: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(CLOSE, "atol", 1e-3)
    folder = new_decoder(tmp_path, architecture)
    model = load(ServedModel(name="m", task=Task.GENERATION, path=str(folder)), torch.device("cuda"))
    batch = Batch(make_forward(model), reference(model).cuda(), 2)
    batch.feed(tokens(3), tokens(70, 1))
    batch.feed([5, 6, 7], [8], every_position=True)
    batch.roll_back(1, 0)
    for step in range(3):
        batch.feed([20 + step], [27 + step])


def test_nan_left_by_one_sequence_never_reaches_the_next(decoder: LoadedModel, reference: Reference) -> None:
    assert decoder.decoder is not None
    batch = Batch(make_forward(decoder), reference(decoder), 2)
    batch.feed(tokens(6), tokens(30, 1))
    clean = decoder.decoder.embeddings[0].clone()
    try:
        decoder.decoder.embeddings[0] = float("nan")
        poisoned = batch.forward.new_cache(1)
        assert batch.forward([[*tokens(20, 2), 0]], poisoned).isnan().all()
    finally:
        decoder.decoder.embeddings[0] = clean
    batch.cache.append(poisoned, 0)
    batch.forward([[8], [9], [10]], batch.cache)
    batch.cache.truncate([6, 30, 21])
    batch.cache.remove(2)
    batch.join(tokens(5, 3))
    batch.feed([8], [9], [10])


def test_layers_that_are_no_attention_are_refused(
    new_decoder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = new_decoder(tmp_path, "Mistral")
    model = load(ServedModel(name="m", task=Task.GENERATION, path=str(folder)), torch.device("cpu"))
    monkeypatch.setattr(model.module.config, "layer_types", ["full_attention", "linear_attention"], raising=False)
    with pytest.raises(ModelLoadError, match="linear_attention"):
        make_forward(model)
