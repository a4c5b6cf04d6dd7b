"""What fits into the memory that the weights leave: tokens of KV, and how far to draft."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sixfold_api.generation import MAX_DRAFT_TOKENS
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.forward import Forward
from sixfold_runtime.engine.loader import LoadedModel, broken_weights

log = logging.getLogger(__name__)
_LOGIT_BYTES = 4


@dataclass(frozen=True)
class Budget:
    """What a model's runner may take."""

    kv_tokens: int
    """Of all rows together, in the caches of target and draft."""
    context_tokens: int
    """Of one request."""
    draft_tokens: int
    """Most to draft at a time."""


def measure(models: Sequence[tuple[LoadedModel, Forward]], kv_budget_bytes: int, max_running: int) -> Budget:
    """Run a first forward of target and draft, and derive from it what fits.

    Args:
        models: the target first.

    Raises:
        ModelLoadError: a model computes no finite logits, or there is no memory for a KV cache.
    """
    target = models[0][0]
    kv_tokens = kv_budget_bytes // max(1, sum(_first_forward(model, forward) for model, forward in models))
    if kv_tokens < 2:
        raise ModelLoadError(f"{target.served.path}: no memory for a KV cache, {kv_budget_bytes} bytes are left")
    if kv_tokens < target.context_tokens:
        log.warning(
            "model %s: memory for %d tokens of KV, so the context is cut from %d to that",
            target.served.name, kv_tokens, target.context_tokens,
        )  # fmt: skip
    draft_tokens = affordable_draft_tokens(MAX_DRAFT_TOKENS, kv_budget_bytes, max_running, target.vocabulary_tokens)
    return Budget(kv_tokens, min(kv_tokens, target.context_tokens), draft_tokens)


def affordable_draft_tokens(wanted: int, free_bytes: int, rows: int, vocabulary_tokens: int) -> int:
    """How many of the wanted draft tokens leave the logits of a whole step within a quarter of the free memory."""
    position_bytes = rows * vocabulary_tokens * _LOGIT_BYTES
    return max(0, min(wanted, free_bytes // 4 // position_bytes - 1))


def _first_forward(model: LoadedModel, forward: Forward) -> int:
    """Bytes of KV that a token takes."""
    cache = forward.new_cache(1)
    if not bool(torch.isfinite(forward([[0, 0]], cache)).all()):
        raise broken_weights(model)
    return cache.bytes_per_token
