"""The token bucket over injected clocks."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from sixfold_api.runtime_config import RateLimitConfig
from sixfold_runtime.gateway.limits import Bucket, RateLimiter, take

# Through a function: hypothesis would also fill in the fields' wire names.
LIMITS = st.builds(
    lambda requests_per_second, burst: RateLimitConfig(requests_per_second=requests_per_second, burst=burst),
    requests_per_second=st.floats(0.01, 1000, allow_nan=False),
    burst=st.integers(1, 100),
)
PAUSES = st.lists(st.floats(0, 30, allow_nan=False), max_size=200)


@given(LIMITS, PAUSES)
def test_never_more_than_the_rate_and_the_burst(limit: RateLimitConfig, pauses: list[float]) -> None:
    bucket, now, passed = None, 0.0, 0
    for pause in pauses:
        now += pause
        bucket, wait = take(bucket, limit, now)
        passed += wait == 0
        assert 0 <= bucket.tokens <= limit.burst
    assert passed <= limit.burst + now * limit.requests_per_second + 1e-6 * len(pauses)


@given(LIMITS, PAUSES)
def test_waiting_as_told_is_enough_and_needed(limit: RateLimitConfig, pauses: list[float]) -> None:
    bucket, now = None, 0.0
    for pause in pauses:
        now += pause
        bucket, wait = take(bucket, limit, now)
        if wait > 0:
            assert take(bucket, limit, now + wait * 0.99)[1] > 0
            # One part in a thousand covers the rounding of large clocks.
            assert take(bucket, limit, now + wait * 1.001 + 1e-6)[1] == 0


@given(LIMITS)
def test_a_burst_passes_at_once_and_no_more(limit: RateLimitConfig) -> None:
    limiter = RateLimiter()
    waits = [limiter.wait_seconds("a", limit, 0.0) for _ in range(limit.burst + 1)]
    assert [wait == 0 for wait in waits] == [True] * limit.burst + [False]
    assert math.isclose(waits[-1], 1 / limit.requests_per_second)
    assert limiter.wait_seconds("b", limit, 0.0) == 0, "each tenant has a bucket of its own"


def test_a_clock_that_goes_back_gives_nothing_away() -> None:
    limit = RateLimitConfig(requests_per_second=1, burst=1)
    bucket, _ = take(None, limit, 100.0)
    assert take(bucket, limit, 50.0)[1] > 0


def test_a_lower_burst_takes_effect_at_once() -> None:
    bucket, wait = take(Bucket(50.0, 0.0), RateLimitConfig(requests_per_second=1, burst=2), 0.0)
    assert (bucket.tokens, wait) == (1.0, 0.0)


def test_without_a_limit_everything_passes_and_nothing_is_remembered() -> None:
    limiter = RateLimiter()
    limit = RateLimitConfig(requests_per_second=0.001, burst=1)
    assert limiter.wait_seconds("a", limit, 0.0) == 0
    assert limiter.wait_seconds("a", limit, 0.0) > 0
    assert limiter.wait_seconds("a", None, 0.0) == 0
    assert limiter.wait_seconds("a", limit, 0.0) == 0
