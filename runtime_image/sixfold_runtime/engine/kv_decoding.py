"""Blocks of one prompt turned into floats in a thread beside, while the next ones are on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from sixfold_runtime.engine.kv_blocks import Blocks
from sixfold_runtime.engine.kv_codec import BadBlockError, check_block, decode_block


@dataclass(frozen=True)
class Target:
    """What a prompt's keys and values are to become."""

    dtype: torch.dtype
    pin_memory: bool = False


@dataclass(frozen=True)
class Run:
    """Successive values that were found in one place.

    Attributes:
        decoded: how many of them were good, and what is wrong with the next one, if it isn't.
    """

    values: Sequence[bytes]
    is_near: bool
    """In this pod's memory, where only what was checked is."""
    decoded: asyncio.Future[tuple[int, str]]


def one_thread() -> ThreadPoolExecutor:
    """A thread whose operations take no other threads with them: those are the engine's."""
    pool, threads = ThreadPoolExecutor(1, "kv-codec"), torch.get_num_threads()
    pool.submit(torch.set_num_threads, 1).result()
    torch.set_num_threads(threads)  # the last call also says how many those take that begin later
    return pool


class Decoding:
    """Of one prompt.

    Attributes:
        runs: in the prompt's order.
        count: blocks in them.
    """

    def __init__(self, wanted: Blocks, target: Target, pool: ThreadPoolExecutor) -> None:
        self._wanted, self._target, self._pool = wanted, target, pool
        self._planes: list[torch.Tensor] = []
        self.runs: list[Run] = []
        self.count = 0

    def add(self, values: Sequence[bytes], is_near: bool) -> None:
        """Begin to decode the values of the next blocks."""
        shape = self._wanted.shape
        if not self._planes:
            # For all that may be found: where it isn't, the memory is never touched.
            sizes = (shape.layers, shape.kv_heads, len(self._wanted.names) * shape.tokens, shape.head_dim)
            dtype, pin_memory = self._target.dtype, self._target.pin_memory
            self._planes = [torch.empty(sizes, dtype=dtype, pin_memory=pin_memory) for _ in range(2)]
        begin = asyncio.get_running_loop().run_in_executor
        self.runs.append(Run(values, is_near, begin(self._pool, self._decode, self.count, values, is_near)))
        self.count += len(values)

    def planes(self, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [layers, kv_heads, tokens, head_dim] of the first blocks, of which there is at least one."""
        keys, values = (plane[:, :, : blocks * self._wanted.shape.tokens] for plane in self._planes)
        return keys, values

    def _decode(self, first: int, values: Sequence[bytes], is_checked: bool) -> tuple[int, str]:
        wanted, shape = self._wanted, self._wanted.shape
        keys, others = self._planes
        for index, value in enumerate(values, first):
            span = slice(index * shape.tokens, (index + 1) * shape.tokens)
            try:
                if not is_checked:
                    check_block(value, wanted.names[index], shape)
                block = decode_block(value, shape, wanted.token_ids[span])
            except BadBlockError as bad:
                return index - first, str(bad)
            block.dequantise_into(keys[:, :, span], others[:, :, span])
        return len(values), ""
