"""spec.generation.kvCacheReuse: keys and values of a conversation so far, kept and never computed twice."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from sixfold_api.base import ApiModel, Rule
from sixfold_api.pods import SecretKeyRef
from sixfold_api.scalars import Duration, Quantity, Unquoted, duration_seconds

DEFAULT_TTL = "1h"
_DAY_SECONDS = 86400.0


class KVStore(StrEnum):
    MEMORY = "Memory"
    REDIS = "Redis"


class RedisSpec(ApiModel):
    """The Redis that engine pods share."""

    url_secret_ref: SecretKeyRef
    """Where its address is, with user and password: redis://, rediss:// (TLS), or redis+sentinel:// and
    redis+cluster:// (rediss+... with TLS) with several hosts, divided by commas."""
    ca_secret_ref: SecretKeyRef | None = None
    """Certificate of the authority that signed the server's; absent means those that the image trusts."""


class KVCacheReuseSpec(ApiModel):
    """Keys and values of prompts and answers in 8 bits, found again by what the tokens are. On from level 3."""

    store: KVStore = KVStore.MEMORY
    """Memory: each engine pod keeps its own. Redis: all pods share them, with a pod's memory in front."""
    redis: RedisSpec | None = None
    """Only for store: Redis."""
    ttl: Duration = DEFAULT_TTL
    """How long a block stays after its last use."""
    max_size: Quantity = "4Gi"
    """Most bytes that the policy holds in Redis; those not used for longest go first."""
    memory_size: Quantity = "256Mi"
    """Most bytes that an engine pod holds in its own memory."""
    block_tokens: Annotated[int, Field(ge=8, le=512), Unquoted] = 32
    """Tokens of a block: only whole blocks are kept."""
    min_prompt_tokens: Annotated[int, Field(ge=1, le=1_000_000), Unquoted] | None = None
    """Prompts that are shorter aren't looked up; absent means as long as engines find by measuring that it pays."""

    rules = (
        Rule(
            "has(self.redis) == (has(self.store) && self.store == 'Redis')",
            "redis is needed for store: Redis, and only there",
            lambda k: (k.redis is not None) == (k.store is KVStore.REDIS),
        ),
        Rule(
            "!has(self.ttl) || (duration(self.ttl) >= duration('1s') && duration(self.ttl) <= duration('720h'))",
            "ttl must be between 1s and 720h",
            lambda k: 1.0 <= duration_seconds(k.ttl) <= 30 * _DAY_SECONDS,
        ),
    )
