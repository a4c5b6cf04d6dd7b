"""Blocks of keys and values in this pod's memory and, behind it, in Redis. No fault leaves here: it is a miss."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import takewhile

from sixfold_api.kv_reuse import KVStore as Store
from sixfold_api.runtime_config import KVReuseConfig
from sixfold_runtime.engine import kv_metrics as series
from sixfold_runtime.engine.kv_blocks import Blocks, Found, StoredNames
from sixfold_runtime.engine.kv_codec import BadBlockError, BlockShape, check_block
from sixfold_runtime.engine.kv_decoding import Decoding, Target, one_thread
from sixfold_runtime.engine.kv_fault import RedisFault
from sixfold_runtime.engine.kv_gate import Gate
from sixfold_runtime.engine.kv_memory import MemoryTier
from sixfold_runtime.engine.kv_metrics import KVMetrics
from sixfold_runtime.engine.kv_redis import RedisTier

LOOKUP_SECONDS = 0.1
"""A request waits no longer for a round trip."""
WRITE_SECONDS = 2.0
TRIAL_SECONDS = 1.0
ERASE_SECONDS = 30.0
ROUND_TRIP_BYTES = 1 << 20
"""Read or written at once: so the time limit is one of Redis, and not one of how long a prompt is."""
_RUN_BLOCKS = 16
"""Decoded in one go, so that a long prompt doesn't hold others up."""
_MOST_NAMES = 4096


