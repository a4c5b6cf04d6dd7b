"""Attention of a step's new tokens over the blocks of a DecoderCache; what all layers share is made once a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
from torch.nn import functional

from sixfold_runtime.engine.decoder_cache import Span

_MAX_PRODUCT_TOKENS = 32
"""Beyond so many new tokens of a row the scores aren't kept whole."""


class StepAttention:
    """What every layer does between its projections, for all spans of a step."""

    def __init__(
        self,
        spans: Sequence[Span],
        windows: Sequence[int | None],
        heads: torch.Tensor,
        attended: torch.Tensor,
    ) -> None:
        """
        Args:
            spans: in the order of the tokens.
            windows: of the layers; None attends to everything.
            heads: [tokens, kv_heads, group + 2, head_dim], filled before a layer's turn: the queries that share a key
                head, scaled; their key; their value.
            attended: [tokens, kv_heads, group, head_dim], filled by it.
        """
        # On a CPU two products of few rows are faster than the fused kernel; half types need its fp32 sums.
        products = heads.device.type == "cpu" and heads.dtype == torch.float32
        self._pieces: list[_Piece] = []
        first = 0
        for span in spans:
            last = first + sum(span.counts)
            kind = _Products if products and max(span.counts) <= _MAX_PRODUCT_TOKENS else _Fused
            self._pieces.append(kind(span, windows, heads[first:last], attended[first:last]))
            first = last

    def __call__(self, layer: int) -> None:
        """Write the layer's new keys and values to the cache, and `attended`."""
        for piece in self._pieces:
            piece.write(layer)
            piece.attend(layer)


