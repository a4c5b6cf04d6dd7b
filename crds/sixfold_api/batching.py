"""spec.batching: how gateways put requests together by length."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sixfold_api.base import ApiModel, Rule
from sixfold_api.scalars import Duration, Unquoted, duration_seconds

SHORT_TOKENS, LONG_TOKENS = 100, 500
"""A request of fewer tokens waits for `shortWait`, one of more for `longWait`, those between for `maxWait`."""


class BatchingSpec(ApiModel):
    """Batches by length of prompts and of texts to classify, on from level 3. An idle engine gets work at once."""

    max_batch_tokens: Annotated[int, Field(ge=16, le=1_000_000), Unquoted] = 1024
    """Most tokens of a batch when all of it is padded to its longest request. A longer request goes alone."""
    short_wait: Duration = "10ms"
    """How long a request of less than 100 tokens waits for company while engines are busy."""
    long_wait: Duration = "5ms"
    """The same, of more than 500 tokens."""
    max_wait: Duration = "15ms"
    """The same, between them. No request that an engine has room for waits longer."""
    max_queued_requests: Annotated[int, Field(ge=1, le=100_000), Unquoted] = 1000
    """Requests that may wait in one gateway; more are told to come again."""

    rules = (
        Rule(
            "duration(has(self.maxWait) ? self.maxWait : '15ms') <= duration('1s')"
            " && duration(has(self.shortWait) ? self.shortWait : '10ms')"
            " <= duration(has(self.maxWait) ? self.maxWait : '15ms')"
            " && duration(has(self.longWait) ? self.longWait : '5ms')"
            " <= duration(has(self.maxWait) ? self.maxWait : '15ms')",
            "shortWait and longWait may be at most maxWait, and maxWait at most 1s",
            lambda b: (
                max(duration_seconds(b.short_wait), duration_seconds(b.long_wait))
                <= duration_seconds(b.max_wait)
                <= 1.0
            ),
        ),
    )
