"""Keeps and erases, one after the other: so nothing is kept after it was erased, and answers don't wait for either."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch

from sixfold_runtime.engine import kv_metrics as series
from sixfold_runtime.engine.kv_blocks import Blocks
from sixfold_runtime.engine.kv_codec import BadBlockError, encode_blocks
from sixfold_runtime.engine.kv_metrics import KVMetrics
from sixfold_runtime.engine.kv_tiers import Tiers

_BLOCKS_AT_ONCE = 8
"""Encoded in one go, so that a long answer doesn't hold lookups up."""
QUEUE_BYTES = 256 << 20
"""Of keys and values that wait to be kept; what doesn't fit isn't kept."""


@dataclass(frozen=True, eq=False)
class Keep:
    """Keys and values [layers, kv_heads, tokens, head_dim] of the blocks from `first` on; tokens beyond the last whole
    block are ignored."""

    blocks: Blocks
    first: int
    keys: torch.Tensor
    values: torch.Tensor
    conversation: str
    ready: torch.cuda.Event | None
    """Recorded behind the copies that fill the tensors."""

    @property
    def size_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True, eq=False)
class Erase:
    salt: str
    done: Callable[[int, str], None]


class Writer:
    """`admit` and `wait_idle` are for the engine's thread, `do` for the store's loop."""

    def __init__(self, tiers: Tiers, metrics: KVMetrics) -> None:
        self._tiers, self._metrics = tiers, metrics
        self._order = asyncio.Lock()
        """First come, first served."""
        self._books = threading.Lock()
        self._queued_bytes = 0
        self._unfinished = 0
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._to_erase: Counter[str] = Counter()
        """How many times each tenant waits to be erased."""

    def admit(self, job: Keep | Erase) -> bool:
        """Count a job in, which must then be done; False: too much is to be done already."""
        with self._books:
            if isinstance(job, Erase):
                self._to_erase[job.salt] += 1
            elif self._queued_bytes + job.size_bytes > QUEUE_BYTES:
                self._metrics.bytes(series.DROPPED, job.size_bytes)
                return False
            else:
                self._queued_bytes += job.size_bytes
            self._unfinished += 1
            self._is_idle.clear()
        return True

    def wait_idle(self, seconds: float) -> bool:
        """Wait until all is done, at most so long; whether it is."""
        return self._is_idle.wait(seconds)

    async def do(self, job: Keep | Erase) -> None:
        new = job.blocks.names[job.first :] if isinstance(job, Keep) else ()
        try:
            with self._tiers.announced(new) as arrived:  # the next turn may ask for them before they are encoded
                async with self._order:
                    if isinstance(job, Erase):
                        await self._erase(job)
                    elif not self._to_erase[job.blocks.salt]:  # what waits when its tenant is erased is never kept
                        await self._keep(job, arrived)
        finally:
            with self._books:
                self._queued_bytes -= job.size_bytes if isinstance(job, Keep) else 0
                self._unfinished -= 1
                if not self._unfinished:
                    self._is_idle.set()

    async def _erase(self, job: Erase) -> None:
        count, error = 0, "it failed, as the engine's log says"
        try:
            count, error = await self._tiers.erase(job.salt)
        finally:
            with self._books:
                self._to_erase[job.salt] -= 1
            job.done(count, error)

    async def _keep(self, job: Keep, arrived: asyncio.Event) -> None:
        if job.ready is not None:
            await asyncio.to_thread(job.ready.synchronize)
        began = time.perf_counter()
        values = await self._encode(job)
        self._tiers.hold(job.blocks, job.first, values)
        arrived.set()
        await self._tiers.keep(job.blocks, job.first, values, job.conversation)
        self._metrics.seconds(series.WRITE, time.perf_counter() - began)

    async def _encode(self, job: Keep) -> list[bytes]:
        """As bytes, up to a block that isn't finite."""
        blocks, tokens, values = job.blocks, job.blocks.shape.tokens, list[bytes]()
        names = blocks.names[job.first :]
        size, ids = len(names) * tokens, blocks.token_ids[job.first * tokens :]
        encoded = encode_blocks(job.keys[:, :, :size], job.values[:, :, :size], names, ids)
        begin = asyncio.get_running_loop().run_in_executor
        while len(values) < len(names):
            some, bad = await begin(self._tiers.codec, _some, encoded)
            values += some
            if bad:
                self._metrics.fault(bad)
                break
        return values


def _some(encoded: Iterator[bytes]) -> tuple[list[bytes], str]:
    """The next few blocks, and why there are no more, if there aren't."""
    values = []
    try:
        for value in islice(encoded, _BLOCKS_AT_ONCE):
            values.append(value)
    except BadBlockError as bad:
        return values, str(bad)
    return values, ""
