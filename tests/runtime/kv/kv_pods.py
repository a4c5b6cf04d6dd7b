"""One engine's store of keys and values, as the engine uses it."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

sys.path.insert(0, str(Path(__file__).parents[3] / "e2e"))

from redis_server import wait_until

from sixfold_api.runtime_config import KVReuseConfig
from sixfold_runtime.engine.kv_metrics import KVMetrics, KVSeries
from sixfold_runtime.engine.kv_store import KVStore, Lookup
from sixfold_runtime.modes.kv_reuse import Scope, tenant_salt

LABELS = {"namespace": "shop", "policy": "chat"}
BLOCK = 8
SCOPE = Scope("sha256:1", "chat", tenant_salt("shop", "chat", "alice"), 3, 2, 16, "float32", BLOCK)
CONFIG = KVReuseConfig(store="Redis", ttl_seconds=60, max_bytes=1 << 30, memory_bytes=1 << 26, block_tokens=BLOCK)
TOKENS = list(range(1000, 1000 + 10 * BLOCK))
PROMPT = [*TOKENS, 7]
"""All of TOKENS can be found for it."""


class Pod:
    """One engine's store, as the engine uses it, and its numbers."""

    def __init__(
        self, directory: Path | None, config: KVReuseConfig, identity: str = "shop/chat", pin_memory: bool = False
    ) -> None:
        self._registry = CollectorRegistry()
        self.later_seconds = 0.0
        """How much later it is for the store."""
        self.store = KVStore(
            identity,
            directory,
            KVMetrics(KVSeries(self._registry), LABELS),
            pin_memory=pin_memory,
            clock=lambda: time.monotonic() + self.later_seconds,
        )
        self.store.follow(config)

    def up(self) -> Pod:
        """Wait until Redis is used."""
        wait_until("Redis is used", lambda: self.number("redis_up") == 1 and not self.store.problem)
        return self

    def down(self) -> Pod:
        wait_until("Redis isn't used", lambda: self.number("redis_up") == 0 and bool(self.store.problem))
        return self

    def number(self, name: str, **labels: str) -> float:
        return self._registry.get_sample_value(f"sixfold_kv_{name}", LABELS | labels) or 0.0

    def blocks(self, result: str) -> float:
        return self.number("blocks_total", result=result)

    def faults(self, reason: str) -> float:
        return self.number("faults_total", reason=reason)

    def find(self, prompt: Sequence[int] = PROMPT, scope: Scope = SCOPE) -> Lookup:
        """A lookup that is done."""
        woken = threading.Event()
        lookup = self.store.find(scope, prompt, woken.set)
        if not lookup.is_done:
            assert woken.wait(5), "nobody was woken"
        assert lookup.is_done
        return lookup

    def found(self, prompt: Sequence[int] = PROMPT, scope: Scope = SCOPE) -> int:
        """Tokens."""
        prefix = self.find(prompt, scope).prefix
        return 0 if prefix is None else prefix.tokens

    def keep(
        self, tokens: Sequence[int] = TOKENS, scope: Scope = SCOPE, first: int = 0, conversation: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep random keys and values and wait until they are written."""
        keys, values = random_planes(len(tokens) - first, scope)
        self.store.keep(scope, tokens, first, keys.clone(), values.clone(), conversation)
        assert self.store.settle(10)
        return keys, values

    def erase(self, salt: str = SCOPE.salt) -> tuple[int, str]:
        answers: list[tuple[int, str]] = []
        answered = threading.Event()

        def done(blocks: int, error: str) -> None:
            answers.append((blocks, error))
            answered.set()

        self.store.erase(salt, done)
        assert answered.wait(40)
        return answers[0]


def random_planes(tokens: int, scope: Scope = SCOPE) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(tokens)
    sizes = (scope.layers, scope.kv_heads, tokens, scope.head_dim)
    return torch.randn(sizes, generator=dice), torch.randn(sizes, generator=dice)
