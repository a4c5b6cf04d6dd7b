"""The rate limit of one gateway: a token bucket for each tenant. Pure; the clock is an argument.

What holds across replicas: each gateway counts for itself and gets an equal share of the policy's rate and burst.
So a key never gets more than the policy's rate over all gateways, plus, at once, its burst (rounded up to one
request a gateway). A key whose connections all land on one of n gateways gets 1/n of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sixfold_api.runtime_config import RateLimitConfig


@dataclass(frozen=True)
class Bucket:
    """`tokens` requests may be sent at `updated_seconds`."""

    tokens: float
    updated_seconds: float


def take(bucket: Bucket | None, limit: RateLimitConfig, now_seconds: float) -> tuple[Bucket, float]:
    """Take one request out of `bucket` (None: a full one).

    Returns the bucket and the seconds to wait; 0 means that the request may pass, more that nothing was taken.
    """
    tokens = float(limit.burst)
    if bucket is not None:
        elapsed_seconds = max(0.0, now_seconds - bucket.updated_seconds)
        tokens = min(tokens, bucket.tokens + elapsed_seconds * limit.requests_per_second)
    if tokens >= 1.0:
        return Bucket(tokens - 1.0, now_seconds), 0.0
    return Bucket(tokens, now_seconds), (1.0 - tokens) / limit.requests_per_second


@dataclass
class RateLimiter:
    """The buckets of all tenants; tenants are configured, so their number is bounded."""

    _buckets: dict[str, Bucket] = field(default_factory=dict)

    def wait_seconds(self, tenant: str, limit: RateLimitConfig | None, now_seconds: float) -> float:
        """0 lets the request pass and counts it; else how long until one would pass."""
        if limit is None:
            self._buckets.clear()
            return 0.0
        self._buckets[tenant], wait = take(self._buckets.get(tenant), limit, now_seconds)
        return wait
