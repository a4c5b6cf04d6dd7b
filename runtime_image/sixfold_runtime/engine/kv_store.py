"""Keys and values that were computed once, found again: the one store of an engine process.

Its thread looks up, dequantises, quantises and writes; the engine's thread only leaves word and is woken. All faults of
Redis are misses: no method raises because of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sixfold_api.runtime_config import KVReuseConfig
from sixfold_runtime.engine import kv_metrics as series
from sixfold_runtime.engine.kv_codec import BadBlockError, BlockShape, dequantise, encode_blocks
from sixfold_runtime.engine.kv_metrics import KVMetrics
from sixfold_runtime.engine.kv_redis import RedisTier
from sixfold_runtime.engine.kv_tiers import BLOCKS_BETWEEN_TURNS, Blocks, Tiers
from sixfold_runtime.modes.kv_reuse import Scope, chain

log = logging.getLogger(__name__)

QUEUE_BYTES = 256 << 20
"""Of keys and values that wait to be kept; what doesn't fit isn't kept."""
CLOSE_SECONDS = 5.0


@dataclass(frozen=True, eq=False)
class Prefix:
    """What was found of a prompt.

    Attributes:
        tokens: leading ones, a whole number of blocks.
        keys, values: [layers, kv_heads, tokens, head_dim], on the CPU, of the scope's dtype.
    """

    tokens: int
    keys: torch.Tensor
    values: torch.Tensor
    from_memory_blocks: int
    from_redis_blocks: int


class Lookup:
    """Of one prompt. Read and cancelled by the engine's thread, answered by the store's.

    Attributes:
        is_done: set last, so that the rest is there by then.
        prefix: None: nothing was found.
        seconds: how long it took.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.is_cancelled = False
        self.prefix: Prefix | None = None
        self.seconds = 0.0

    def cancel(self) -> None:
        """Its answer isn't wanted any more; `wake` may be called all the same."""
        self.is_cancelled = True


@dataclass(frozen=True, eq=False)
class _Keep:
    scope: Scope
    token_ids: list[int]
    first_block: int
    keys: torch.Tensor
    values: torch.Tensor
    conversation: str
    ready: torch.cuda.Event | None

    @property
    def size_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True, eq=False)
class _Erase:
    salt: str
    done: Callable[[int, str], None]


