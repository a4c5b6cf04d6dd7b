"""API keys from a mounted Secret: each file is a tenant, each line in it a key of that tenant.

Two lines let an old and a new key work side by side while clients change over. Only hashes stay in memory, every
comparison takes the same time, and no key is ever logged.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def read_keys(directory: Path) -> dict[str, tuple[bytes, ...]]:
    """Tenant -> SHA-256 of each of its keys. A directory that can't be read holds no key."""
    keys: dict[str, tuple[bytes, ...]] = {}
    try:
        # A mounted Secret holds links to the files, and `..data` and its like, which are the kubelet's own.
        files = sorted(path for path in directory.iterdir() if not path.name.startswith("..") and path.is_file())
        for path in files:
            lines = (line.strip() for line in path.read_bytes().splitlines())
            keys[path.name] = tuple(_digest(line) for line in lines if line)
    except OSError as error:
        log.error("can't read the API keys in %s: %s", directory, error.strerror)
    return keys


class ApiKeys:
    """Who may call. Without a directory everybody may, as the tenant "".

    A configured directory that is missing, empty or unreadable lets nobody in.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._keys: dict[str, tuple[bytes, ...]] = {}
        self.reload()

    @property
    def is_open(self) -> bool:
        return self._directory is None

    def reload(self) -> None:
        """Read the directory; takes file I/O."""
        if self._directory is None:
            return
        keys = read_keys(self._directory)
        if keys != self._keys:
            without = [tenant for tenant, hashes in keys.items() if not hashes]
            log.info("API keys of %d tenants in use", len(keys) - len(without))
            if without:
                log.warning("tenants without a key in their file: %s", ", ".join(without))
            self._keys = keys

    @property
    def tenants(self) -> int | None:
        """Tenants with a key; None where everybody may call."""
        return None if self.is_open else sum(bool(hashes) for hashes in self._keys.values())

    def without_key(self, tenants: Iterable[str]) -> list[str]:
        """Those among `tenants` that nobody can be."""
        return [] if self.is_open else [tenant for tenant in tenants if not self._keys.get(tenant)]

    async def run(self) -> None:
        """Follow the directory until cancelled: a rotated Secret works without a restart."""
        while self._directory is not None:
            await asyncio.sleep(POLL_SECONDS)
            await asyncio.to_thread(self.reload)

    def tenant(self, authorization: str) -> str | None:
        """The tenant of an Authorization header `Bearer <key>`, or None."""
        if self.is_open:
            return ""
        scheme, _, key = authorization.partition(" ")
        digest = _digest(key.strip().encode("latin-1", "replace"))  # headers are decoded as Latin-1
        found: str | None = None
        for tenant, hashes in self._keys.items():
            for known in hashes:
                if hmac.compare_digest(known, digest):
                    found = tenant
        return found if scheme.lower() == "bearer" else None
