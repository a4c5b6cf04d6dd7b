"""Attention of a step's new tokens over the blocks of a DecoderCache; what all layers share is made once a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

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
            last = first + len(span.rows) * span.tokens
            kind = _Products if products and span.tokens <= _MAX_PRODUCT_TOKENS else _Fused
            self._pieces.append(kind(span, windows, heads[first:last], attended[first:last]))
            first = last

    def __call__(self, layer: int) -> None:
        """Write the layer's new keys and values to the cache, and `attended`."""
        for piece in self._pieces:
            piece.write(layer)
            piece.attend(layer)


class _Piece(ABC):
    """One span: n rows of t tokens each, over w columns."""

    def __init__(self, span: Span, windows: Sequence[int | None], heads: torch.Tensor, attended: torch.Tensor) -> None:
        self.rows, self.tokens = len(span.rows), span.tokens
        self.kv_heads, self.group, self.head_dim = attended.shape[1:]
        self.width = max(span.starts) + span.tokens
        self.is_even = min(span.starts) == max(span.starts)
        self.slots = slice(span.first_slot, span.first_slot + self.rows)
        starts = torch.tensor(span.starts, device=heads.device)
        self.positions = starts[:, None] + torch.arange(span.tokens, device=heads.device)
        """int64 [n, t]"""
        self._point_at_places(span, heads)
        masks = {window: self._mask(window, heads.dtype) for window in set(windows)}
        self.masks = [masks[window] for window in windows]

    def _point_at_places(self, span: Span, heads: torch.Tensor) -> None:
        """Views of where each layer's new keys and values come from and go to."""
        block, group, kv_heads = span.block, self.group, self.kv_heads
        if self.is_even:  # one rectangle of columns
            columns = slice(span.starts[0], self.width)
            new = heads[:, :, group:].view(self.rows, self.tokens, kv_heads, 2, self.head_dim).transpose(1, 2)
            self._new_keys, self._new_values = new.unbind(3)
            self._key_places = block.keys[:, self.slots, :, columns].unbind(0)
            self._value_places = block.values[:, self.slots, :, columns].unbind(0)
        else:
            self._new_keys, self._new_values = heads[:, :, group], heads.flatten(0, 1)[:, group + 1]
            self._key_places = block.keys.transpose(2, 3).unbind(0)
            self._value_places = block.values.flatten(1, 3).unbind(0)
            slot = torch.arange(self.slots.start, self.slots.stop, device=heads.device)
            self._slots_and_columns = slot.repeat_interleave(self.tokens), self.positions.view(-1)
            head = slot[:, None, None] * kv_heads + torch.arange(kv_heads, device=heads.device)
            self._lines = (head * block.capacity + self.positions[:, :, None]).view(-1)

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

    def _mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """To be added to scores, [n, t group or 1, w]: 0, or -inf where a token doesn't attend; None where it is 0."""
        if window is not None and self.width <= window:
            window = None
        if self.is_even and self.tokens == 1 and window is None:
            return None
        positions = self.positions[:, :, None]
        columns = torch.arange(self.width, device=positions.device)
        hidden = columns > positions
        if window is not None:
            hidden |= columns <= positions - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, -torch.inf)
        return mask if self.tokens == 1 else mask.repeat_interleave(self.group, dim=1)


class _Products(_Piece):
    """Two matrix products with the scores between them, batched over rows and key heads."""

    def __init__(self, span: Span, windows: Sequence[int | None], heads: torch.Tensor, attended: torch.Tensor) -> None:
        super().__init__(span, windows, heads, attended)
        keys, values = (
            plane[:, self.slots, :, : self.width].flatten(1, 2) for plane in (span.block.keys, span.block.values)
        )
        self._keys, self._values = keys.transpose(2, 3).unbind(0), values.unbind(0)
        if self.tokens == 1:
            self._queries, self._attended = heads.flatten(0, 1)[:, : self.group], attended.flatten(0, 1)
        else:
            self._queries, self._attended = (
                heads_or_attended.view(self.rows, self.tokens, *heads_or_attended.shape[1:]).transpose(1, 2)
                for heads_or_attended in (heads[:, :, : self.group], attended)
            )

    def _mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        mask = super()._mask(window, dtype)
        return mask if mask is None or self.rows == 1 else mask.repeat_interleave(self.kv_heads, dim=0)

    def attend(self, layer: int) -> None:
        queries, keys, values, mask = self._queries, self._keys[layer], self._values[layer], self.masks[layer]
        if self.tokens > 1:
            queries = queries.reshape(len(keys), self.tokens * self.group, self.head_dim)
        scores = torch.bmm(queries, keys) if mask is None else torch.baddbmm(mask, queries, keys)
        weights = torch.softmax(scores, -1)
        if self.tokens == 1:
            torch.bmm(weights, values, out=self._attended)
        else:
            self._attended.copy_(torch.bmm(weights, values).view(self._attended.shape))


class _Fused(_Piece):
    """torch's fused attention: of many tokens, of half types, or on CUDA."""

    def __init__(self, span: Span, windows: Sequence[int | None], heads: torch.Tensor, attended: torch.Tensor) -> None:
        super().__init__(span, windows, heads, attended)
        self._keys, self._values = (
            plane[:, self.slots, :, : self.width].unbind(0) for plane in (span.block.keys, span.block.values)
        )
        shape = (self.rows, self.tokens, self.kv_heads, self.group, self.head_dim)
        self._queries = heads[:, :, : self.group].view(shape).transpose(1, 2)
        self._attended = attended.view(shape).transpose(1, 2)

    def _mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        mask = super()._mask(window, dtype)
        return None if mask is None else mask[:, None]

    def attend(self, layer: int) -> None:
        queries = self._queries.reshape(self.rows, self.kv_heads, self.tokens * self.group, self.head_dim)
        keys, values = self._keys[layer].contiguous(), self._values[layer]
        attended = functional.scaled_dot_product_attention(queries, keys, values, self.masks[layer], scale=1.0)
        self._attended.copy_(attended.reshape(self._attended.shape))
