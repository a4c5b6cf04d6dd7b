"""Blocks of keys and values in this pod's memory and, behind it, in Redis. No fault leaves here: it is a miss."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import takewhile

from sixfold_api.runtime_config import KVReuseConfig
from sixfold_runtime.engine import kv_far
from sixfold_runtime.engine import kv_metrics as series
from sixfold_runtime.engine.kv_blocks import Blocks, Found
from sixfold_runtime.engine.kv_codec import BadBlockError, BlockShape, check_block
from sixfold_runtime.engine.kv_decoding import Decoding, Target, one_thread
from sixfold_runtime.engine.kv_far import ROUND_TRIP_BYTES, FarTier
from sixfold_runtime.engine.kv_memory import MemoryTier
from sixfold_runtime.engine.kv_metrics import KVMetrics
from sixfold_runtime.engine.kv_redis import RedisTier

_RUN_BLOCKS = 16
"""Decoded in one go, so that a long prompt doesn't hold others up."""
_MOST_NAMES = 4096


class Tiers:
    """Used from one event loop; `knows`, `may_have` and `problem` may be asked from any thread."""

    def __init__(self, redis: RedisTier, metrics: KVMetrics, clock: Callable[[], float]) -> None:
        self._far, self._metrics, self._clock = FarTier(redis, metrics, clock), metrics, clock
        self._config: KVReuseConfig | None = None
        self.memory = MemoryTier()
        self._coming: dict[bytes, asyncio.Event] = {}
        """Blocks that a prefetch is about to bring."""
        self._erasures = 0
        self._codec: ThreadPoolExecutor | None = None

    @property
    def problem(self) -> str:
        return self._far.problem

    async def follow(self, config: KVReuseConfig | None) -> None:
        self._config = config
        self.memory.configure(config.memory_bytes if config else 0, config.ttl_seconds if config else 0.0)
        await self._far.follow(config)

    async def close(self) -> None:
        await self.follow(None)
        if self._codec is not None:
            self._codec.shutdown(wait=False)

    @property
    def codec(self) -> ThreadPoolExecutor:
        """Where blocks are decoded and encoded."""
        if self._codec is None:
            self._codec = one_thread()
        return self._codec

    def knows(self, names: Sequence[bytes]) -> int:
        """How many of the first blocks are kept, as far as this pod knows, and needn't be kept again."""
        now = self._clock()
        for index, name in enumerate(names):
            if not (self._far.holds(name) or self.memory.holds(name, now)):
                return index
        return len(names)

    def may_have(self, name: bytes) -> bool:
        return self._far.lets_through or name in self._coming or self.memory.holds(name, self._clock())

    # -- lookups

    async def find(self, wanted: Blocks, target: Target, is_cancelled: Callable[[], bool]) -> Found | None:
        """The longest run of first blocks; None where there is none, or nobody waits any more."""
        decoding, erasures, loss = Decoding(wanted, target, self.codec), self._erasures, ""
        while (at := decoding.count) < len(wanted.names) and not is_cancelled():
            if values := self._in_memory(wanted.names[at:]):
                decoding.add(values, is_near=True)
            elif not await self._arrives(wanted.names[at]):
                values, loss = await self._fetch(wanted, at)
                if values:
                    decoding.add(values, is_near=False)
                if loss:
                    break
        found, bad = await self._join(decoding)
        if bad:
            self._metrics.fault(bad)
            self._forget(wanted.names[found.blocks])
            loss = series.CORRUPT
        if erasures == self._erasures:
            self._note_use(wanted, found)
        if is_cancelled():
            return None
        self._count(found, len(wanted.names), loss)
        if not found.blocks:
            return None
        found.keys, found.values = decoding.planes(found.blocks)
        return found

    def _in_memory(self, names: Sequence[bytes]) -> list[bytes]:
        """The values of the first names, up to one that memory lacks."""
        values: list[bytes] = []
        now = self._clock()
        for name in names:
            value = self.memory.get(name, now)
            if value is None or len(values) == _RUN_BLOCKS:
                break
            values.append(value)
        return values

    @contextmanager
    def announced(self, names: Sequence[bytes]) -> Iterator[asyncio.Event]:
        """Lookups that need one of these blocks wait a moment for it: until the end, or the event is set."""
        arrived = asyncio.Event()
        coming = dict.fromkeys((name for name in names if name not in self._coming), arrived)
        self._coming |= coming
        try:
            yield arrived
        finally:
            arrived.set()
            for name in coming:
                del self._coming[name]

    async def _arrives(self, name: bytes) -> bool:
        """Wait for a block that is being fetched ahead or kept; whether it came."""
        if (coming := self._coming.get(name)) is None:
            return False
        try:
            async with asyncio.timeout(kv_far.LOOKUP_SECONDS):
                await coming.wait()
        except TimeoutError:
            return False
        return self.memory.holds(name, self._clock())

    async def _fetch(self, wanted: Blocks, at: int) -> tuple[list[bytes], str]:
        """Read the next blocks, up to one that is in memory; those that are there, and why not all, if not all are."""
        now = self._clock()
        most = max(1, ROUND_TRIP_BYTES // wanted.shape.value_bytes)
        names = list(takewhile(lambda name: not self.memory.holds(name, now), wanted.names[at : at + most]))
        there = await self._far.get(wanted.salt, names, wanted.shape.value_bytes)
        if there is None:
            return [], series.FAULT if self._far.is_used else series.MISS
        values = [there[name] for name in takewhile(there.__contains__, names)]
        return values, "" if 0 < len(names) == len(values) else series.MISS

    async def _join(self, decoding: Decoding) -> tuple[Found, str]:
        """What was good, and what was wrong with the next block, if it was there."""
        found = Found()
        for run in decoding.runs:
            good, bad = await run.decoded
            found.blocks += good
            found.near += good if run.is_near else 0
            found.fetched += [b""] * good if run.is_near else run.values[:good]
            if bad:
                return found, bad
        return found, ""

    def _forget(self, name: bytes) -> None:
        """A block that is no good: whoever computes it next will keep it again."""
        self.memory.discard(name)
        self._far.forget([name])

    def _note_use(self, wanted: Blocks, found: Found) -> None:
        now, used = self._clock(), wanted.names[: found.blocks]
        fetched = [(name, value) for name, value in zip(used, found.fetched, strict=True) if value]
        for name, value in reversed(fetched):
            self.memory.put(name, value, wanted.salt, now)
        self._far.seen(name for name, _ in fetched)
        self.memory.use(used, now)

    def _count(self, found: Found, whole: int, loss: str) -> None:
        self._metrics.blocks(series.HIT_MEMORY, found.near)
        self._metrics.blocks(series.HIT_REDIS, found.blocks - found.near)
        lost = whole - found.blocks
        if lost and loss == series.CORRUPT:
            self._metrics.blocks(series.CORRUPT, 1)
            lost, loss = lost - 1, series.MISS
        self._metrics.blocks(loss, lost)

    # -- what is kept

    def hold(self, kept: Blocks, first: int, values: Sequence[bytes]) -> None:
        """Keep the values of blocks `first` and on of a sequence in memory."""
        now = self._clock()
        for name, value in reversed(list(zip(kept.names[first:], values, strict=False))):
            self.memory.put(name, value, kept.salt, now)
        self.memory.use(kept.names, now)

    async def keep(self, kept: Blocks, first: int, values: Sequence[bytes], conversation: str) -> None:
        """Keep them in Redis too, and what the sequence is made of."""
        await self._far.write(kept, dict(zip(kept.names[first:], values, strict=False)))
        if conversation:
            await self._far.remember(kept, first + len(values), conversation)
        await self.renew(kept, first)

    async def renew(self, used: Blocks, count: int) -> None:
        """The first blocks were used: they stay for another TTL, and what Redis has lost meanwhile it gets again."""
        now = self._clock()
        if lost := await self._far.renew(used, count):
            again = {name: self.memory.get(name, now) for name in lost}
            await self._far.write(used, {name: value for name, value in again.items() if value is not None})

    # -- a conversation that is about to go on, and a tenant that is to be forgotten

    async def prefetch(self, salt: str, conversation: str, shape: BlockShape) -> None:
        """Bring what a conversation had last into memory, as far as half of it goes."""
        if self._config is None or not self._far.lets_through:
            return
        most = min(_MOST_NAMES, self._config.memory_bytes // 2 // shape.value_bytes)
        if not most:
            return
        names = await self._far.recall(salt, conversation, most)
        now = self._clock()
        absent = [name for name in names if not self.memory.holds(name, now)]
        with self.announced(absent):
            await self._bring(salt, absent, shape)
            self.memory.use(names, self._clock())

    async def _bring(self, salt: str, names: Sequence[bytes], shape: BlockShape) -> None:
        step, erasures = max(1, ROUND_TRIP_BYTES // shape.value_bytes), self._erasures
        for begin in range(0, len(names), step):
            values = await self._far.get(salt, names[begin : begin + step], shape.value_bytes)
            if not values or erasures != self._erasures:
                return
            for name, value in values.items():
                try:
                    check_block(value, name, shape)
                except BadBlockError as bad:
                    self._metrics.fault(str(bad))
                    return
                self.memory.put(name, value, salt, self._clock())

    async def erase(self, salt: str) -> tuple[int, str]:
        """Forget all of a tenant; how many blocks that were, and why some may be left."""
        self._erasures += 1
        names = self.memory.erase(salt)
        far, error = await self._far.erase(salt)
        names |= far
        self._far.forget(names)
        return len(names), error
