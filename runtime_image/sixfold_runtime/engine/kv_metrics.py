"""Series of reused keys and values. No label value comes from a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_POLICY = ("namespace", "policy")
_SECONDS_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2.5, 5)

HIT_MEMORY, HIT_REDIS, MISS, SKIPPED, FAULT, CORRUPT = "hit_memory", "hit_redis", "miss", "skipped", "fault", "corrupt"
READ, WRITTEN, EVICTED, DROPPED = "read", "written", "evicted", "dropped"
LOOKUP, WRITE = "lookup", "write"


class KVSeries:
    """Registered once a process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.blocks = Counter(
            "sixfold_kv_blocks",
            "Whole blocks of prompts: found in this pod's memory or in Redis, missed, skipped because looking wouldn't "
            "have paid, not found because of a fault of Redis, or found and refused.",
            (*_POLICY, "result"),
            registry=registry,
        )
        self.bytes = Counter(
            "sixfold_kv_bytes",
            "Bytes of blocks: read from and written to Redis, evicted from it to keep the byte budget, and dropped "
            "because writing was too far behind.",
            (*_POLICY, "direction"),
            registry=registry,
        )
        self.seconds = Histogram(
            "sixfold_kv_seconds",
            "How long a lookup held its request up, and how long it took to keep the blocks of an answer.",
            (*_POLICY, "operation"),
            buckets=_SECONDS_BUCKETS,
            registry=registry,
        )
        self.faults = Counter(
            "sixfold_kv_faults",
            "Operations of Redis that failed, and values that were refused; each was a miss.",
            (*_POLICY, "reason"),
            registry=registry,
        )
        self.redis_up = Gauge(
            "sixfold_kv_redis_up", "1 while Redis is used, 0 while it isn't.", _POLICY, registry=registry
        )
        self.memory_bytes = Gauge(
            "sixfold_kv_memory_bytes", "Bytes of blocks in this pod's memory.", _POLICY, registry=registry
        )
        self.least_tokens = Gauge(
            "sixfold_kv_least_tokens", "Shorter prompts aren't looked up.", (*_POLICY, "variant"), registry=registry
        )


class KVMetrics:
    """Of one engine process."""

    def __init__(self, series: KVSeries, labels: Mapping[str, str]) -> None:
        """labels: namespace and policy."""
        self._series, self._labels = series, dict(labels)
        self.redis_up(False)

    def blocks(self, result: str, count: int) -> None:
        if count:
            self._series.blocks.labels(**self._labels, result=result).inc(count)

    def bytes(self, direction: str, count: int) -> None:
        if count:
            self._series.bytes.labels(**self._labels, direction=direction).inc(count)

    def seconds(self, operation: str, seconds: float) -> None:
        self._series.seconds.labels(**self._labels, operation=operation).observe(seconds)

    def fault(self, reason: str) -> None:
        self._series.faults.labels(**self._labels, reason=reason).inc()

    def redis_up(self, is_up: bool) -> None:
        self._series.redis_up.labels(**self._labels).set(is_up)

    def least_tokens(self, variant: str, tokens: int) -> None:
        self._series.least_tokens.labels(**self._labels, variant=variant).set(tokens)

    def watch_memory(self, read_bytes: Callable[[], int]) -> None:
        self._series.memory_bytes.labels(**self._labels).set_function(read_bytes)