class _Piece(ABC):
    """One span: n rows of at most t tokens each, over w columns. Queries are padded to t, by their row's last one."""

    def __init__(self, span: Span, windows: Sequence[int | None], heads: torch.Tensor, attended: torch.Tensor) -> None:
        self.rows, self.tokens = len(span.rows), max(span.counts)
        self.kv_heads, self.group, self.head_dim = attended.shape[1:]
        self.width = max(start + count for start, count in zip(span.starts, span.counts, strict=True))
        self.is_padded = min(span.counts) < self.tokens
        self.is_even = not self.is_padded and min(span.starts) == max(span.starts)
        """Whether the new tokens of all rows lie in the same columns."""
        self.slots = slice(span.first_slot, span.first_slot + self.rows)
        self._heads, self._attended = heads, attended
        self._span = span
        if self.is_padded:
            self._find_padding()
        self._point_at_places(span)
        masks = {window: self._mask(window) for window in set(windows)}
        self.masks = [masks[window] for window in windows]

    @cached_property
    def columns(self) -> torch.Tensor:
        """int64 [n, t]: where each query's token lies. Single tokens of even rows, as in most steps, never ask."""
        starts, _, nth = self._places()
        return starts + nth

    def _places(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[n, 1] columns of the first new tokens, [n, 1] how many there are, [n, t] which of them each query is."""
        device = self._heads.device
        starts = torch.tensor(self._span.starts, device=device)[:, None]
        counts = torch.tensor(self._span.counts, device=device)[:, None]
        return starts, counts, torch.minimum(torch.arange(self.tokens, device=device), counts - 1)

    def _find_padding(self) -> None:
        _, counts, nth = self._places()
        self._padded = (counts.cumsum(0) - counts + nth).view(-1)
        """Where each of the n t queries lies among the span's tokens."""
        self._packed = (torch.arange(self.tokens, device=counts.device) < counts).view(-1).nonzero().view(-1)
        """Where each of the span's tokens lies among the n t queries."""

    def _point_at_places(self, span: Span) -> None:
        """Views of where each layer's new keys and values come from and go to."""
        block, group, kv_heads, heads = span.block, self.group, self.kv_heads, self._heads
        if self.is_even:  # one rectangle of columns
            columns = slice(span.starts[0], self.width)
            new = heads[:, :, group:].view(self.rows, self.tokens, kv_heads, 2, self.head_dim).transpose(1, 2)
            self._new_keys, self._new_values = new.unbind(3)
            self._key_places = block.keys[:, self.slots, :, columns].unbind(0)
            self._value_places = block.values[:, self.slots, :, columns].unbind(0)
            return
        self._new_keys, self._new_values = heads[:, :, group], heads.flatten(0, 1)[:, group + 1]
        self._key_places, self._value_places = block.places()
        places = [
            (slot, column)
            for slot, start, count in zip(
                range(self.slots.start, self.slots.stop), span.starts, span.counts, strict=True
            )
            for column in range(start, start + count)
        ]
        lines = [
            (slot * kv_heads + head) * block.capacity + column for slot, column in places for head in range(kv_heads)
        ]
        self._slots_and_columns = torch.tensor(places, device=heads.device).unbind(1)
        self._lines = torch.tensor(lines, device=heads.device)

    def queries(self) -> torch.Tensor:
        """[n, kv_heads, t, group, head_dim]"""
        queries = self._heads[:, :, : self.group]
        if self.is_padded:
            queries = queries.index_select(0, self._padded)
        return queries.view(self.rows, self.tokens, *queries.shape[1:]).transpose(1, 2)

    def give(self, attended: torch.Tensor) -> None:
        """Fill the span's part of the step's buffer from [n, kv_heads, t, group, head_dim], shaped in any way."""
        shape = (self.rows, self.kv_heads, self.tokens, self.group, self.head_dim)
        by_token = attended.reshape(shape).transpose(1, 2)
        if self.is_padded:
            torch.index_select(by_token.flatten(0, 1), 0, self._packed, out=self._attended)
        else:
            self._attended.view(by_token.shape).copy_(by_token)

    def write(self, layer: int) -> None:
        """Add the layer's new keys and values to the cache."""
        if self.is_even:
            self._key_places[layer].copy_(self._new_keys)
            self._value_places[layer].copy_(self._new_values)
        else:
            self._key_places[layer].index_put_(self._slots_and_columns, self._new_keys)
            self._value_places[layer].index_copy_(0, self._lines, self._new_values)

    @abstractmethod
    def attend(self, layer: int) -> None:
        """Fill the span's part of `attended`."""

    def _mask(self, window: int | None) -> torch.Tensor | None:
        """To be added to scores, [n, t group or 1, w]: 0, or -inf where a token doesn't attend; None where it is 0."""
        if window is not None and self.width <= window:
            window = None
        if self.is_even and self.tokens == 1 and window is None:
            return None
        last = self.columns[:, :, None]
        columns = torch.arange(self.width, device=last.device)
        hidden = columns > last
        if window is not None:
            hidden |= columns <= last - window
        mask = torch.zeros(hidden.shape, dtype=self._heads.dtype, device=last.device).masked_fill_(hidden, -torch.inf)
        return mask if self.tokens == 1 else mask.repeat_interleave(self.group, dim=1)


class _Products(_Piece):
    """Two matrix products with the scores between them, batched over rows and key heads."""

    def __init__(self, span: Span, windows: Sequence[int | None], heads: torch.Tensor, attended: torch.Tensor) -> None:
        super().__init__(span, windows, heads, attended)
        keys, values = (
            plane[:, self.slots, :, : self.width].flatten(1, 2) for plane in (span.block.keys, span.block.values)
        )
        self._keys, self._values = keys.transpose(2, 3).unbind(0), values.unbind(0)
        self._copies: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if self.tokens == 1:
            self._queries, self._results = heads.flatten(0, 1)[:, : self.group], attended.flatten(0, 1)
        elif not self.is_padded:
            # [n kv_heads, t group, head_dim], and the same as [n, kv_heads, t, group, head_dim] on both sides of a copy
            self._queries, self._results = heads.new_empty(2, len(keys[0]), self.tokens * self.group, self.head_dim)
            places = attended.view(self.rows, self.tokens, *attended.shape[1:]).transpose(1, 2)
            queries, results = (plane.view(places.shape) for plane in (self._queries, self._results))
            self._copies = queries, self.queries(), places, results
            """To, from, before the products; to, from, after them."""

    def _mask(self, window: int | None) -> torch.Tensor | None:
        mask = super()._mask(window)
        if mask is None or self.rows == 1:
            return mask
        return mask[:, None].expand(-1, self.kv_heads, -1, -1).flatten(0, 1)

    def attend(self, layer: int) -> None:
        keys, values, mask = self._keys[layer], self._values[layer], self.masks[layer]
        if self.is_padded:
            self._queries = self.queries().reshape(len(keys), self.tokens * self.group, self.head_dim)
        elif self._copies is not None:
            self._copies[0].copy_(self._copies[1])
        scores = torch.bmm(self._queries, keys) if mask is None else torch.baddbmm(mask, self._queries, keys)
        weights = torch.softmax(scores, -1)
        if self.is_padded:
            self.give(torch.bmm(weights, values))
            return
        torch.bmm(weights, values, out=self._results)
        if self._copies is not None:
            self._copies[2].copy_(self._copies[3])


class _Fused(_Piece):
    """torch's fused attention: of many tokens, of half types, or on CUDA."""

    def __init__(self, span: Span, windows: Sequence[int | None], heads: torch.Tensor, attended: torch.Tensor) -> None:
        super().__init__(span, windows, heads, attended)
        self._keys, self._values = (
            plane[:, self.slots, :, : self.width].unbind(0) for plane in (span.block.keys, span.block.values)
        )

    def _mask(self, window: int | None) -> torch.Tensor | None:
        mask = super()._mask(window)
        return None if mask is None else mask[:, None]

    def attend(self, layer: int) -> None:
        queries = self.queries().reshape(self.rows, self.kv_heads, self.tokens * self.group, self.head_dim)
        keys, values = self._keys[layer].contiguous(), self._values[layer]
        self.give(functional.scaled_dot_product_attention(queries, keys, values, self.masks[layer], scale=1.0))
