"""The KV cache of the engine's own decoder: rows of about one length share a block of fixed size.

A row that outgrows its block moves to the next larger one, so attention reads little beyond what a row holds, however
much longer its batch-mates are. Columns beyond a row's length are zero or finite, so that masking them out can't
yield NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sixfold_runtime.engine.kv_cache import KVCache

_SMALLEST_CAPACITY = 128
_MAX_PADDED_TOKENS = 32
"""Rows of a block that take at most so many new tokens are computed together, padded to the longest of them."""


@dataclass(frozen=True)
class CacheShape:
    """What one token takes."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    transposed_keys: bool
    """Keys of a head lie as [head_dim, columns] in memory: what a matrix product reads fastest on a CPU."""

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


Places = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]


@dataclass(eq=False)
class Block:
    """Rows of up to `capacity` tokens. keys and values: [layers, slots, kv_heads, capacity, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor
    rows: list[int] = field(default_factory=list)
    """The cache's row in each slot; slots beyond are free."""
    _places: Places | None = None

    @property
    def planes(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys, self.values

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    def places(self) -> Places:
        """Of each layer: keys [slots, capacity, kv_heads, head_dim], values [slots kv_heads capacity, head_dim]."""
        if self._places is None:
            self._places = self.keys.transpose(2, 3).unbind(0), self.values.flatten(1, 3).unbind(0)
        return self._places

    def grow(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Move to larger tensors with more slots."""
        slots = self.keys.shape[1]
        keys[:, :slots], values[:, :slots] = self.keys, self.values
        self.keys, self.values, self._places = keys, values, None


@dataclass(frozen=True)
class Span:
    """Rows in consecutive slots of one block that are computed together."""

    block: Block
    first_slot: int
    rows: tuple[int, ...]
    """The cache's rows, by slot."""
    starts: tuple[int, ...]
    """Tokens that each row held before."""
    counts: tuple[int, ...]
    """New tokens of each row."""


def capacity_for(tokens: int) -> int:
    """128, 256, 384, 512, 768, 1024, ...: at most half again as much as is needed, from 256 tokens on."""
    power = max(_SMALLEST_CAPACITY, 1 << (tokens - 1).bit_length())
    between = power // 4 * 3
    return between if power >= 512 and tokens <= between else power


class DecoderCache(KVCache):
    """Keys and values of a batch of sequences, in blocks by length."""

    def __init__(self, shape: CacheShape, rows: int = 0) -> None:
        self.lengths = [0] * rows
        self._shape = shape
        self._blocks: dict[int, Block] = {}
        self._block_of: list[Block | None] = [None] * rows

    @torch.inference_mode()
    def begin(self, counts: Sequence[int]) -> list[Span]:
        """Make room for new tokens, a number a row; returns where they go, each row in one span."""
        for row, count in enumerate(counts):
            self._reserve(row, self.lengths[row] + count)
        spans = []
        for _, block in sorted(self._blocks.items()):
            first, padded = 0, max(counts[row] for row in block.rows) <= _MAX_PADDED_TOKENS
            for slot in range(1, len(block.rows) + 1):
                if slot == len(block.rows) or not (padded or counts[block.rows[slot]] == counts[block.rows[first]]):
                    rows = tuple(block.rows[first:slot])
                    starts, news = (tuple(values[row] for row in rows) for values in (self.lengths, counts))
                    spans.append(Span(block, first, rows, starts, news))
                    first = slot
        return spans

    def commit(self, counts: Sequence[int]) -> None:
        """Count the tokens that the forward wrote, a number a row."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    @torch.inference_mode()
    def append(self, other: DecoderCache, row: int) -> None:
        length, source = other.lengths[row], other._block_of[row]
        self.lengths.append(length)
        self._block_of.append(None)
        self._place(len(self.lengths) - 1, length + 1, source, 0 if source is None else source.rows.index(row), length)

    @torch.inference_mode()
    def fill(self, row: int, keys: torch.Tensor, values: torch.Tensor, more_tokens: int = 0) -> None:
        tokens = keys.shape[2]
        self._place(row, tokens + more_tokens, None, 0, tokens)
        block = self._block_of[row]
        assert block is not None
        slot = block.rows.index(row)
        for plane, new in zip(block.planes, (keys, values), strict=True):
            plane[:, slot, :, :tokens].copy_(new, non_blocking=True)
        self.lengths[row] = tokens

    def read(self, row: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        block = self._block_of[row]
        assert block is not None, "a row with tokens has a place"
        slot = block.rows.index(row)
        keys, values = (plane[:, slot, :, start:end].clone() for plane in block.planes)
        return keys, values

    @torch.inference_mode()
    def remove(self, row: int) -> None:
        last = len(self.lengths) - 1
        self._vacate(row)
        if row != last:
            block = self._block_of[last]
            if block is not None:
                block.rows[block.rows.index(last)] = row
            self._block_of[row], self.lengths[row] = block, self.lengths[last]
        self.lengths.pop()
        self._block_of.pop()

    def truncate(self, lengths: Sequence[int]) -> None:
        # What stays behind is finite and gets masked: had it not been, its row would have failed with that forward.
        self.lengths = list(lengths)

    def clear(self) -> None:
        self.lengths, self._blocks, self._block_of = [], {}, []

    @property
    def allocated_bytes(self) -> int:
        return sum(plane.nbytes for block in self._blocks.values() for plane in block.planes)

    @property
    def bytes_per_token(self) -> int:
        return self._shape.bytes_per_token

    def _reserve(self, row: int, tokens: int) -> None:
        block = self._block_of[row]
        if block is None:
            self._place(row, tokens, None, 0, 0)
        elif block.capacity < tokens:
            slot = block.rows.index(row)
            self._place(row, tokens, block, slot, self.lengths[row])
            self._vacate_slot(block, slot)

    def _place(self, row: int, tokens: int, source: Block | None, source_slot: int, length: int) -> None:
        """Give a row the next free slot for `tokens`, with `length` columns of another slot and zeros behind them.

        Without a source the caller fills these columns.
        """
        block = self._with_free_slot(capacity_for(tokens))
        slot = len(block.rows)
        for index, plane in enumerate(block.planes):
            if source is not None:
                plane[:, slot, :, :length] = source.planes[index][:, source_slot, :, :length]
            plane[:, slot, :, length:] = 0
        block.rows.append(row)
        self._block_of[row] = block

    def _vacate(self, row: int) -> None:
        block = self._block_of[row]
        if block is not None:
            self._vacate_slot(block, block.rows.index(row))

    def _vacate_slot(self, block: Block, slot: int) -> None:
        """Free a slot; the last one moves there. A block without rows frees its memory."""
        last = len(block.rows) - 1
        if last == 0:
            del self._blocks[block.capacity]
        elif slot != last:
            for plane in block.planes:
                plane[:, slot] = plane[:, last]
            block.rows[slot] = block.rows[last]
        block.rows.pop()

    def _with_free_slot(self, capacity: int) -> Block:
        block = self._blocks.get(capacity)
        if block is None:
            block = self._blocks[capacity] = Block(*self._planes(1, capacity))
        if len(block.rows) == (slots := block.keys.shape[1]):
            block.grow(*self._planes(2 * slots, capacity))
        return block

    def _planes(self, slots: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._zeros(slots, capacity, transposed=self._shape.transposed_keys), self._zeros(slots, capacity)

    def _zeros(self, slots: int, capacity: int, transposed: bool = False) -> torch.Tensor:
        shape = self._shape
        sizes = (capacity, shape.head_dim)
        zeros = torch.zeros(
            shape.layers, slots, shape.kv_heads, *(sizes[::-1] if transposed else sizes),
            dtype=shape.dtype, device=shape.device,
        )  # fmt: skip
        return zeros.transpose(3, 4) if transposed else zeros
