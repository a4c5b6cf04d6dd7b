"""Which blocks are meant, and which of them are known to be in Redis."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from sixfold_runtime.engine.kv_codec import BlockShape

_MOST_NAMES = 50_000
_RENEW_SHARE = 0.1
"""Of the TTL: what was used so shortly ago isn't renewed again."""


@dataclass(frozen=True)
class Blocks:
    """Successive blocks of a prompt from its first token on."""

    salt: str
    names: Sequence[bytes]
    shape: BlockShape
    token_ids: Sequence[int]


@dataclass
class Found:
    """The first blocks of a prompt.

    Attributes:
        blocks: how many.
        near: how many of them came from this pod's memory.
        fetched: their values, b"" of those.
        keys, values: [layers, kv_heads, tokens, head_dim].
    """

    blocks: int = 0
    near: int = 0
    fetched: list[bytes] = field(default_factory=list)
    keys: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    values: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class StoredNames:
    """When blocks were last written to Redis, or renewed there, as far as this pod knows: each that it knows of saves
    a copy. Changed from one thread; `holds` may be asked from any."""

    def __init__(self) -> None:
        self._seconds: OrderedDict[bytes, float] = OrderedDict()
        self._ttl_seconds = 0.0

    def configure(self, ttl_seconds: float) -> None:
        self._ttl_seconds = ttl_seconds

    def holds(self, name: bytes, now_seconds: float) -> bool:
        seconds = self._seconds.get(name)
        return seconds is not None and seconds + self._ttl_seconds > now_seconds

    def renewed(self, names: Iterable[bytes], now_seconds: float) -> None:
        for name in names:
            self._seconds[name] = now_seconds
            self._seconds.move_to_end(name)
        while len(self._seconds) > _MOST_NAMES:
            self._seconds.popitem(last=False)

    def seen(self, names: Iterable[bytes], now_seconds: float) -> None:
        """They are there; nobody knows for how long."""
        self.renewed([name for name in names if name not in self._seconds], self._due(now_seconds))

    def due(self, names: Iterable[bytes], now_seconds: float) -> list[bytes]:
        """Those that have to be renewed when they are used now."""
        due = self._due(now_seconds)
        return [name for name in names if self._seconds.get(name, due) <= due]

    def forget(self, names: Iterable[bytes]) -> None:
        for name in names:
            self._seconds.pop(name, None)

    def clear(self) -> None:
        self._seconds.clear()

    def _due(self, now_seconds: float) -> float:
        return now_seconds - self._ttl_seconds * _RENEW_SHARE
