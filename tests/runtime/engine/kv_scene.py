"""Runners of one engine over one store of keys and values, stepped by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sixfold_api.generation import DraftLength, Overlap
from sixfold_api.kv_reuse import KVStore as Store
from sixfold_api.modes import Mode
from sixfold_api.runtime_config import (
    EffectiveConfig,
    KVReuseConfig,
    SamplerPipelineConfig,
    SpeculativeConfig,
)
from sixfold_runtime.engine.forward import make_forward
from sixfold_runtime.engine.generation import GenerationRunner
from sixfold_runtime.engine.kv_reuse import KVReuse
from sixfold_runtime.engine.kv_shelf import Shelf
from sixfold_runtime.engine.kv_store import Prefix
from sixfold_runtime.engine.loader import LoadedModel
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import Done, Generate, Sampling
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.engine.weight_files import ContentDigest, WeightFiles
from sixfold_runtime.settings import RuntimeSettings

CPU = torch.device("cpu")
SECONDS = 60.0
BLOCK = 8
KV = KVReuseConfig(
    store=Store.MEMORY,
    ttl_seconds=600,
    max_bytes=2**24,
    memory_bytes=2**24,
    block_tokens=BLOCK,
    min_prompt_tokens=BLOCK + 1,
)
SPECULATIVE = SpeculativeConfig(num_tokens=3, length=DraftLength.FIXED)
PIPELINE = SamplerPipelineConfig(workers=2, overlap=Overlap.ALWAYS)


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class Scene:
    """Runners of one engine, stepped by hand, over one store."""

    config: Any
    collector: Any
    shelf: Shelf
    woken: threading.Event = field(default_factory=threading.Event)
    runners: list[GenerationRunner] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.set(kv_reuse=KV)

    def set(self, **changes: Any) -> None:
        """Change the configuration."""
        stable = self.config.value.stable.model_copy(update=changes)
        if "kv_reuse" in changes:
            modes = {*stable.active_modes, Mode.KV_CACHE_REUSE}
            active = modes if changes["kv_reuse"] else modes - {Mode.KV_CACHE_REUSE}
            stable = EffectiveConfig.model_validate({**stable.model_dump(), "active_modes": tuple(active)})
        self.config.value = self.config.value.model_copy(update={"stable": stable})
        self.shelf.store.follow(stable.kv_reuse)
        for runner in self.runners:
            runner.adapt()

    def start(self, model: LoadedModel, **options: Any) -> GenerationRunner:
        digest = ContentDigest(WeightFiles.of(Path(model.served.path)), model.served.digest, self.woken.set)
        reuse = KVReuse(self.shelf, digest, model, make_forward(model), self.config, self.woken.set)
        metrics = EngineMetrics(RuntimeSettings()).of(model.served.name)
        limits = Limits(**options.pop("limits", {}))
        runner = GenerationRunner(model, limits, self.config, metrics, kv=reuse, **options)
        runner.warm_up(1 << 30)
        runner.adapt()
        self.runners.append(runner)
        self.wait(lambda: reuse.block_tokens > 0)
        return runner

    def wait(self, until: Callable[[], bool]) -> None:
        while not until():
            assert self.woken.wait(SECONDS), "nobody woke the engine"
            self.woken.clear()

    def submit(self, runner: GenerationRunner, request_id: str, prompt: list[int], **fields: Any) -> None:
        own = {name: fields.pop(name) for name in list(fields) if name in Generate.__annotations__}
        request = Generate(
            request_id, "chat", prompt, Sampling(**{"max_tokens": 12, "temperature": 0.0, **fields}), **own
        )
        runner.submit((self.collector, request_id), request)

    def finish(self, runner: GenerationRunner) -> None:
        """Until all is answered and kept."""
        while runner.running or runner.waiting:
            self.wait(lambda: runner.can_step)
            self.collector.take(runner.step())
        assert self.shelf.store.settle(SECONDS)

    def ask(self, runner: GenerationRunner, request_id: str, prompt: list[int], **fields: Any) -> Done:
        self.submit(runner, request_id, prompt, **fields)
        self.finish(runner)
        done: Done = self.collector.dones[request_id]
        assert done.failure is None, done.failure
        return done

    def found(self, runner: GenerationRunner, prompt: list[int], tenant: str = "") -> Prefix | None:
        """What the store has for a prompt."""
        assert runner.kv is not None
        scope = runner.kv.scope(tenant, KV)
        assert scope is not None
        done = threading.Event()
        lookup = self.shelf.store.find(scope, prompt, done.set)
        assert lookup.is_done or done.wait(SECONDS)
        return lookup.prefix


@contextmanager
def opened(config: Any, collector: Any) -> Iterator[Scene]:
    scene = Scene(config, collector, Shelf.open(EngineMetrics(RuntimeSettings()), None, "auto"))
    yield scene
    for runner in scene.runners:
        runner.close()
    scene.shelf.store.close()


def continued_ids(model: LoadedModel, prompt: list[int], prefix: Prefix | None, max_tokens: int = 12) -> list[int]:
    """Greedy decoding by hand that starts from the same keys and values."""
    forward = make_forward(model)
    cache, known = forward.new_cache(1), 0
    if prefix is not None:
        cache.fill(0, prefix.keys, prefix.values)
        known = prefix.tokens
    ids, feed = list[int](), prompt[known:]
    while len(ids) < max_tokens:
        ids.append(int(forward([feed], cache)[0].argmax()))
        feed = ids[-1:]
    return ids


def continued(model: LoadedModel, prompt: list[int], prefix: Prefix | None) -> str:
    return str(model.tokenizer.tokenizer.decode(continued_ids(model, prompt, prefix)))
