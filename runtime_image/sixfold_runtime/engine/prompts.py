"""The prompts that are being prefilled: a group of whole ones, or one long one piece by piece."""

from __future__ import annotations

from collections.abc import Sequence as ListOf

import torch

from sixfold_runtime.engine.forward import Forward
from sixfold_runtime.engine.kv_cache import KVCache
from sixfold_runtime.engine.metrics import PREFILL, ModelMetrics
from sixfold_runtime.engine.scheduler import Prefill
from sixfold_runtime.engine.sequence import Sequence, slices_of
from sixfold_runtime.engine.work import Key


class PromptGroup:
    """Has a KV cache of its own: a prompt joins the decoding sequences when all of it is computed.

    Attributes:
        cache: row i is the i-th prompt of the scheduler's Prefill.
        seconds: that the pieces of these prompts took so far; counted by the caller.
    """

    def __init__(self, forward: Forward, metrics: ModelMetrics) -> None:
        self._forward = forward
        self._metrics = metrics
        self.cache: KVCache = forward.new_cache()
        self.seconds = 0.0

    def compute(self, prefill: Prefill[Key], sequences: ListOf[Sequence]) -> torch.Tensor:
        """Compute a piece; float32 logits [prompts, vocabulary] after the last token of each."""
        if prefill.start == 0:
            self.cache, self.seconds = self._forward.new_cache(len(sequences)), 0.0
            for row, sequence in enumerate(sequences):
                self._fill(row, sequence)
        starts = [sequence.cached_tokens + prefill.start for sequence in sequences]
        pieces = [
            sequence.request.token_ids[start : start + count]
            for sequence, start, count in zip(sequences, starts, prefill.counts, strict=True)
        ]
        logits = self._forward(pieces, self.cache, slices=slices_of(sequences))
        self._metrics.forward(PREFILL, sum(prefill.counts), prefill.padded_tokens)
        return logits

    def _fill(self, row: int, sequence: Sequence) -> None:
        """Begin with what was found instead of computed."""
        prefix, sequence.prefix = sequence.prefix, None
        if prefix is not None:
            self.cache.fill(row, prefix.keys, prefix.values, len(sequence.context) - prefix.tokens)

    def clear(self) -> None:
        """Forget the prompts and free the memory."""
        self.cache.clear()
