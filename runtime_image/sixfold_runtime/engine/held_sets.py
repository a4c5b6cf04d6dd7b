"""The weight sets of one model that are in memory, each with its runner."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sixfold_runtime.engine.generation import GenerationRunner
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.placement import release_memory
from sixfold_runtime.engine.protocol import TaskInfo
from sixfold_runtime.engine.shadow_generation import ShadowSide

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedSet:
    """Weights that answer."""

    name: str
    runner: GenerationRunner
    weight_bytes: int
    kv_budget_bytes: int
    """What the KV caches may grow to."""
    weights: weakref.ref[Any]
    """Whatever holds the tensors."""
    side: ShadowSide
    """The same weights in comparisons with level 0."""

    @property
    def is_idle(self) -> bool:
        return self.runner.running == 0 and self.runner.waiting == 0

    @property
    def unspent_kv_bytes(self) -> int:
        return max(0, self.kv_budget_bytes - self.runner.kv_bytes)


class HeldSets:
    """Changed by the engine's thread, read by any.

    Attributes:
        tasks: that requests may name; while no weights are active, those of before.
        slice_failures: tasks among them that can't be had, and why.
    """

    def __init__(self, device: torch.device, metrics: EngineMetrics, loaded: Iterable[LoadedSet]) -> None:
        self.tasks: tuple[TaskInfo, ...] = ()
        self.slice_failures: dict[str, str] = {}
        self._device = device
        self._metrics = metrics
        self._sets: dict[str, LoadedSet] = {}
        """Replaced, never changed, since other threads iterate over it."""
        for held in loaded:
            self.add(held)

    def __iter__(self) -> Iterator[LoadedSet]:
        return iter(tuple(self._sets.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._sets

    def get(self, name: str) -> LoadedSet | None:
        return self._sets.get(name)

    @property
    def running(self) -> int:
        return sum(held.runner.running for held in self)

    @property
    def waiting(self) -> int:
        return sum(held.runner.waiting for held in self)

    @property
    def kv_bytes(self) -> int:
        return sum(held.runner.kv_bytes for held in self)

    @property
    def can_step(self) -> bool:
        return any(held.runner.can_step for held in self)

    def enlist(self, active: str, canary: str) -> None:
        """New requests go to these sets: the others let go of task slices that they don't need any more."""
        for held in self:
            slices = held.runner.slices
            if slices is not None:
                slices.enlist() if held.name in (active, canary) else slices.retire()
        self._note_tasks(active)

    def adapt(self, active: str, canary: str) -> None:
        """Let the runners follow the configuration; new requests of the arms get these sets, "" is none."""
        for held in self:
            held.runner.adapt()
        if active:
            self.enlist(active, canary)

    def add(self, loaded: LoadedSet) -> None:
        self._sets = {**self._sets, loaded.name: loaded}
        find = self._finder(loaded.name)
        self._metrics.of(loaded.name).watch(find)
        self._metrics.of(loaded.name).watch_room(find)

    def release(self, names: Collection[str]) -> None:
        """Free the memory of these, unless somebody else holds on to them."""
        if not names:
            return
        weights = [self._sets[name].weights for name in names]
        for name in names:
            self._sets[name].runner.close()
            self._metrics.of(name).released()
            log.info("the weights %s are given up", name)
        self._sets = {name: held for name, held in self._sets.items() if name not in names}
        release_memory(self._device, any(reference() is not None for reference in weights))

    def _note_tasks(self, name: str) -> None:
        held = self._sets.get(name)
        if held is not None and (slices := held.runner.slices) is not None:
            self.tasks, self.slice_failures = slices.tasks, slices.failures

    def _finder(self, name: str) -> Callable[[], GenerationRunner | None]:
        """For the metrics, which live on: they must not keep a runner and its weights in memory."""

        def find() -> GenerationRunner | None:
            held = self._sets.get(name)
            return None if held is None else held.runner

        return find
