"""The KV cache of one batch: sequences of different lengths.

RaggedCache, for transformers' modules, keeps each sequence from column 0 on, in one tensor a layer. It answers to the
`update` that attention modules call there, so any decoder can run over it. Rows stay dense: a forward runs over all of
them, and a row that leaves is replaced by the last one. Columns beyond a row's length are zero or hold finite padding,
so that masking them out can't yield NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch

_COLUMN_STEP = 64
_MAX_SPARE_COLUMNS = 256


class KVCache(Protocol):
    """Keys and values of a batch of sequences; a forward adds to it.

    Attributes:
        lengths: tokens held by each row.
    """

    lengths: list[int]

    def append(self, other: Self, row: int) -> None:
        """Copy a row of another cache of the same model behind the last row."""

    def fill(self, row: int, keys: torch.Tensor, values: torch.Tensor, more_tokens: int = 0) -> None:
        """Give an empty row the keys and values of its first tokens, instead of computing them.

        Args:
            keys, values: [layers, kv_heads, tokens, head_dim] such as `read` gives, on any device.
            more_tokens: how many will follow, so that the row needn't move for them.
        """

    def read(self, row: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of keys and values of tokens [start, end) of a row: [layers, kv_heads, tokens, head_dim] each, where
        the cache is, laid out in memory as is fastest.

        Raises:
            ValueError: the layers differ in shape, so that no tensor holds them all.
        """

    def remove(self, row: int) -> None:
        """Drop a row; the last one takes its place. An empty cache frees its memory."""

    def truncate(self, lengths: Sequence[int]) -> None:
        """Roll each row back to a length, at most its present one: what was drafted and rejected is forgotten."""

    def clear(self) -> None:
        """Forget everything and free the memory."""

    @property
    def allocated_bytes(self) -> int: ...

    @property
    def bytes_per_token(self) -> int:
        """Of one token of one row, over all layers; 0 while nothing is allocated."""

    @property
    def used_bytes(self) -> int:
        """Of those that are allocated: they hold tokens. May be read from any thread."""
        return sum(self.lengths) * self.bytes_per_token


