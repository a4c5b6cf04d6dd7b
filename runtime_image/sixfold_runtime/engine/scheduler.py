"""Which requests compute in the next step. Pure: no torch, no clock, no I/O.

First come, first served. A step decodes every running sequence by one token and prefills at most `prefill_tokens`
of waiting prompts: either a group of whole prompts, padded once to the longest of them, or a chunk of one long
prompt. So running streams go on whatever arrives, and a long prompt is never overtaken for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Limits:
    """What a model's scheduler may take."""

    max_running: int = 32
    max_waiting: int = 256
    prefill_tokens: int = 256
    """Most tokens, padding included, that one step prefills."""
    kv_tokens: int = 1 << 62
    """Most tokens, of all rows at their final length and padding included, that the KV cache holds."""


@dataclass(frozen=True)
class Entry(Generic[Key]):
    """A request as the scheduler sees it."""

    key: Key
    prompt_tokens: int
    """That have to be computed: fewer than the prompt has where the keys and values of its beginning are there."""
    total_tokens: int
    """The whole prompt and the most that may be generated."""


@dataclass(frozen=True)
class Prefill(Generic[Key]):
    """Tokens [start, start + counts[i]) of those of each prompt that have to be computed, in one forward."""

    keys: tuple[Key, ...]
    start: int
    counts: tuple[int, ...]
    finishes: bool
    """After this the prompts are complete and their first token can be sampled."""

    @property
    def padded_tokens(self) -> int:
        return len(self.counts) * max(self.counts)


@dataclass(frozen=True)
class Plan(Generic[Key]):
    """What to compute in one step."""

    admitted: tuple[Key, ...] = ()
    """Requests that begin with this step."""
    prefill: Prefill[Key] | None = None
    decode: tuple[Key, ...] = ()
    """Sequences that get one more token, from oldest to youngest."""


class Scheduler(Generic[Key]):
    """The queue and the running set of one model."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._waiting: deque[Entry[Key]] = deque()
        self._group: list[Entry[Key]] = []
        self._group_done_tokens = 0
        self._decoding: dict[Key, Entry[Key]] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._group) + len(self._decoding)

    @property
    def is_prefilling(self) -> bool:
        """Whether a prompt is prefilled in part."""
        return bool(self._group)

    def can_admit(self) -> bool:
        """Whether the waiting queue has room."""
        return len(self._waiting) < self.limits.max_waiting

    def admit(self, entry: Entry[Key]) -> None:
        """Queue a request. The caller has asked can_admit and keeps keys unique and totals within kv_tokens."""
        self._waiting.append(entry)

    def amend(self, entry: Entry[Key]) -> None:
        """Another entry for a request that waits; it keeps its place."""
        self._waiting = deque(entry if waiting.key == entry.key else waiting for waiting in self._waiting)

    def step(self) -> Plan[Key]:
        """Plan the next step and count it as done; a forward that fails is followed by `cancel` of its keys."""
        decode = tuple(self._decoding)
        admitted = () if self._group else self._form_group()
        return Plan(admitted, self._prefill(), decode)

    def cancel(self, key: Key) -> None:
        """Forget a request, wherever it is: finished, failed or no longer wanted. An unknown key is ignored."""
        self._decoding.pop(key, None)
        self._group = [entry for entry in self._group if entry.key != key]
        if any(entry.key == key for entry in self._waiting):
            self._waiting = deque(entry for entry in self._waiting if entry.key != key)

    def withdraw(self) -> list[Key]:
        """Forget the requests that wait, and return them, oldest first."""
        keys = [entry.key for entry in self._waiting]
        self._waiting.clear()
        return keys

    def _form_group(self) -> tuple[Key, ...]:
        self._group_done_tokens = 0
        while self._waiting and self._fits(self._waiting[0]):
            self._group.append(self._waiting.popleft())
        return tuple(entry.key for entry in self._group)

    def _fits(self, entry: Entry[Key]) -> bool:
        """Whether a request may start now: a row, its KV at full length, and its share of the step's prefill."""
        rows = self.running + 1
        if rows > self.limits.max_running:
            return False
        longest = max(running.total_tokens for running in (entry, *self._group, *self._decoding.values()))
        # The cache allocates rows by powers of two.
        if rows > 1 and (1 << (rows - 1).bit_length()) * longest > self.limits.kv_tokens:
            return False
        prompts = [member.prompt_tokens for member in (*self._group, entry)]
        return not self._group or len(prompts) * max(prompts) <= self.limits.prefill_tokens

    def _prefill(self) -> Prefill[Key] | None:
        if not self._group:
            return None
        start = self._group_done_tokens
        counts = tuple(min(entry.prompt_tokens - start, self.limits.prefill_tokens) for entry in self._group)
        self._group_done_tokens += max(counts)
        keys = tuple(entry.key for entry in self._group)
        finishes = self._group_done_tokens >= max(entry.prompt_tokens for entry in self._group)
        if finishes:
            self._decoding.update((entry.key, entry) for entry in self._group)
            self._group = []
        return Prefill(keys, start, counts, finishes)
