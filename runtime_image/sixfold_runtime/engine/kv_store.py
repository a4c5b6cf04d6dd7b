"""Keys and values that were computed once, found again: the one store of an engine process.

Its thread looks up, dequantises, quantises and writes; the engine's thread only leaves word and is woken. All faults of
Redis are misses: no method raises because of them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sixfold_api.runtime_config import KVReuseConfig
from sixfold_runtime.engine import kv_metrics as series
from sixfold_runtime.engine.kv_blocks import Blocks
from sixfold_runtime.engine.kv_codec import BlockShape
from sixfold_runtime.engine.kv_decoding import Target
from sixfold_runtime.engine.kv_metrics import KVMetrics
from sixfold_runtime.engine.kv_redis import RedisTier
from sixfold_runtime.engine.kv_thread import LoopThread
from sixfold_runtime.engine.kv_tiers import Tiers
from sixfold_runtime.engine.kv_writer import Erase, Keep, Writer
from sixfold_runtime.modes.kv_reuse import Scope, chain

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
        self._metrics, self._pin_memory = metrics, pin_memory
        self._tiers = Tiers(RedisTier(redis_directory, policy, clock), metrics, clock)
        self._writer = Writer(self._tiers, metrics)
        self._thread = LoopThread("kv-store", lambda: metrics.fault("internal"), self._tiers.close)
        self._config: KVReuseConfig | None = None
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
        if config is not None or self._thread.is_running:
            self._thread.start(self._tiers.follow(config))

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
            wanted = Blocks(scope.salt, names, _shape(scope), token_ids)
            target = Target(getattr(torch, scope.dtype), self._pin_memory)
            self._thread.start(self._find(lookup, wanted, target, wake))
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
            talk = _conversation(scope, conversation)
            self._thread.start(self._tiers.prefetch(scope.salt, talk, _shape(scope)))

    async def _find(self, lookup: Lookup, wanted: Blocks, target: Target, wake: Callable[[], None]) -> None:
        began = time.perf_counter()
        try:
            found = await self._tiers.find(wanted, target, lambda: lookup.is_cancelled)
            if found is not None:
                tokens, far = found.blocks * wanted.shape.tokens, found.blocks - found.near
                lookup.prefix = Prefix(tokens, found.keys, found.values, found.near, far)
        finally:
            lookup.seconds = time.perf_counter() - began
            self._metrics.seconds(series.LOOKUP, lookup.seconds)
            lookup.is_done = True
            wake()
        if lookup.prefix is not None:
            await self._tiers.renew(wanted, lookup.prefix.tokens // wanted.shape.tokens)

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
        first, step = first_token // scope.block_tokens, scope.block_tokens
        whole = first + min(keys.shape[2], len(token_ids) - first_token) // step
        blocks = Blocks(scope.salt, chain(scope, token_ids[: whole * step]), _shape(scope), token_ids[: whole * step])
        talk = _conversation(scope, conversation) if conversation else ""
        if whole > first:
            self._do(Keep(blocks, first, keys, values, talk, ready))

    def erase(self, salt: str, done: Callable[[int, str], None]) -> None:
        """Forget everything of a tenant, here and in Redis.

        Args:
            salt: from `tenant_salt`.
            done: gets, in the store's thread, how many blocks that were, and why some may be left.
        """
        self._do(Erase(salt, done))

    def settle(self, seconds: float) -> bool:
        """Wait until all that was given is kept, at most so long; whether it is."""
        return self._writer.wait_idle(seconds)

    def close(self) -> None:
        """Keep what was given, for a few seconds at most, and end the thread."""
        self.settle(CLOSE_SECONDS)
        self._config = None
        self._thread.close()

    def _do(self, job: Keep | Erase) -> None:
        if self._writer.admit(job):
            self._thread.start(self._writer.do(job))


def _shape(scope: Scope) -> BlockShape:
    return BlockShape(scope.layers, scope.kv_heads, scope.block_tokens, scope.head_dim)


def _conversation(scope: Scope, conversation: str) -> str:
    return f"{scope.variant}/{conversation}"
