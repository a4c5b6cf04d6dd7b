"""One forward of a causal language model over a ragged batch: the engine's own decoder, else transformers' modules."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import Any, Protocol, cast

import torch

from sixfold_runtime.engine.decoder import Decoder
from sixfold_runtime.engine.decoder_cache import DecoderCache, Span
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.kv_cache import KVCache, RaggedCache
from sixfold_runtime.engine.loader import LoadedModel
from sixfold_runtime.engine.model_flops import model_flops
from sixfold_runtime.engine.task_slice import TaskSlice
from sixfold_runtime.engine.token_groups import TokenGroups
from sixfold_runtime.waste import ModelFlops, decoder_flops

_FULL, _SLIDING = "full_attention", "sliding_attention"


class Forward(Protocol):
    """Computes next-token logits for sequences of different lengths.

    A row's result doesn't depend on its batch-mates, nor on how its tokens are spread over forwards, beyond float
    rounding.

    Attributes:
        kernel: "sixfold" or "transformers".
        weight_bytes: resident.
        embeddings: [vocabulary, hidden] of the input tokens.
        flops: what computing costs.
        spent: floating-point operations of the last call by row, padding included.
    """

    kernel: str
    weight_bytes: int
    embeddings: torch.Tensor
    flops: ModelFlops
    spent: list[int]

    def __call__(
        self,
        tokens: Sequence[Sequence[int]],
        cache: KVCache,
        *,
        every_position: bool = False,
        slices: Sequence[TaskSlice | None] | None = None,
    ) -> torch.Tensor:
        """Feed each row's new tokens and append their keys and values to `cache`.

        Args:
            tokens: new token ids of each row of the cache, at least one a row, not all of one length.
            cache: one of this forward's `new_cache`.
            slices: of each row, the task slice that it computes with; None there, or for all, is the trunk as it is.

        Returns:
            float32 logits [rows, vocabulary] after each row's last token; with `every_position`
            [rows, longest, vocabulary], where [i, j] is after tokens[i][j] (beyond a row's count: meaningless).
        """

    def new_cache(self, rows: int = 0) -> KVCache:
        """A cache of so many empty rows."""


def make_forward(model: LoadedModel) -> Forward:
    """The fastest forward that there is for a model.

    Raises:
        ModelLoadError: a decoder whose layers are neither full nor sliding-window attention.
    """
    return TransformersForward(model) if model.decoder is None else DecoderForward(model.decoder)


class DecoderForward(Forward):
    """Over the engine's own decoder. Tokens of all rows are packed, so no padding is computed."""

    kernel = "sixfold"

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.weight_bytes = decoder.weight_bytes
        self.embeddings = decoder.embeddings
        self.flops = decoder_flops(decoder.shape)
        self.spent = []
        self._token, self._pair, self._output = self.flops.unit_costs

    def new_cache(self, rows: int = 0) -> DecoderCache:
        return DecoderCache(self._decoder.cache_shape, rows)

    @torch.inference_mode()
    def __call__(
        self,
        tokens: Sequence[Sequence[int]],
        cache: KVCache,
        *,
        every_position: bool = False,
        slices: Sequence[TaskSlice | None] | None = None,
    ) -> torch.Tensor:
        own = cast(DecoderCache, cache)
        counts = [len(row) for row in tokens]
        spans = own.begin(counts)
        order = [row for span in spans for row in span.rows]
        groups = None
        if slices is not None:
            groups = TokenGroups([slices[row] for row in order], [counts[row] for row in order], self._decoder.device)
        hidden = self._decoder.hidden([token for row in order for token in tokens[row]], spans, groups)
        own.commit(counts)
        self.spent = self._cost(spans, every_position)
        # Where each row's tokens lie among the packed ones.
        first, firsts = 0, [0] * len(counts)
        for row in order:
            firsts[row] = first
            first += counts[row]
        if every_position:
            longest = max(counts)
            wanted = [
                firsts[row] + min(index, counts[row] - 1) for row in range(len(counts)) for index in range(longest)
            ]
            logits = self._picked(self._decoder.logits(hidden), wanted)
            return logits.view(len(counts), longest, -1)
        return self._decoder.logits(
            self._picked(hidden, [first + count - 1 for first, count in zip(firsts, counts, strict=True)])
        )

    def _cost(self, spans: Sequence[Span], every_position: bool) -> list[int]:
        """Only attention is padded: to the columns of a span's longest row, and to its most new tokens."""
        spent = [0] * sum(len(span.rows) for span in spans)
        for span in spans:
            attention = self._pair * max(span.counts) * max(map(add, span.starts, span.counts))
            for row, count in zip(span.rows, span.counts, strict=True):
                spent[row] = count * self._token + attention + (count if every_position else 1) * self._output
        return spent

    def _picked(self, packed: torch.Tensor, wanted: list[int]) -> torch.Tensor:
        if wanted == list(range(len(packed))):
            return packed
        return packed.index_select(0, torch.tensor(wanted, device=packed.device))


class TransformersForward(Forward):
    """Over transformers' modules: rows are padded on the right, and every mask is built here from positions."""

    kernel = "transformers"

    def __init__(self, model: LoadedModel) -> None:
        self._module = model.module
        self._device = model.device
        self.weight_bytes = model.weight_bytes
        self.embeddings = model.module.get_input_embeddings().weight
        self.flops = model_flops(model)
        self.spent = []
        config = model.module.config.get_text_config()
        self._window: int | None = getattr(config, "sliding_window", None)
        kinds = set(getattr(config, "layer_types", None) or ()) or {_SLIDING if self._window else _FULL}
        if unknown := kinds - {_FULL, _SLIDING}:
            raise ModelLoadError(f"{model.served.path}: layers of type {', '.join(sorted(unknown))} can't be served")
        self._kinds = kinds

    def new_cache(self, rows: int = 0) -> RaggedCache:
        return RaggedCache(rows, self._device)

    @torch.inference_mode()
    def __call__(
        self,
        tokens: Sequence[Sequence[int]],
        cache: KVCache,
        *,
        every_position: bool = False,
        slices: Sequence[TaskSlice | None] | None = None,
    ) -> torch.Tensor:
        assert slices is None, "requests for task slices are refused before they get here"
        ragged = cast(RaggedCache, cache)
        counts = [len(row) for row in tokens]
        longest = max(counts)
        # Padding repeats a row's own token, so that not even a broken embedding reaches another row.
        padded = [[*row, *[row[-1]] * (longest - len(row))] for row in tokens]
        starts = torch.tensor(ragged.lengths, device=self._device)
        positions = starts[:, None] + torch.arange(longest, device=self._device)
        width = ragged.begin(positions)
        last = [count - 1 for count in counts]
        kept = list(range(longest)) if every_position else sorted(set(last))
        output = self._module(
            input_ids=torch.tensor(padded, device=self._device),
            position_ids=positions,
            attention_mask=self._masks(positions, width),
            cache=ragged,
            use_cache=True,
            logits_to_keep=torch.tensor(kept, device=self._device),
        )
        ragged.commit(counts)
        self.spent = [self.flops.forward(longest, longest * width, len(kept))] * len(counts)
        logits: torch.Tensor = output.logits
        if not every_position:
            rows = torch.arange(len(tokens), device=self._device)
            logits = logits[rows, torch.tensor([kept.index(index) for index in last], device=self._device)]
        return logits.float()

    def _masks(self, positions: torch.Tensor, width: int) -> Any:
        """Boolean [rows, 1, tokens, width], true where a token attends; by layer type where a model mixes them."""
        columns = torch.arange(width, device=self._device)
        causal = columns <= positions[:, None, :, None]
        if self._kinds == {_FULL} or self._window is None:
            return causal
        sliding = causal & (columns > positions[:, None, :, None] - self._window)
        return sliding if self._kinds == {_SLIDING} else {_FULL: causal, _SLIDING: sliding}
