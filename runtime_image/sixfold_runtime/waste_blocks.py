"""Which beginnings of prompts were computed before, so that computing them again can be counted. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

MOST_BLOCKS = 50_000
"""Some 10 MB of names: with blocks of 32 tokens, 1.6 million tokens."""


class SeenBlocks:
    """Names of blocks (`modes.kv_reuse.chain`), the latest used: what a cache of that size would hold."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._tenants: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tenants)

    def leading(self, names: Iterable[bytes]) -> int:
        """How many of a prompt's first blocks were seen."""
        found = 0
        for name in names:
            if name not in self._tenants:
                break
            self._tenants.move_to_end(name)
            found += 1
        return found

    def remember(self, names: Iterable[bytes], tenant: str) -> None:
        for name in names:
            self._tenants[name] = tenant
            self._tenants.move_to_end(name)
        while len(self._tenants) > self._most_blocks:
            self._tenants.popitem(last=False)

    def forget(self, tenant: str) -> None:
        """All that was seen of a tenant."""
        self._tenants = OrderedDict((name, whose) for name, whose in self._tenants.items() if whose != tenant)
