"""Blocks of keys and values in Redis, as far as this pod can reach it and knows of them. A fault is a miss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from sixfold_api.kv_reuse import KVStore as Store
from sixfold_api.runtime_config import KVReuseConfig
from sixfold_runtime.engine import kv_metrics as series
from sixfold_runtime.engine.kv_blocks import Blocks, StoredNames
from sixfold_runtime.engine.kv_fault import RedisFault
from sixfold_runtime.engine.kv_gate import Gate
from sixfold_runtime.engine.kv_metrics import KVMetrics
from sixfold_runtime.engine.kv_redis import RedisTier

LOOKUP_SECONDS = 0.1
"""A request waits no longer for a round trip."""
WRITE_SECONDS = 2.0
TRIAL_SECONDS = 1.0
ERASE_SECONDS = 30.0
ROUND_TRIP_BYTES = 1 << 20
"""Read or written at once: so the time limit is one of Redis, and not one of how long a prompt is."""


class FarTier:
    """Used from one event loop; `holds`, `lets_through` and `problem` may be asked from any thread."""

    def __init__(self, redis: RedisTier, metrics: KVMetrics, clock: Callable[[], float]) -> None:
        self._redis, self._metrics, self._clock = redis, metrics, clock
        self._config: KVReuseConfig | None = None
        self._stored = StoredNames()
        self._reads = Gate(
            "Redis isn't read", partial(redis.ping, TRIAL_SECONDS), metrics.fault, self._reads_changed, clock
        )
        self._writes = Gate(
            "Redis isn't written to", partial(redis.try_write, TRIAL_SECONDS), metrics.fault, lambda _: None, clock
        )

    @property
    def problem(self) -> str:
        return self._reads.problem or self._writes.problem

    @property
    def is_used(self) -> bool:
        return self._config is not None and self._config.store is Store.REDIS

    @property
    def lets_through(self) -> bool:
        """Whether lookups reach it."""
        return self._reads.lets_through

    def holds(self, name: bytes) -> bool:
        """As far as this pod knows."""
        return self._stored.holds(name, self._clock())

    async def follow(self, config: KVReuseConfig | None) -> None:
        self._config = config
        self._stored.configure(config.ttl_seconds if config else 0.0)
        if self.is_used:
            self._reads.watch()
            self._writes.watch()
        else:
            self._reads.stop()
            self._writes.stop()
            self._stored.clear()
            await self._redis.close()

    async def get(self, salt: str, names: Sequence[bytes], size: int) -> dict[bytes, bytes] | None:
        """Those of the blocks that Redis has; None if it can't be asked."""
        values = await self._reads.run(lambda: self._redis.get(salt, names, size, LOOKUP_SECONDS))
        if values is None:
            return None
        there = {name: value for name, value in zip(names, values, strict=True) if value}
        self.forget(name for name in names if name not in there)
        self._metrics.bytes(series.READ, sum(map(len, there.values())))
        return there

    async def recall(self, salt: str, conversation: str, most: int) -> Sequence[bytes]:
        """Names of the blocks that a conversation had last; none where Redis can't be asked."""
        names = await self._reads.run(lambda: self._redis.recall(salt, conversation, most, LOOKUP_SECONDS))
        return names or ()

    def forget(self, names: Iterable[bytes]) -> None:
        """They aren't there, or no good: whoever computes them next will keep them again."""
        self._stored.forget(names)

    def seen(self, names: Iterable[bytes]) -> None:
        """They came from there."""
        self._stored.seen(names, self._clock())

    async def remember(self, kept: Blocks, count: int, conversation: str) -> None:
        """What a conversation is made of."""
        config, names = self._config, kept.names[:count]
        if config is not None:
            await self._writes.run(
                lambda: self._redis.remember(kept.salt, conversation, names, config.ttl_seconds, WRITE_SECONDS)
            )

    async def renew(self, used: Blocks, count: int) -> list[bytes]:
        """The first blocks were used: they stay for another TTL. Those of them that Redis has lost meanwhile."""
        config, now = self._config, self._clock()
        if config is None or not self._writes.lets_through:
            return []
        names = self._stored.due(used.names[:count], now)
        size = used.shape.value_bytes
        if not names:
            return []
        lost = await self._writes.run(
            lambda: self._redis.renew(used.salt, names, size, config.ttl_seconds, WRITE_SECONDS)
        )
        if lost is None:
            return []
        self._stored.renewed(set(names) - set(lost), now)
        return list(lost)

    async def write(self, kept: Blocks, values: dict[bytes, bytes]) -> None:
        """Keep the values of some of these blocks."""
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

    async def erase(self, salt: str) -> tuple[set[bytes], str]:
        """Forget all of a tenant; which blocks that were, and why some may be left."""
        if not self._redis.is_given or not (self._config is None or self.is_used):
            return set(), ""
        try:
            if self._reads.problem:
                raise RedisFault("unused", self._reads.problem)  # nobody waits for what is known not to answer
            return set(await self._redis.erase(salt, ERASE_SECONDS)), ""
        except RedisFault as fault:
            self._metrics.fault(fault.reason)
            return set(), f"blocks may be left in Redis until their time is over: {fault}"

    def _reads_changed(self, is_up: bool) -> None:
        self._metrics.redis_up(is_up)
        if not is_up:
            self._stored.clear()  # nobody knows what it will hold when it is back


def _batches(values: dict[bytes, bytes], size: int) -> Iterator[dict[bytes, bytes]]:
    items = list(values.items())
    for begin in range(0, len(items), size):
        yield dict(items[begin : begin + size])
