"""What rounding keys and values costs: their PSNR, and the perplexity of a text whose beginning they stand for.

The beginning of a held-out play is computed, its keys and values are rounded block by block as the engine keeps them,
and the text goes on from there, as it does from exact ones.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from batch_executors import MODEL
from stack import REPOSITORY
from transformers import AutoTokenizer

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.engine.forward import Forward, make_forward
from sixfold_runtime.engine.kv_codec import quantise
from sixfold_runtime.engine.loader import load

sys.path.insert(0, str(REPOSITORY / "e2e" / "models"))
import plays

BITS = (8, 4)
_BLOCK_TOKENS = 32
_CONTINUED_TOKENS = 256


@dataclass
class _Rounded:
    """Found over all windows, for one number of bits."""

    psnr: list[float] = field(default_factory=list)
    """dB, of the keys and of the values of each layer."""
    loss: float = 0.0
    """Sum over tokens."""


def quality(history_tokens: int, windows: int) -> dict[str, Any]:
    """For texts whose first `history_tokens` are taken from the store."""
    served = ServedModel(name="chat", task=Task.GENERATION, path=str(MODEL))
    forward = make_forward(load(served, torch.device("cpu")))
    exact_loss, rounded = 0.0, {bits: _Rounded() for bits in BITS}
    texts = _windows(history_tokens + _CONTINUED_TOKENS, windows)
    for tokens in texts:
        history, rest = tokens[:history_tokens], tokens[history_tokens:]
        cache = forward.new_cache(1)
        forward([history], cache)
        keys, values = cache.read(0, 0, history_tokens)
        exact_loss += _loss(forward, keys, values, rest)
        for bits, found in rounded.items():
            new_keys, new_values = _rounded(keys, values, bits)
            found.psnr += [*map(_psnr, keys, new_keys), *map(_psnr, values, new_values)]
            found.loss += _loss(forward, new_keys, new_values, rest)
    count = len(texts) * (_CONTINUED_TOKENS - 1)
    return {
        "history_tokens": history_tokens,
        "continued_tokens": count,
        "perplexity": round(math.exp(exact_loss / count), 3),
        **{f"int{bits}": _figures(found, exact_loss, count) for bits, found in rounded.items()},
    }


def _figures(found: _Rounded, exact_loss: float, count: int) -> dict[str, float]:
    return {
        "psnr_db": round(statistics.mean(found.psnr), 2),
        "worst_psnr_db": round(min(found.psnr), 2),
        "perplexity": round(math.exp(found.loss / count), 3),
        "perplexity_change_percent": round(100 * (math.exp((found.loss - exact_loss) / count) - 1), 3),
    }


def _windows(length: int, count: int) -> list[list[int]]:
    """Spread over the held-out plays."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokens = [
        t for text in plays.load_heldout_text().values() for t in tokenizer.encode(text, add_special_tokens=False)
    ]
    step = (len(tokens) - length) // count
    return [tokens[start : start + length] for start in range(0, step * count, step)]


def _rounded(keys: torch.Tensor, values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """There and back, block by block."""
    new_keys, new_values = torch.empty_like(keys), torch.empty_like(values)
    for start in range(0, keys.shape[2], _BLOCK_TOKENS):
        span = slice(start, start + _BLOCK_TOKENS)
        block = quantise(keys[:, :, span], values[:, :, span], bits)
        block.dequantise_into(new_keys[:, :, span], new_values[:, :, span])
    return new_keys, new_values


def _psnr(exact: torch.Tensor, rounded: torch.Tensor) -> float:
    """dB of a tensor's largest value over the root mean square of the errors."""
    error = (exact - rounded).square().mean().sqrt().item()
    return 20 * math.log10(exact.abs().max().item() / error)


@torch.inference_mode()
def _loss(forward: Forward, keys: torch.Tensor, values: torch.Tensor, tokens: Sequence[int]) -> float:
    """Negative log-likelihood, summed over all tokens but the first."""
    cache = forward.new_cache(1)
    cache.fill(0, keys, values)
    logits = forward([list(tokens[:-1])], cache, every_position=True)[0]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="sum").item()
