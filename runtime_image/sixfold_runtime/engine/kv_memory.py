"""Blocks of keys and values in the engine's own memory: bounded bytes, the least recently used ones go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class _Entry(NamedTuple):
    value: bytes
    salt: str
    expires_seconds: float


class MemoryTier:
    """Changed from one thread; `holds` and `size_bytes` may be asked from any."""

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        """The least recently used one is first, which is the next to expire as well, or nearly so."""
        self._max_bytes, self._ttl_seconds = 0, 0.0
        self.size_bytes = 0

    def configure(self, max_bytes: int, ttl_seconds: float) -> None:
        """New bounds; what doesn't fit any more goes now."""
        self._max_bytes, self._ttl_seconds = max_bytes, ttl_seconds
        self._shrink(max_bytes)

    def get(self, name: bytes, now_seconds: float) -> bytes | None:
        """A block's value; that alone is no use of it."""
        return self._entries[name].value if self.holds(name, now_seconds) else None

    def use(self, names: Sequence[bytes], now_seconds: float) -> None:
        """These blocks, one behind the other, stay for another TTL. A later one is no good without those before it:
        so it goes earlier."""
        for name in reversed(names):
            if (entry := self._entries.get(name)) is not None:
                self._entries[name] = entry._replace(expires_seconds=now_seconds + self._ttl_seconds)
                self._entries.move_to_end(name)

    def put(self, name: bytes, value: bytes, salt: str, now_seconds: float) -> None:
        """Keep a block of a tenant; one that is larger than all there may be isn't."""
        self.discard(name)
        self._drop_expired(now_seconds)
        if len(value) <= self._max_bytes:
            self._shrink(self._max_bytes - len(value))
            self._entries[name] = _Entry(value, salt, now_seconds + self._ttl_seconds)
            self.size_bytes += len(value)

    def discard(self, name: bytes) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self.size_bytes -= len(entry.value)

    def erase(self, salt: str) -> set[bytes]:
        """Forget all blocks of a tenant; their names."""
        names = {name for name, entry in self._entries.items() if entry.salt == salt}
        for name in names:
            self.discard(name)
        return names

    def holds(self, name: bytes, now_seconds: float) -> bool:
        """Whether it is there."""
        entry = self._entries.get(name)
        return entry is not None and entry.expires_seconds > now_seconds

    def _drop_expired(self, now_seconds: float) -> None:
        while self._entries:
            name = next(iter(self._entries))
            if self._entries[name].expires_seconds > now_seconds:
                return
            self.discard(name)

    def _shrink(self, max_bytes: int) -> None:
        while self.size_bytes > max_bytes:
            self.discard(next(iter(self._entries)))
