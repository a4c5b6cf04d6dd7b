"""Attention of a step's new tokens over the blocks of a DecoderCache; what all layers share is made once a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
        windows: Iterable[int | None],
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
        self._windows = list(windows)
        self._pieces, first = [], 0
        for span in spans:
            last = first + len(span.rows) * span.tokens
            self._pieces.append(_Piece(span, set(self._windows), heads[first:last], attended[first:last]))
            first = last

    def __call__(self, layer: int) -> None:
        """Write the layer's new keys and values to the cache, and `attended`."""
        for piece in self._pieces:
            piece.write(layer)
            piece.attend(layer, self._windows[layer])


class _Piece:
    """One span: n rows of t tokens each, over w columns."""

    def __init__(self, span: Span, windows: set[int | None], heads: torch.Tensor, attended: torch.Tensor) -> None:
        self._rows, self._tokens = len(span.rows), span.tokens
        self._kv_heads, self._group, self._head_dim = attended.shape[1:]
        slots = slice(span.first_slot, span.first_slot + self._rows)
        self._width = max(span.starts) + span.tokens
        self._even = min(span.starts) == max(span.starts)
        # On a CPU two products of few rows are faster than the fused kernel; half types need its fp32 sums.
        self._by_product = (
            heads.device.type == "cpu" and heads.dtype == torch.float32 and self._tokens <= _MAX_PRODUCT_TOKENS
        )
        self._point_at_cache(span, slots)
        self._point_at_step(heads, attended)
        columns = torch.tensor(span.starts, device=heads.device)[:, None] + torch.arange(
            span.tokens, device=heads.device
        )
        self._places = None
        if not self._even:
            first = torch.arange(slots.start, slots.stop, device=heads.device)
            self._places = (first.repeat_interleave(self._tokens), columns.view(-1))
        self._masks = {window: self._mask(columns, window, heads.dtype) for window in windows}

    def _point_at_cache(self, span: Span, slots: slice) -> None:
        """Views of each layer's part of the cache: where new tokens go, and what is attended to."""
        block, columns = span.block, slice(span.starts[0], span.starts[0] + span.tokens)
        planes = block.keys, block.values
        if self._even:
            self._targets = [plane[:, slots, :, columns].unbind(0) for plane in planes]
        else:
            self._targets = [plane.transpose(2, 3).unbind(0) for plane in planes]
        seen = [plane[:, slots, :, : self._width] for plane in planes]
        if self._by_product:
            seen = [plane.flatten(1, 2) for plane in seen]
            seen[0] = seen[0].transpose(2, 3)
        self._keys, self._values = (plane.unbind(0) for plane in seen)

    def _point_at_step(self, heads: torch.Tensor, attended: torch.Tensor) -> None:
        """Views of the step's buffers."""
        rows, tokens, group = self._rows, self._tokens, self._group
        new = heads[:, :, group:]
        if self._even:
            new = new.view(rows, tokens, *new.shape[1:]).transpose(1, 2)
        self._new = new.select(-2, 0), new.select(-2, 1)
        if tokens == 1:
            self._queries, self._attended = heads.flatten(0, 1)[:, :group], attended.flatten(0, 1)
        else:
            self._queries = heads[:, :, :group].view(rows, tokens, *attended.shape[1:]).transpose(1, 2)
            self._attended = attended.view(rows, tokens, *attended.shape[1:]).transpose(1, 2)

    def _mask(self, positions: torch.Tensor, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """0 where a token attends and -inf elsewhere; None where all attend to all columns.

        Args:
            positions: int64 [n, t].

        Returns:
            For products [n kv_heads, t group, w], else [n, 1, t group, w]; dimensions of equal content may be 1.
        """
        if window is not None and self._width <= window:
            window = None
        if self._tokens == 1 and self._even and window is None:
            return None
        columns = torch.arange(self._width, device=positions.device)
        hidden = columns > positions[..., None]
        if window is not None:
            hidden |= columns <= positions[..., None] - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, -torch.inf)
        if self._tokens > 1:
            mask = mask.repeat_interleave(self._group, dim=1)
        if not self._by_product:
            return mask[:, None]
        return mask if self._rows == 1 else mask.repeat_interleave(self._kv_heads, dim=0)

    def write(self, layer: int) -> None:
        """Add the layer's new keys and values to the cache."""
        for targets, new in zip(self._targets, self._new, strict=True):
            if self._places is None:
                targets[layer].copy_(new)
            else:
                targets[layer].index_put_(self._places, new)

    def attend(self, layer: int, window: int | None) -> None:
        rows, tokens, kv_heads, group = self._rows, self._tokens, self._kv_heads, self._group
        keys, values, mask, queries = self._keys[layer], self._values[layer], self._masks[window], self._queries
        if not self._by_product:
            queries = queries.reshape(rows, kv_heads, tokens * group, self._head_dim)
            attended = functional.scaled_dot_product_attention(queries, keys.contiguous(), values, mask, scale=1.0)
            self._attended.copy_(attended.reshape(self._attended.shape))
            return
        if tokens > 1:
            queries = queries.reshape(rows * kv_heads, tokens * group, self._head_dim)
        scores = torch.bmm(queries, keys) if mask is None else torch.baddbmm(mask, queries, keys)
        weights = torch.softmax(scores, dim=-1)
        if tokens == 1:
            torch.bmm(weights, values, out=self._attended)
        else:
            self._attended.copy_(torch.bmm(weights, values).view(self._attended.shape))