@dataclass
class _Layer:
    """Shapes: [rows, kv_heads, columns, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor


def _allocate(like: torch.Tensor, rows: int, columns: int, device: torch.device | None = None) -> torch.Tensor:
    return torch.zeros(rows, like.shape[1], columns, like.shape[3], dtype=like.dtype, device=device or like.device)


def _resized(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    resized = _allocate(tensor, rows, columns)
    kept_rows, kept_columns = min(rows, tensor.shape[0]), min(columns, tensor.shape[2])
    resized[:kept_rows, :, :kept_columns] = tensor[:kept_rows, :, :kept_columns]
    return resized


class RaggedCache(KVCache):
    """The cache for transformers' modules: rectangular, as wide as its longest row."""

    def __init__(self, rows: int = 0, device: torch.device | None = None) -> None:
        """`device` is where `fill` puts what it is given; absent means the CPU."""
        self.lengths = [0] * rows
        self._device = device
        self._layers: list[_Layer] = []
        self._rows = 0
        self._columns = 0
        self._index = torch.empty(0, dtype=torch.long)
        self._positions = torch.empty(0, dtype=torch.long)
        self._width = 0

    def begin(self, positions: torch.Tensor) -> int:
        """Say where the next forward writes; returns the columns that it attends to.

        Args:
            positions: int64 [rows, tokens], the column of each new token.
        """
        rows = positions.shape[0]
        self._width = max(self.lengths) + positions.shape[1]
        self._reserve(rows, self._width)
        self._index = torch.arange(rows, device=positions.device)[:, None]
        self._positions = positions
        return self._width

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new keys and values [rows, kv_heads, tokens, head_dim]; returns all columns in use."""
        layer, rows = self._layer(layer_idx, keys, values), keys.shape[0]
        layer.keys[self._index, :, self._positions] = keys.transpose(1, 2)
        layer.values[self._index, :, self._positions] = values.transpose(1, 2)
        return layer.keys[:rows, :, : self._width], layer.values[:rows, :, : self._width]

    def commit(self, counts: list[int]) -> None:
        """Count the tokens that the forward wrote, a number a row."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def get_seq_length(self, _layer_idx: int = 0) -> int:
        """Part of transformers' interface: the longest row."""
        return max(self.lengths, default=0)

    @torch.inference_mode()
    def append(self, other: RaggedCache, row: int) -> None:
        length, target = other.lengths[row], len(self.lengths)
        self._reserve(target + 1, length + 1)
        for index, source in enumerate(other._layers):
            layer = self._layer(index, source.keys, source.values)
            layer.keys[target, :, :length] = source.keys[row, :, :length]
            layer.values[target, :, :length] = source.values[row, :, :length]
        self.lengths.append(length)

    @torch.inference_mode()
    def fill(self, row: int, keys: torch.Tensor, values: torch.Tensor, more_tokens: int = 0) -> None:
        tokens = keys.shape[2]
        self._reserve(len(self.lengths), tokens + more_tokens)
        for index, (new_keys, new_values) in enumerate(zip(keys, values, strict=True)):
            layer = self._layer(index, new_keys[None], new_values[None])
            layer.keys[row, :, :tokens].copy_(new_keys, non_blocking=True)
            layer.values[row, :, :tokens].copy_(new_values, non_blocking=True)
        self.lengths[row] = tokens

    def read(self, row: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        planes = ([layer.keys for layer in self._layers], [layer.values for layer in self._layers])
        for plane in planes:
            if len(shapes := {tuple(tensor.shape) for tensor in plane}) > 1:
                raise ValueError(f"keys or values of its layers have different shapes: {sorted(shapes)}")
        keys, values = (torch.stack([tensor[row, :, start:end] for tensor in plane]) for plane in planes)
        return keys, values

    @torch.inference_mode()
    def remove(self, row: int) -> None:
        last = len(self.lengths) - 1
        if last == 0:
            self.clear()
            return
        length = self.lengths[last]
        for layer in self._layers:
            for tensor in (layer.keys, layer.values):
                if row != last:
                    tensor[row] = tensor[last]
                # All of it: what was rolled back may not have been finite.
                tensor[last] = 0
        self.lengths[row] = length
        self.lengths.pop()

    def truncate(self, lengths: Sequence[int]) -> None:
        # What stays behind is finite and gets masked: had it not been, its row would have failed with that forward.
        self.lengths = list(lengths)

    def clear(self) -> None:
        self.lengths, self._layers, self._rows, self._columns = [], [], 0, 0

    @property
    def allocated_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self._layers)

    @property
    def bytes_per_token(self) -> int:
        cells = self._rows * self._columns
        return self.allocated_bytes // cells if cells else 0

    def _layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> _Layer:
        """A layer; new ones hold tensors such as these [any, kv_heads, any, head_dim]."""
        while len(self._layers) <= index:
            planes = (_allocate(plane, self._rows, self._columns, self._device) for plane in (keys, values))
            self._layers.append(_Layer(*planes))
        return self._layers[index]

    def _reserve(self, rows: int, columns: int) -> None:
        """Grow rows to the next power of two, and columns by half or 256; spare columns of longer rows that left go."""
        if rows <= self._rows and columns <= self._columns:
            return
        if rows > self._rows:
            new_rows = 1 << (rows - 1).bit_length()
            needed = max(columns, *self.lengths, 1)
        else:
            new_rows, needed = self._rows, columns
        new_columns = -(-(needed + min(needed // 2, _MAX_SPARE_COLUMNS)) // _COLUMN_STEP) * _COLUMN_STEP
        # Built aside first: running out of memory leaves the cache as it was.
        layers = [
            _Layer(_resized(layer.keys, new_rows, new_columns), _resized(layer.values, new_rows, new_columns))
            for layer in self._layers
        ]
        self._layers, self._rows, self._columns = layers, new_rows, new_columns
