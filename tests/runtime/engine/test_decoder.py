"""The engine's own decoder: long greedy texts as transformers writes them, and what its KV cache holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.engine.decoder_cache import DecoderCache, capacity_for
from sixfold_runtime.engine.forward import Forward, make_forward
from sixfold_runtime.engine.kv_cache import KVCache
from sixfold_runtime.engine.loader import LoadedModel, load

CPU = torch.device("cpu")
Reference = Callable[[LoadedModel], Any]
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 80}),
    ("Qwen2", {"num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}),
    ("Qwen3", {"head_dim": 24}),
]


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def grow(forward: Forward, cache: KVCache, texts: list[list[int]], steps: int) -> None:
    """Greedy decoding of all rows."""
    for _ in range(steps):
        logits = forward([text[-1:] for text in texts], cache)
        for text, token in zip(texts, logits.argmax(-1).tolist(), strict=True):
            text.append(token)


def prefilled(forward: Forward, prompts: list[list[int]]) -> tuple[KVCache, list[list[int]]]:
    cache = forward.new_cache(len(prompts))
    first = forward(prompts, cache).argmax(-1).tolist()
    return cache, [[*prompt, token] for prompt, token in zip(prompts, first, strict=True)]


@pytest.mark.parametrize(("architecture", "changes"), FAMILIES)
def test_greedy_texts_are_transformers_texts(
    architecture: str, changes: dict[str, Any], new_decoder: Callable[..., Path], reference: Reference, tmp_path: Path
) -> None:
    """Over the sizes of several blocks of the cache, with rows that grow from one into the next."""
    folder = new_decoder(tmp_path, architecture, **changes)
    model = load(ServedModel(name="m", task=Task.GENERATION, path=str(folder)), CPU)
    forward = make_forward(model)
    prompts = [tokens(length, length) for length in (1, 30, 60, 62, 120)]
    cache, texts = prefilled(forward, prompts)
    grow(forward, cache, texts, 39)
    for prompt, text in zip(prompts, texts, strict=True):
        expected = reference(model).generate(
            torch.tensor([prompt]),
            max_new_tokens=40,
            min_new_tokens=40,
            do_sample=False,
            stop_strings=None,
            suppress_tokens=None,
        )
        assert text == expected[0].tolist()


def test_a_checkpoint_in_shards_is_the_same_model(
    decoder: LoadedModel, reference: Reference, decoder_folder: Path, copy_of: Callable[[Path], Path]
) -> None:
    folder = copy_of(decoder_folder)
    (folder / "model.safetensors").unlink()
    reference(decoder).save_pretrained(folder, max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    sharded = load(ServedModel(name="m", task=Task.GENERATION, path=str(folder)), CPU)
    forwards = [make_forward(model) for model in (decoder, sharded)]
    one, other = (forward([tokens(30)], forward.new_cache(1)) for forward in forwards)
    assert one.equal(other)


def test_half_types_compute(decoder: LoadedModel, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with little memory; close to fp32, far from noise."""
    monkeypatch.setattr("sixfold_runtime.engine.loader.compute_dtype", lambda *_: torch.bfloat16)
    forward = make_forward(load(decoder.served, CPU))
    cache = forward.new_cache(2)
    texts = [tokens(50), tokens(9, 1)]
    for start, end in ((0, 5), (5, 50)):
        logits = forward([text[start:end] or [7] for text in texts], cache)
    with torch.inference_mode():
        expected = reference(decoder)(torch.tensor([texts[0]])).logits[0, -1]
    assert torch.corrcoef(torch.stack((logits[0], expected)))[0, 1] > 0.99


def test_verifying_tokens_at_once_gives_what_single_steps_give(decoder: LoadedModel) -> None:
    """In fp32 only rounding may differ, whatever the number of tokens a forward has and whoever shares its batch."""
    forward = make_forward(decoder)
    prompts = [tokens(length, length) for length in (20, 61, 5)]
    cache, texts = prefilled(forward, prompts)
    starts = [len(text) for text in texts]
    grow(forward, cache, texts, 8)
    for rows in ([0, 1, 2], [1]):
        together, _ = prefilled(forward, [prompts[row] for row in rows])
        for count in (1, 3, 8):
            drafted = [texts[row][starts[row] - 1 : starts[row] - 1 + count] for row in rows]
            logits = forward(drafted, together, every_position=True)
            for index, row in enumerate(rows):
                assert logits[index].argmax(-1).tolist() == texts[row][starts[row] : starts[row] + count]
            together.truncate([len(prompts[row]) for row in rows])


def test_a_row_takes_the_memory_of_its_own_length(decoder: LoadedModel) -> None:
    forward = make_forward(decoder)
    token_bytes = 3 * 2 * 2 * 8 * 4  # layers x (keys, values) x KV heads x head dim x fp32
    cache, other = forward.new_cache(1), forward.new_cache(1)
    assert cache.allocated_bytes == 0
    forward([tokens(200)], cache)
    forward([tokens(4)], other)
    assert (cache.bytes_per_token, cache.allocated_bytes) == (token_bytes, 256 * token_bytes)
    cache.append(other, 0)
    assert cache.allocated_bytes == (256 + 128) * token_bytes
    cache.remove(0)
    assert (cache.lengths, cache.allocated_bytes) == ([4], 128 * token_bytes)
    for _ in range(3):
        cache.append(other, 0)
    assert cache.allocated_bytes == 4 * 128 * token_bytes
    for _ in range(4):
        cache.remove(0)
    assert (cache.lengths, cache.allocated_bytes) == ([], 0)
    cache.append(other, 0)
    cache.clear()
    assert (cache.lengths, cache.allocated_bytes) == ([], 0)


def test_blocks_waste_little() -> None:
    capacities = [capacity_for(tokens) for tokens in range(1, 5000)]
    assert capacities == sorted(capacities)
    assert all(capacity >= tokens for tokens, capacity in enumerate(capacities, start=1))
    assert all(capacity <= 1.5 * tokens for tokens, capacity in enumerate(capacities, start=1) if tokens > 256)


def test_rows_of_a_batch_are_computed_by_their_blocks(decoder: LoadedModel) -> None:
    cache = make_forward(decoder).new_cache(4)
    assert isinstance(cache, DecoderCache)
    assert places(cache, [3, 200, 3, 5]) == [((0, 2, 3), (3, 3, 5), 0), ((1,), (200,), 0)]
    cache.commit([3, 200, 3, 5])
    assert places(cache, [40, 1, 40, 2]) == [((0, 2), (40, 40), 0), ((3,), (2,), 2), ((1,), (1,), 0)], "no long padding"
    cache.remove(0)
    assert places(cache, [1, 1, 1]) == [((0, 2), (1, 1), 0), ((1,), (1,), 0)]


def places(cache: DecoderCache, counts: list[int]) -> list[Any]:
    return [(span.rows, span.counts, span.first_slot) for span in cache.begin(counts)]
