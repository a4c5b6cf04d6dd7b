"""Which keys and values may be used again, under which names, and from which length it pays. Pure: no torch, no I/O.

A prompt is cut into blocks of a fixed number of tokens. A block's name is the SHA-256 of its parent's name and its own
token ids, as in vLLM's automatic prefix caching, so that equal names mean equal prefixes. The first parent is the seed
of a `Scope`: everything else that decides what the keys and values are, and whose they are.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

SCHEME = 1
"""Grows whenever names or values are made in another way: what older versions wrote isn't found any more."""
NEVER_TOKENS = 1_000_000
"""Longer than any prompt: reuse doesn't pay."""
_MEMORY = 1 / 16
"""Weight of a new measurement."""
_PROBE_EVERY = 32


@dataclass(frozen=True)
class Scope:
    """Keys and values are shared within one scope and never beyond it."""

    weights_digest: str
    """Of the weights that compute them; not empty: a name alone would outlive a change of what it names."""
    variant: str
    salt: str
    """Of the tenant, from `tenant_salt`."""
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    """Of keys and values while computing, such as float32 or bfloat16."""
    block_tokens: int
    task: str = ""
    task_digest: str = ""
    """Of the task slice's file."""

    def __post_init__(self) -> None:
        if not self.weights_digest or bool(self.task) != bool(self.task_digest):
            raise ValueError("keys and values can't be told apart without the digests of weights and of the task slice")

    @cached_property
    def seed(self) -> bytes:
        """32 bytes; differs whenever a field does."""
        return _digest(SCHEME, *(getattr(self, one.name) for one in fields(self)))


def tenant_salt(namespace: str, policy: str, tenant: str) -> str:
    """32 hex digits. `tenant` is the name of the API key's entry, so that a new key keeps what was there."""
    return _digest(namespace, policy, tenant).hex()[:32]


def chain(scope: Scope, token_ids: Sequence[int], block_tokens: int | None = None) -> list[bytes]:
    """The names, 32 bytes each, of the whole blocks of a token sequence.

    Args:
        block_tokens: by default the scope's.
    """
    step = 4 * (block_tokens or scope.block_tokens)
    content = array("I", token_ids).tobytes()
    names, parent = [], scope.seed
    for begin in range(0, len(content) - step + 1, step):
        parent = hashlib.sha256(parent + content[begin : begin + step]).digest()
        names.append(parent)
    return names


def _digest(*values: object) -> bytes:
    # Lengths in front: ("a", "bc") and ("ab", "c") are different things.
    texts = [str(value).encode() for value in values]
    return hashlib.sha256(b"".join(len(text).to_bytes(4, "big") + text for text in texts)).digest()


@dataclass
class _Line:
    """seconds = fixed + slope * tokens, by least squares with the oldest measurements fading."""

    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        keep = 1 - _MEMORY
        self.weight = self.weight * keep + 1
        self.tokens = self.tokens * keep + tokens
        self.seconds = self.seconds * keep + seconds
        self.squares = self.squares * keep + tokens * tokens
        self.products = self.products * keep + tokens * seconds

    def fit(self) -> tuple[float, float]:
        """Fixed seconds and seconds a token, neither below 0; of one length only, all of it is fixed."""
        mean_tokens, mean_seconds = self.tokens / self.weight, self.seconds / self.weight
        variance = self.squares / self.weight - mean_tokens**2
        if variance <= 1e-6 * max(1.0, mean_tokens**2):
            return mean_seconds, 0.0
        slope = max(0.0, (self.products / self.weight - mean_tokens * mean_seconds) / variance)
        fixed = mean_seconds - slope * mean_tokens
        return (fixed, slope) if fixed >= 0 else (0.0, mean_seconds / mean_tokens)


@dataclass
class ReuseCosts:
    """From which length on it takes less time to find keys and values than to compute them, by measuring both."""

    _prefill_token_seconds: float | None = None
    _lookup: _Line = field(default_factory=_Line)
    _skipped: int = 0

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """So many tokens of one prompt were computed in this time. What took no time tells nothing."""
        if tokens > 0 and seconds > 0:
            token_seconds = seconds / tokens
            before = self._prefill_token_seconds
            self._prefill_token_seconds = (
                token_seconds if before is None else before + _MEMORY * (token_seconds - before)
            )

    def observe_lookup(self, found_tokens: int, seconds: float) -> None:
        """Finding so many tokens, 0 among them, held a request up for this time."""
        if seconds > 0:
            self._lookup.add(found_tokens, seconds)

    def least_tokens(self, block_tokens: int) -> int:
        """The shortest prompt for which it pays if all its whole blocks are found. Never less than what has a block:
        the last token is always computed. Before both were measured just that."""
        found = block_tokens
        if self._prefill_token_seconds is not None and self._lookup.weight:
            fixed, slope = self._lookup.fit()
            gain = self._prefill_token_seconds - slope
            if gain * NEVER_TOKENS <= fixed:
                return NEVER_TOKENS
            found = max(block_tokens, math.ceil(fixed / gain))
        return min(NEVER_TOKENS, -(-found // block_tokens) * block_tokens + 1)

    def wants(self, prompt_tokens: int, block_tokens: int, min_prompt_tokens: int | None = None) -> bool:
        """Whether to look a prompt up. One in 32 of those for which it wouldn't pay is looked up all the same, because
        without measurements nobody would see that the store has become faster.

        Args:
            min_prompt_tokens: what somebody chose instead of the measured length.
        """
        if prompt_tokens <= block_tokens:
            return False
        if min_prompt_tokens is not None:
            return prompt_tokens >= min_prompt_tokens
        if prompt_tokens >= self.least_tokens(block_tokens):
            return True
        self._skipped = (self._skipped + 1) % _PROBE_EVERY
        return self._skipped == 0
