"""Attention within each text of a packed batch; what all layers of a batch share is made once.

Which way is the fastest was measured. On a CPU in fp32 it is text by text, heads batched: two products over views of
the projections with the scores between them, nothing copied, padded or masked; long texts, and half types, are better
off with torch's fused attention. On CUDA, where calls are dear and padding is cheap, one fused call takes the batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch.nn import functional

_MAX_PRODUCT_TOKENS = 224
"""Up to here the products are faster on a CPU than the fused kernel."""


class PackedAttention(ABC):
    """For a batch of texts, over one pair of buffers."""

    def __init__(
        self, heads: torch.Tensor, attended: torch.Tensor, lengths: Sequence[int], scale: float, causal: bool
    ) -> None:
        """
        Args:
            heads: [tokens, kv_heads, group + 2, head_dim]: the queries that share a key head; their key; their value.
            attended: [tokens, kv_heads, group, head_dim].
            lengths: of the texts, which lie one after the other.
            scale: of the products of queries and keys.
        """
        self.heads, self.attended, self.lengths = heads, attended, tuple(lengths)
        self.kv_heads, self.group, self.head_dim = attended.shape[1:]
        self.scale, self.causal = scale, causal
        self._hidden: dict[tuple[int, int | None], torch.Tensor] = {}

    @abstractmethod
    def __call__(self, window: int | None = None) -> None:
        """Fill `attended` from `heads`.

        Args:
            window: with causal attention, how many of the last positions a token attends to; None is all.
        """

    def hidden(self, length: int, window: int | None) -> torch.Tensor:
        """Boolean [length, length]: true where a causal query (row) doesn't attend to a key (column)."""
        key = length, window
        if key not in self._hidden:
            positions = torch.arange(length, device=self.heads.device)
            hidden = positions > positions[:, None]
            self._hidden[key] = hidden if window is None else hidden | (positions <= positions[:, None] - window)
        return self._hidden[key]


def packed_attention(
    heads: torch.Tensor, attended: torch.Tensor, lengths: Sequence[int], scale: float, *, causal: bool
) -> PackedAttention:
    """The fastest way for the buffers' device; arguments as PackedAttention's."""
    kind = Padded if heads.device.type == "cuda" else TextByText
    return kind(heads, attended, lengths, scale, causal)


class TextByText(PackedAttention):
    """One text after the other, nothing padded."""

    def __init__(
        self, heads: torch.Tensor, attended: torch.Tensor, lengths: Sequence[int], scale: float, causal: bool
    ) -> None:
        super().__init__(heads, attended, lengths, scale, causal)
        shared: dict[int, torch.Tensor] = {}
        self._texts: list[_Products | _Fused] = []
        for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
            own = heads[start : start + length], attended[start : start + length]
            if heads.dtype == torch.float32 and length <= _MAX_PRODUCT_TOKENS:
                if length not in shared:
                    shared[length] = heads.new_empty(self.kv_heads, length * self.group, length)
                self._texts.append(_Products(*own, shared[length]))
            else:
                self._texts.append(_Fused(*own))

    def __call__(self, window: int | None = None) -> None:
        for text in self._texts:
            hidden = None
            if self.causal:
                limit = window if window is not None and window < text.length else None
                hidden = self.hidden(text.length, limit)
            text(self.scale, hidden)


class _Products:
    """Two products, batched over heads, and the scores between them."""

    def __init__(self, heads: torch.Tensor, attended: torch.Tensor, scores: torch.Tensor) -> None:
        """`scores` is working memory, [kv_heads, length * group, length]."""
        self.length, _, group, self._head_dim = attended.shape
        self._queries, self._results = heads[:, :, :group].transpose(0, 1), attended.transpose(0, 1)
        self._grouped = group > 1
        if not self._grouped:  # views that a product takes as they are
            self._queries, self._results = self._queries.squeeze(2), self._results.squeeze(2)
        self._keys = heads[:, :, group].permute(1, 2, 0)
        self._values = heads[:, :, group + 1].transpose(0, 1)
        self._scores, self._by_token = scores, scores.view(len(scores), self.length, group, self.length)

    def __call__(self, scale: float, hidden: torch.Tensor | None) -> None:
        scores = self._scores
        queries = self._queries.reshape(len(scores), -1, self._head_dim) if self._grouped else self._queries
        scores.baddbmm_(queries, self._keys, beta=0, alpha=scale)
        if hidden is not None:
            self._by_token.masked_fill_(hidden[:, None], -torch.inf)
        torch.softmax(scores, -1, out=scores)
        if self._grouped:
            self._results.copy_(torch.bmm(scores, self._values).view(self._results.shape))
        else:
            torch.bmm(scores, self._values, out=self._results)


class _Fused:
    """torch's own."""

    def __init__(self, heads: torch.Tensor, attended: torch.Tensor) -> None:
        self.length, _, group, _ = attended.shape
        by_head = heads.permute(1, 2, 0, 3)
        self._queries = by_head[:, :group]
        self._keys, self._values = (by_head[:, group + side, None].expand_as(self._queries) for side in (0, 1))
        self._results = attended.permute(1, 2, 0, 3)

    def __call__(self, scale: float, hidden: torch.Tensor | None) -> None:
        # The key heads take the place of a batch, so that no view has to be copied.
        mask = None if hidden is None else ~hidden
        self._results.copy_(
            functional.scaled_dot_product_attention(self._queries, self._keys, self._values, mask, scale=scale)
        )


class Padded(PackedAttention):
    """All texts in one call, padded to the longest by repeating a token of their own."""

    def __init__(
        self, heads: torch.Tensor, attended: torch.Tensor, lengths: Sequence[int], scale: float, causal: bool
    ) -> None:
        super().__init__(heads, attended, lengths, scale, causal)
        self._longest, self._is_even = max(lengths), min(lengths) == max(lengths)
        counts = torch.tensor(lengths, device=heads.device)[:, None]
        columns = torch.arange(self._longest, device=heads.device)
        self._padded = (counts.cumsum(0) - counts + torch.minimum(columns, counts - 1)).view(-1)
        """Where each padded token comes from."""
        self._attends = columns < counts
        self._packed = self._attends.view(-1).nonzero().view(-1)
        """Where each token lies among the padded ones."""

    def __call__(self, window: int | None = None) -> None:
        texts, longest, group = len(self.lengths), self._longest, self.group
        heads = self.heads if self._is_even else self.heads.index_select(0, self._padded)
        by_head = heads.view(texts, longest, self.kv_heads, group + 2, self.head_dim).permute(0, 2, 3, 1, 4)
        queries = by_head[:, :, :group].flatten(1, 2)
        keys, values = (
            by_head[:, :, group + side, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for side in (0, 1)
        )
        mask = self._mask(window)
        found = functional.scaled_dot_product_attention(
            queries, keys, values, mask, is_causal=self.causal and mask is None, scale=self.scale
        )
        tokens = found.transpose(1, 2).reshape(texts * longest, self.kv_heads, group, self.head_dim)
        self.attended.copy_(tokens if self._is_even else tokens.index_select(0, self._packed))

    def _mask(self, window: int | None) -> torch.Tensor | None:
        """Boolean, true where a query attends; None where that is all, or all before it."""
        if not self.causal:
            return None if self._is_even else self._attends[:, None, None]
        # A causal query of a text sees no padding behind it, and what padding sees isn't read.
        return None if window is None or window >= self._longest else ~self.hidden(self._longest, window)