class KVStore:
    """All methods are for the engine's thread, and none of them waits, except `settle` and `close`."""

    def __init__(
        self,
        identity: str,
        redis_directory: Path | None,
        metrics: KVMetrics,
        *,
        pin_memory: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connects to nothing before `follow` says so.

        Args:
            identity: "namespace/policy"; other policies in the same Redis are never seen.
            redis_directory: with the files `url` and, for an authority of its own, `ca.crt`; followed while running.
            pin_memory: of what is found, so that it is copied to a GPU without waiting.
        """
        policy = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._metrics, self._pin_memory, self._clock = metrics, pin_memory, clock
        self._tiers = Tiers(RedisTier(redis_directory, policy, clock), metrics, clock)
        self._config: KVReuseConfig | None = None
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._unfinished = 0
        self._is_settled = threading.Event()
        self._is_settled.set()
        self._erased: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queue: asyncio.Queue[_Keep | _Erase] = asyncio.Queue()
        self._thread: threading.Thread | None = None
        metrics.watch_memory(lambda: self._tiers.memory.size_bytes)

    @property
    def problem(self) -> str:
        """Why Redis isn't used now, for people; "" while it is, or needn't be."""
        return self._tiers.problem

    def follow(self, config: KVReuseConfig | None) -> None:
        """Obey a configuration; None: nothing is looked up or kept, and the memory is freed."""
        if config == self._config:
            return
        self._config = config
        if config is not None or self._loop is not None:
            self._start(self._tiers.follow(config))

    # -- finding

    def find(self, scope: Scope, token_ids: Sequence[int], wake: Callable[[], None]) -> Lookup:
        """Look for the longest run of first blocks, which leaves at least one token to compute.

        Args:
            wake: called in the store's thread when the lookup is done, unless it is done already.
        """
        lookup = Lookup()
        whole = (len(token_ids) - 1) // scope.block_tokens
        names = chain(scope, token_ids[: whole * scope.block_tokens])
        if self._config is None or not names or not self._tiers.may_have(names[0]):
            self._metrics.blocks(series.MISS if not self.problem else series.FAULT, len(names))
            lookup.is_done = True
        else:
            self._start(self._find(lookup, Blocks(scope.salt, names, _shape(scope), token_ids), scope.dtype, wake))
        return lookup

    def skip(self, scope: Scope, token_ids: Sequence[int]) -> None:
        """Count the blocks of a prompt that isn't looked up because that wouldn't pay."""
        self._metrics.blocks(series.SKIPPED, (len(token_ids) - 1) // scope.block_tokens)

    def known_tokens(self, scope: Scope, token_ids: Sequence[int]) -> int:
        """Leading tokens in blocks that needn't be kept again, as far as this pod knows."""
        if self._config is None:
            return 0
        return self._tiers.knows(chain(scope, token_ids)) * scope.block_tokens

    def prefetch(self, scope: Scope, conversation: str) -> None:
        """A request of this conversation is on its way: bring what it had last into memory."""
        if self._config is not None and conversation:
            self._start(self._tiers.prefetch(scope.salt, _conversation(scope, conversation), _shape(scope).value_bytes))

    async def _find(self, lookup: Lookup, wanted: Blocks, dtype: str, wake: Callable[[], None]) -> None:
        began = time.perf_counter()
        try:
            found = await self._tiers.find(wanted, lambda: lookup.is_cancelled)
            if found.blocks and not lookup.is_cancelled:
                keys, values = dequantise(found.blocks, getattr(torch, dtype), self._pin_memory)
                lookup.prefix = Prefix(keys.shape[2], keys, values, found.from_memory, found.from_redis)
        except Exception:
            log.exception("a lookup of keys and values failed")
            self._metrics.fault("internal")
        finally:
            lookup.seconds = time.perf_counter() - began
            self._metrics.seconds(series.LOOKUP, lookup.seconds)
            lookup.is_done = True
            wake()
        if lookup.prefix is not None:
            await self._tiers.renew(wanted, len(wanted.names[: lookup.prefix.tokens // wanted.shape.tokens]))

    # -- keeping

    def keep(
        self,
        scope: Scope,
        token_ids: Sequence[int],
        first_token: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        conversation: str = "",
        ready: torch.cuda.Event | None = None,
    ) -> None:
        """Keep the whole blocks of a sequence from `first_token` on; the tensors are the store's from now on.

        Args:
            token_ids: of the sequence from its beginning.
            first_token: where keys and values begin, a multiple of the block's tokens.
            keys, values: [layers, kv_heads, tokens, head_dim], on the CPU; tokens beyond the last whole block are
                ignored.
            ready: recorded behind the copies that fill them.
        """
        if self._config is None:
            return
        job = _Keep(scope, list(token_ids), first_token // scope.block_tokens, keys, values, conversation, ready)
        with self._lock:
            fits = self._queued_bytes + job.size_bytes <= QUEUE_BYTES
            self._queued_bytes += job.size_bytes if fits else 0
        if fits:
            self._enqueue(job)
        else:
            self._metrics.bytes(series.DROPPED, job.size_bytes)

    def erase(self, salt: str, done: Callable[[int, str], None]) -> None:
        """Forget everything of a tenant, here and in Redis.

        Args:
            salt: from `tenant_salt`.
            done: gets, in the store's thread, how many blocks that were, and why some may be left.
        """
        with self._lock:
            self._erased[salt] = self._erased.get(salt, 0) + 1
        self._enqueue(_Erase(salt, done))

    def settle(self, seconds: float) -> bool:
        """Wait until all that was given is kept, at most so long; whether it is."""
        return self._is_settled.wait(seconds)

    def close(self) -> None:
        """Keep what was given, for a few seconds at most, and end the thread."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        self.settle(CLOSE_SECONDS)
        self._config, self._loop, self._thread = None, None, None
        loop.call_soon_threadsafe(loop.stop)
        thread.join(CLOSE_SECONDS)

    def _enqueue(self, job: _Keep | _Erase) -> None:
        with self._lock:
            self._unfinished += 1
            self._is_settled.clear()
        self._running_loop().call_soon_threadsafe(self._queue.put_nowait, job)

    async def _work(self) -> None:
        """Keep and erase, one after the other, so that nothing is kept after it was erased."""
        while True:
            job = await self._queue.get()
            try:
                if isinstance(job, _Erase):
                    await self._erase(job)
                elif not self._erased.get(job.scope.salt):  # what waited when its tenant was erased isn't kept
                    await self._keep(job)
            except Exception:
                log.exception("keys and values can't be kept or erased")
                self._metrics.fault("internal")
            finally:
                with self._lock:
                    self._queued_bytes -= job.size_bytes if isinstance(job, _Keep) else 0
                    self._unfinished -= 1
                    if not self._unfinished:
                        self._is_settled.set()

    async def _erase(self, job: _Erase) -> None:
        blocks, error = 0, "it failed, see the engine's log"
        try:
            blocks, error = await self._tiers.erase(job.salt)
        finally:
            with self._lock:
                self._erased[job.salt] -= 1
            job.done(blocks, error)

    async def _keep(self, job: _Keep) -> None:
        if self._config is None:
            return
        if job.ready is not None:
            await asyncio.to_thread(job.ready.synchronize)
        began, shape = time.perf_counter(), _shape(job.scope)
        count = job.keys.shape[2] // shape.tokens
        kept = (job.first_block + count) * shape.tokens
        names = chain(job.scope, job.token_ids[:kept])
        new, first, span = names[job.first_block :], job.first_block * shape.tokens, len(names) * shape.tokens
        if not new:
            return
        values: list[bytes] = []
        size = len(new) * shape.tokens
        try:
            blocks = encode_blocks(job.keys[:, :, :size], job.values[:, :, :size], new, job.token_ids[first:span])
            for value in blocks:
                values.append(value)
                if len(values) % BLOCKS_BETWEEN_TURNS == 0:
                    await asyncio.sleep(0)
        except BadBlockError as bad:
            self._metrics.fault(str(bad))
        conversation = _conversation(job.scope, job.conversation) if job.conversation else ""
        await self._tiers.keep(
            Blocks(job.scope.salt, names, shape, job.token_ids), job.first_block, values, conversation
        )
        self._metrics.seconds(series.WRITE, time.perf_counter() - began)

    # -- thread

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._run, args=(self._loop,), name="kv-store", daemon=True)
            self._thread.start()
            self._start(self._work())
        return self._loop

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Have it done in the store's thread."""

        def begin() -> None:
            task = loop.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        loop = self._running_loop()
        loop.call_soon_threadsafe(begin)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()
        try:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(self._tiers.close())
        finally:
            loop.close()


def _shape(scope: Scope) -> BlockShape:
    return BlockShape(scope.layers, scope.kv_heads, scope.block_tokens, scope.head_dim)


def _conversation(scope: Scope, conversation: str) -> str:
    return f"{scope.variant}/{conversation}"
