"""Blocks in Redis: single, behind Sentinel or as a cluster. Every fault leaves here as a RedisFault.

    sixfold:kv:<policy>:<salt>:<block's name>        value of a block
    sixfold:kv:<policy>:<salt>:c:<hash>              names of a conversation's blocks, a hint
    sixfold:kv:{<policy>}:index:<bytes>              for the byte budget: the expiry of each block of this size
    sixfold:kv:{<policy>}:sizes                      of which sizes there are blocks: nearly always one

The index of a size has no counter beside it: blocks times size is always right, whoever writes at the same time.

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
_MIXED_COUNT = 8
"""Evicted at once where there are blocks of several sizes, before it is asked again which is the oldest."""
_NAME_BYTES = 32


class RedisTier:
    """Used from one event loop. Every method raises RedisFault, and nothing else, when Redis doesn't do its part."""

    def __init__(self, directory: Path | None, policy: str, clock: Callable[[], float] = time.monotonic) -> None:
        """policy: a word without braces and colons that no other policy has."""
        self._directory, self._clock = directory, clock
        self._prefix = f"sixfold:kv:{policy}"
        self._index, self._sizes = f"sixfold:kv:{{{policy}}}:index", f"sixfold:kv:{{{policy}}}:sizes"
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
                await self._enter(client, salt, list(blocks), size, ttl_seconds)
                return await self._evict(client, max_bytes)
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
                    await self._enter(client, salt, kept, value_bytes, ttl_seconds)
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
                for size in await self._known_sizes(client):
                    index = self._index_of(size)
                    members = [member async for member, _ in client.zscan_iter(index, f"{salt}:*", _SCAN_COUNT)]
                    for begin in range(0, len(members), _SCAN_COUNT):
                        await client.zrem(index, *members[begin : begin + _SCAN_COUNT])
        return names

    async def ping(self, limit_seconds: float) -> None:
        """Returns if it can be used: in a cluster, all of its masters."""
        async with self._connected(limit_seconds) as client:
            if isinstance(client, RedisCluster):
                await client.initialize()
                await client.ping(target_nodes=RedisCluster.PRIMARIES)
            # Also where pings need no permission: that keys may be read.
            await client.exists(self._sizes)

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
        """Where something else lies in their place, they begin anew."""
        try:
            yield
        except ResponseError as error:
            if not is_foreign(error):
                raise
            sizes = await client.type(self._sizes)
            known = await self._known_sizes(client) if sizes == b"set" else []
            await client.unlink(self._sizes, *map(self._index_of, known))

    async def _enter(self, client: Client, salt: str, names: Sequence[bytes], size: int, ttl_seconds: float) -> None:
        """Note when successive blocks expire. A later one is no good without those before it: so it goes earlier."""
        expiry = time.time() + ttl_seconds
        scores = {f"{salt}:{name.hex()}": expiry - place / 1000 for place, name in enumerate(names)}
        pipeline = client.pipeline(transaction=False)
        pipeline.sadd(self._sizes, size)
        pipeline.zadd(self._index_of(size), scores)
        for key in (self._sizes, self._index_of(size)):  # so that nothing is left of a policy that is gone
            pipeline.pexpire(key, int(2 * ttl_seconds * 1000))
        all_done(await pipeline.execute(raise_on_error=False))

    async def _evict(self, client: Client, max_bytes: int) -> int:
        """Remove those that would expire first, which are those that weren't used for longest; their bytes."""
        evicted = 0
        while True:
            sizes = await self._known_sizes(client)
            pipeline = client.pipeline(transaction=False)
            for size in sizes:
                pipeline.zremrangebyscore(self._index_of(size), "-inf", time.time())
                pipeline.zcard(self._index_of(size))
                pipeline.zrange(self._index_of(size), 0, 0, withscores=True)
            answers = all_done(await pipeline.execute(raise_on_error=False))
            excess = sum(size * count for size, count in zip(sizes, answers[1::3], strict=True)) - max_bytes
            firsts = [(oldest[0][1], size) for size, oldest in zip(sizes, answers[2::3], strict=True) if oldest]
            if excess <= 0 or not firsts:
                return evicted
            size = min(firsts)[1]
            count = min(-(-excess // size), _SCAN_COUNT if len(firsts) == 1 else _MIXED_COUNT)
            popped = [member for member, _ in await client.zpopmin(self._index_of(size), count)]
            await _unlink(client, [f"{self._prefix}:".encode() + member for member in popped])
            evicted += size * len(popped)

    async def _known_sizes(self, client: Client) -> list[int]:
        return sorted(int(size) for size in await client.smembers(self._sizes) if size.isdigit() and int(size))

    def _index_of(self, size: int) -> str:
        return f"{self._index}:{size}"

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