class Tiers:
    """Used from one event loop; `knows`, `may_have` and `problem` may be asked from any thread."""

    def __init__(self, redis: RedisTier, metrics: KVMetrics, clock: Callable[[], float]) -> None:
        self._redis, self._metrics, self._clock = redis, metrics, clock
        self._config: KVReuseConfig | None = None
        self.memory = MemoryTier()
        self._stored = StoredNames()
        self._coming: dict[bytes, asyncio.Event] = {}
        """Blocks that a prefetch is about to bring."""
        self._erasures = 0
        self._codec: ThreadPoolExecutor | None = None
        self._reads = Gate(
            "Redis isn't read", partial(redis.ping, TRIAL_SECONDS), metrics.fault, self._reads_changed, clock
        )
        self._writes = Gate(
            "Redis isn't written to", partial(redis.try_write, TRIAL_SECONDS), metrics.fault, lambda _: None, clock
        )

    @property
    def problem(self) -> str:
        return self._reads.problem or self._writes.problem

    async def follow(self, config: KVReuseConfig | None) -> None:
        self._config = config
        ttl_seconds = config.ttl_seconds if config else 0.0
        self.memory.configure(config.memory_bytes if config else 0, ttl_seconds)
        self._stored.configure(ttl_seconds)
        if self._uses_redis:
            self._reads.watch()
            self._writes.watch()
        else:
            self._reads.stop()
            self._writes.stop()
            self._stored.clear()
            await self._redis.close()

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

    @property
    def _uses_redis(self) -> bool:
        return self._config is not None and self._config.store is Store.REDIS

    def knows(self, names: Sequence[bytes]) -> int:
        """How many of the first blocks are kept, as far as this pod knows, and needn't be kept again."""
        now = self._clock()
        for index, name in enumerate(names):
            if not (self._stored.holds(name, now) or self.memory.holds(name, now)):
                return index
        return len(names)

    def may_have(self, name: bytes) -> bool:
        return self._reads.lets_through or name in self._coming or self.memory.holds(name, self._clock())

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
            async with asyncio.timeout(LOOKUP_SECONDS):
                await coming.wait()
        except TimeoutError:
            return False
        return self.memory.holds(name, self._clock())

    async def _fetch(self, wanted: Blocks, at: int) -> tuple[list[bytes], str]:
        """Read the next blocks, up to one that is in memory; those that are there, and why not all, if not all are."""
        now = self._clock()
        most = max(1, ROUND_TRIP_BYTES // wanted.shape.value_bytes)
        names = list(takewhile(lambda name: not self.memory.holds(name, now), wanted.names[at : at + most]))
        there = await self._get(wanted.salt, names, wanted.shape.value_bytes)
        if there is None:
            return [], series.FAULT if self._uses_redis else series.MISS
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

    async def _get(self, salt: str, names: Sequence[bytes], size: int) -> dict[bytes, bytes] | None:
        """Those of the blocks that Redis has; None if it can't be asked."""
        values = await self._reads.run(lambda: self._redis.get(salt, names, size, LOOKUP_SECONDS))
        if values is None:
            return None
        there = {name: value for name, value in zip(names, values, strict=True) if value}
        self._stored.forget(name for name in names if name not in there)
        self._metrics.bytes(series.READ, sum(map(len, there.values())))
        return there

    def _forget(self, name: bytes) -> None:
        """A block that is no good: whoever computes it next will keep it again."""
        self.memory.discard(name)
        self._stored.forget([name])

    def _note_use(self, wanted: Blocks, found: Found) -> None:
        now, used = self._clock(), wanted.names[: found.blocks]
        fetched = [(name, value) for name, value in zip(used, found.fetched, strict=True) if value]
        for name, value in reversed(fetched):
            self.memory.put(name, value, wanted.salt, now)
        self._stored.seen((name for name, _ in fetched), now)
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
        await self._write(kept, dict(zip(kept.names[first:], values, strict=False)))
        config = self._config
        if conversation and config is not None:
            names = kept.names[: first + len(values)]
            await self._writes.run(
                lambda: self._redis.remember(kept.salt, conversation, names, config.ttl_seconds, WRITE_SECONDS)
            )
        await self.renew(kept, first)

    async def renew(self, used: Blocks, count: int) -> None:
        """The first blocks were used: they stay for another TTL, and what Redis has lost meanwhile it gets again."""
        config, now = self._config, self._clock()
        if config is None or not self._writes.lets_through:
            return
        names = self._stored.due(used.names[:count], now)
        size = used.shape.value_bytes
        if not names:
            return
        lost = await self._writes.run(
            lambda: self._redis.renew(used.salt, names, size, config.ttl_seconds, WRITE_SECONDS)
        )
        if lost is not None:
            self._stored.renewed(set(names) - set(lost), now)
            again = {name: self.memory.get(name, now) for name in lost}
            await self._write(used, {name: value for name, value in again.items() if value is not None})

    async def _write(self, kept: Blocks, values: dict[bytes, bytes]) -> None:
        config = self._config
        if config is None:
            return
        size = max(1, ROUND_TRIP_BYTES // kept.shape.value_bytes)
        for batch in _batches(values, size):
            evicted = await self._writes.run(
                partial(self._redis.put, kept.salt, batch, config.ttl_seconds, config.max_bytes, WRITE_SECONDS)
            )
            if evicted is None:
                return
            self._stored.renewed(batch, self._clock())
            self._metrics.bytes(series.WRITTEN, sum(map(len, batch.values())))
            self._metrics.bytes(series.EVICTED, evicted)

    def _reads_changed(self, is_up: bool) -> None:
        self._metrics.redis_up(is_up)
        if not is_up:
            self._stored.clear()  # nobody knows what it will hold when it is back

    # -- a conversation that is about to go on, and a tenant that is to be forgotten

    async def prefetch(self, salt: str, conversation: str, shape: BlockShape) -> None:
        """Bring what a conversation had last into memory, as far as half of it goes."""
        if self._config is None or not self._reads.lets_through:
            return
        most = min(_MOST_NAMES, self._config.memory_bytes // 2 // shape.value_bytes)
        if not most:
            return
        names = await self._reads.run(lambda: self._redis.recall(salt, conversation, most, LOOKUP_SECONDS))
        now = self._clock()
        absent = [name for name in names or () if not self.memory.holds(name, now)]
        with self.announced(absent):
            await self._bring(salt, absent, shape)
            self.memory.use(names or (), self._clock())

    async def _bring(self, salt: str, names: Sequence[bytes], shape: BlockShape) -> None:
        step, erasures = max(1, ROUND_TRIP_BYTES // shape.value_bytes), self._erasures
        for begin in range(0, len(names), step):
            values = await self._get(salt, names[begin : begin + step], shape.value_bytes)
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
        names, error = self.memory.erase(salt), ""
        if self._redis.is_given and (self._config is None or self._uses_redis):
            try:
                if self._reads.problem:
                    raise RedisFault("unused", self._reads.problem)  # nobody waits for what is known not to answer
                names |= await self._redis.erase(salt, ERASE_SECONDS)
            except RedisFault as fault:
                self._metrics.fault(fault.reason)
                error = f"blocks may be left in Redis until their time is over: {fault}"
        self._stored.forget(names)
        return len(names), error


def _batches(values: dict[bytes, bytes], size: int) -> Iterator[dict[bytes, bytes]]:
    items = list(values.items())
    for begin in range(0, len(items), size):
        yield dict(items[begin : begin + size])
