"""Blocks in Redis: single, behind Sentinel or as a cluster. Every fault leaves here as a RedisFault.

    sixfold:kv:<policy>:<salt>:<block's name>        value of a block
    sixfold:kv:<policy>:<salt>:c:<hash>              names of a conversation's blocks, a hint
    sixfold:kv:{<policy>}:index                      sorted set: expiry of `salt:name:bytes`, for the byte budget
    sixfold:kv:{<policy>}:bytes                      what the index adds up to

An ACL user needs the commands used here (+@read +@write +@connection +@keyspace -@dangerous and, in a cluster,
+cluster|slots) for the keys sixfold:kv:*. There are no scripts: they would need more.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import RedisCluster
from redis.exceptions import ResponseError

from sixfold_runtime.engine.kv_address import AddressError, RedisAddress, connect, disconnect, read_address
from sixfold_runtime.engine.kv_fault import RedisFault, all_done, as_fault, is_foreign, strings

Client = Any
"""Redis or RedisCluster: what their methods say that they return is true of neither."""
_ADDRESS_SECONDS = 5.0
"""How old the knowledge of the mounted folder may be while everything works."""
_SCAN_COUNT = 1000
_TRIM_COUNT = 256
_NAME_BYTES = 32


class RedisTier:
    """Used from one event loop. Every method raises RedisFault, and nothing else, when Redis doesn't do its part."""

    def __init__(self, directory: Path | None, policy: str, clock: Callable[[], float] = time.monotonic) -> None:
        """policy: a word without braces and colons that no other policy has."""
        self._directory, self._clock = directory, clock
        self._prefix = f"sixfold:kv:{policy}"
        self._index, self._total = f"sixfold:kv:{{{policy}}}:index", f"sixfold:kv:{{{policy}}}:bytes"
        self._address: RedisAddress | None = None
        self._client: Client | None = None
        self._checked_seconds = float("-inf")

    @property
    def is_given(self) -> bool:
        """Whether there is a folder that may hold an address."""
        return self._directory is not None

    async def get(self, salt: str, names: Sequence[bytes], value_bytes: int, limit_seconds: float) -> list[bytes]:
        """The values of blocks, b"" where there is none. One round trip; never much more than `value_bytes` a block.

        Whatever lies there that is no string is b"" too.
        """
        async with self._connected(limit_seconds) as client:
            pipeline = client.pipeline(transaction=False)
            for name in names:
                pipeline.getrange(self._key(salt, name), 0, value_bytes)  # one byte more than there should be
            values = await pipeline.execute(raise_on_error=False)
        return strings(values)

    async def put(
        self, salt: str, blocks: Mapping[bytes, bytes], ttl_seconds: float, max_bytes: int, limit_seconds: float
    ) -> int:
        """Keep blocks, all of the same size; returns the bytes that had to go for them."""
        size = len(next(iter(blocks.values())))
        async with self._connected(limit_seconds) as client:
            ttl_milliseconds = int(ttl_seconds * 1000)
            pipeline = client.pipeline(transaction=False)
            for name, value in blocks.items():
                pipeline.set(self._key(salt, name), value, px=ttl_milliseconds)
            all_done(await pipeline.execute(raise_on_error=False))
            # Now and not before: what isn't there must not count. What isn't counted goes when its time is over.
            async with self._books(client):
                added = await client.zadd(self._index, _scores(salt, list(blocks), size, ttl_seconds))
                total = await self._count(client, added, size)
                await self._expire_books(client, ttl_milliseconds)
                return await self._evict(client, total - max_bytes, size)
        return 0

    async def renew(
        self, salt: str, names: Sequence[bytes], value_bytes: int, ttl_seconds: float, limit_seconds: float
    ) -> list[bytes]:
        """Let blocks stay for another TTL; returns the names of those that aren't there any more."""
        async with self._connected(limit_seconds) as client:
            pipeline = client.pipeline(transaction=False)
            for name in names:
                pipeline.pexpire(self._key(salt, name), int(ttl_seconds * 1000))
            there = all_done(await pipeline.execute(raise_on_error=False))
            kept = [name for name, is_there in zip(names, there, strict=True) if is_there]
            if kept:
                async with self._books(client):
                    await client.zadd(self._index, _scores(salt, kept, value_bytes, ttl_seconds), xx=True)
        return [name for name, is_there in zip(names, there, strict=True) if not is_there]

    async def remember(
        self, salt: str, conversation: str, names: Sequence[bytes], ttl_seconds: float, limit_seconds: float
    ) -> None:
        """Which blocks a conversation had last."""
        async with self._connected(limit_seconds) as client:
            await client.set(self._conversation_key(salt, conversation), b"".join(names), px=int(ttl_seconds * 1000))

    async def recall(self, salt: str, conversation: str, most: int, limit_seconds: float) -> list[bytes]:
        """The names that `remember` was given, at most so many, which is at least one; a hint and no more."""
        async with self._connected(limit_seconds) as client:
            pipeline = client.pipeline(transaction=False)
            pipeline.getrange(self._conversation_key(salt, conversation), 0, most * _NAME_BYTES - 1)
            (found,) = strings(await pipeline.execute(raise_on_error=False))
        whole = len(found) - len(found) % _NAME_BYTES
        return [found[begin : begin + _NAME_BYTES] for begin in range(0, whole, _NAME_BYTES)]

    async def erase(self, salt: str, limit_seconds: float) -> set[bytes]:
        """Remove all that is a tenant's, found by its keys and not by the index, which may have been evicted.

        Returns the names of the blocks.
        """
        names: set[bytes] = set()
        prefix = f"{self._prefix}:{salt}:"
        async with self._connected(limit_seconds) as client:
            batch: list[bytes] = []
            async for key in _scan(client, f"{prefix}*"):
                batch.append(key)
                if len(batch) == _SCAN_COUNT:
                    names |= await _unlink(client, batch, len(prefix))
                    batch = []
            names |= await _unlink(client, batch, len(prefix))
            async with self._books(client):
                members = [member async for member, _ in client.zscan_iter(self._index, f"{salt}:*", _SCAN_COUNT)]
                await self._discount(client, members)
        return names

    async def ping(self, limit_seconds: float) -> None:
        """Returns if it can be used: in a cluster, all of its masters."""
        async with self._connected(limit_seconds) as client:
            if isinstance(client, RedisCluster):
                await client.initialize()
                await client.ping(target_nodes=RedisCluster.PRIMARIES)
            # Also where pings need no permission: that keys may be read.
            await client.exists(self._total)

    async def try_write(self, limit_seconds: float) -> None:
        """Returns if something can be written."""
        async with self._connected(limit_seconds) as client:
            await client.set(f"{self._prefix}:trial", b"", px=1000)

    async def close(self) -> None:
        """Close all connections; the next use makes new ones."""
        client, self._client, self._address = self._client, None, None
        if client is not None:
            try:
                async with asyncio.timeout(1.0):
                    await disconnect(client)
            except Exception:  # it is of no use any more, whatever it says
                return

    # -- connection

    @asynccontextmanager
    async def _connected(self, limit_seconds: float) -> AsyncIterator[Client]:
        try:
            async with asyncio.timeout(limit_seconds):
                yield await self._current()
        except RedisFault:
            self._checked_seconds = float("-inf")
            raise
        except AddressError as error:
            raise RedisFault("address", str(error)) from None
        except Exception as error:
            self._checked_seconds = float("-inf")
            raise as_fault(error) from error

    async def _current(self) -> Client:
        """The client for what the folder says."""
        if self._client is None or self._clock() - self._checked_seconds > _ADDRESS_SECONDS:
            address = read_address(self._directory)
            self._checked_seconds = self._clock()
            if self._client is None or address != self._address:
                await self.close()
                self._client, self._address = connect(address), address
        return self._client

    # -- books

    @asynccontextmanager
    async def _books(self, client: Client) -> AsyncIterator[None]:
        """Where something else lies in the place of index or count, both begin anew."""
        try:
            yield
        except ResponseError as error:
            if not is_foreign(error):
                raise
            await client.unlink(self._index, self._total)

    async def _count(self, client: Client, added: int, size: int) -> int:
        """Add new blocks to the count; the count."""
        total = int(await client.incrby(self._total, added * size))
        if total == added * size and int(await client.zcard(self._index)) > added:
            # The count had been evicted, and the index hadn't.
            total = sum([_size(member) async for member, _ in client.zscan_iter(self._index, count=_SCAN_COUNT)])
            await client.set(self._total, total)
        expired = await client.zrangebyscore(self._index, "-inf", time.time(), 0, _TRIM_COUNT)
        return total - await self._discount(client, expired)

    async def _discount(self, client: Client, members: Sequence[bytes]) -> int:
        """Take members out of index and count; the bytes of those that nobody else has taken out meanwhile."""
        if not members:
            return 0
        pipeline = client.pipeline(transaction=False)
        for member in members:
            pipeline.zrem(self._index, member)
        removed = all_done(await pipeline.execute(raise_on_error=False))
        size = sum(_size(member) for member, count in zip(members, removed, strict=True) if count)
        await client.decrby(self._total, size)
        return size

    async def _evict(self, client: Client, excess_bytes: int, usual_bytes: int) -> int:
        """Remove those that would expire first, which are those that weren't used for longest."""
        evicted = 0
        while evicted < excess_bytes:
            count = -(-(excess_bytes - evicted) // usual_bytes)
            popped = [member for member, _ in await client.zpopmin(self._index, min(count, _SCAN_COUNT))]
            if not popped:  # the index had been evicted, and the count hadn't
                await client.delete(self._total)
                break
            await _unlink(client, [f"{self._prefix}:".encode() + member.rpartition(b":")[0] for member in popped])
            size = sum(map(_size, popped))
            await client.decrby(self._total, size)
            evicted += size
        return evicted

    async def _expire_books(self, client: Client, ttl_milliseconds: int) -> None:
        """So that nothing is left of a policy that is gone, long after its blocks."""
        pipeline = client.pipeline(transaction=False)
        for key in (self._index, self._total):
            pipeline.pexpire(key, 2 * ttl_milliseconds)
        await pipeline.execute()

    def _key(self, salt: str, name: bytes) -> str:
        return f"{self._prefix}:{salt}:{name.hex()}"

    def _conversation_key(self, salt: str, conversation: str) -> str:
        return f"{self._prefix}:{salt}:c:{hashlib.sha256(conversation.encode()).hexdigest()[:32]}"


async def _scan(client: Client, pattern: str) -> AsyncIterator[bytes]:
    async for key in client.scan_iter(match=pattern, count=_SCAN_COUNT):
        yield key


async def _unlink(client: Client, keys: Sequence[bytes], prefix_bytes: int = 0) -> set[bytes]:
    """Remove keys; the names of the blocks among them, if a name begins after so many bytes."""
    if not keys:
        return set()
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.execute_command("UNLINK", key)  # each by itself: those of a cluster lie on different nodes
    removed = all_done(await pipeline.execute(raise_on_error=False))
    tails = [key[prefix_bytes:].decode("ascii", "replace") for key, count in zip(keys, removed, strict=True) if count]
    return {bytes.fromhex(tail) for tail in tails if len(tail) == 2 * _NAME_BYTES and _is_hex(tail)}


def _is_hex(text: str) -> bool:
    return all(character in "0123456789abcdef" for character in text)


def _member(salt: str, name: bytes, size: int) -> str:
    return f"{salt}:{name.hex()}:{size}"


def _scores(salt: str, names: Sequence[bytes], size: int, ttl_seconds: float) -> dict[str, float]:
    """Expiries of successive blocks; a later one is no good without those before it, so it goes a little earlier."""
    expiry = time.time() + ttl_seconds
    return {_member(salt, name, size): expiry - place / 1000 for place, name in enumerate(names)}


def _size(member: bytes) -> int:
    digits = member.rpartition(b":")[2]
    return int(digits) if digits.isdigit() else 0
