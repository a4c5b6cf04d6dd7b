"""One forward of a causal language model over a ragged batch, through transformers' modules."""

from __future__ import annotations

from typing import Any

import torch

from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.kv_cache import RaggedCache
from sixfold_runtime.engine.loader import LoadedModel

_FULL, _SLIDING = "full_attention", "sliding_attention"


class CausalForward:
    """Computes next-token logits for sequences of different lengths.

    Rows are padded on the right and every mask is built here from positions, so that a row's result doesn't depend
    on its batch-mates (beyond float rounding).
    """

    def __init__(self, model: LoadedModel) -> None:
        """Raises ModelLoadError for a decoder whose layers are neither full nor sliding-window attention."""
        self._module = model.module
        self._device = model.device
        config = model.module.config.get_text_config()
        self._window: int | None = getattr(config, "sliding_window", None)
        kinds = set(getattr(config, "layer_types", None) or ()) or {_SLIDING if self._window else _FULL}
        if unknown := kinds - {_FULL, _SLIDING}:
            raise ModelLoadError(f"{model.served.path}: layers of type {', '.join(sorted(unknown))} can't be served")
        self._kinds = kinds

    @torch.inference_mode()
    def __call__(self, tokens: list[list[int]], cache: RaggedCache) -> torch.Tensor:
        """Feed each row's new tokens and append their keys and values to `cache`.

        Args:
            tokens: new token ids of each row of the cache, at least one a row, not all of one length.

        Returns:
            float32 logits [rows, vocabulary] after each row's last token.
        """
        counts = [len(row) for row in tokens]
        longest = max(counts)
        # Padding repeats a row's own token, so that not even a broken embedding reaches another row.
        padded = [row + row[-1:] * (longest - len(row)) for row in tokens]
        starts = torch.tensor(cache.lengths, device=self._device)
        positions = starts[:, None] + torch.arange(longest, device=self._device)
        width = cache.begin(positions)
        last = [count - 1 for count in counts]
        kept = sorted(set(last))
        output = self._module(
            input_ids=torch.tensor(padded, device=self._device),
            position_ids=positions,
            attention_mask=self._masks(positions, width),
            cache=cache,
            use_cache=True,
            logits_to_keep=torch.tensor(kept, device=self._device),
        )
        cache.commit(counts)
        rows = torch.arange(len(tokens), device=self._device)
        column = torch.tensor([kept.index(index) for index in last], device=self._device)
        logits: torch.Tensor = output.logits[rows, column]
        return logits.float()

    def _masks(self, positions: torch.Tensor, width: int) -> Any:
        """Boolean [rows, 1, tokens, width], true where a token attends; by layer type where a model mixes them."""
        columns = torch.arange(width, device=self._device)
        causal = columns <= positions[:, None, :, None]
        if self._kinds == {_FULL} or self._window is None:
            return causal
        sliding = causal & (columns > positions[:, None, :, None] - self._window)
        return sliding if self._kinds == {_SLIDING} else {_FULL: causal, _SLIDING: sliding}
