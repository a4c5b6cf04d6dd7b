"""One model of an engine: what it is, whether it is ready, and how it gets there."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sixfold_api.runtime_config import ModelState, ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.engine.classification import ClassificationRunner
from sixfold_runtime.engine.device import available_memory_bytes
from sixfold_runtime.engine.generation import GenerationRunner
from sixfold_runtime.engine.loader import LoadedModel, load
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.engine.work import CurrentConfig, Runner

_DEFAULT_LIMITS = {
    "cuda": Limits(max_running=128, prefill_tokens=1024),
    "cpu": Limits(max_running=32, prefill_tokens=256),
}
"""A prefill piece holds up running streams for its length, so a slow device takes smaller ones."""
_KV_SHARE = {"cuda": 0.8, "cpu": 0.5}
"""Of the memory that the weights leave, for the KV caches of all models together."""


@dataclass
class EngineModel:
    """A model of the engine. Fields are replaced by the engine's thread and read by any."""

    served: ServedModel
    loaded: LoadedModel | None = None
    runner: Runner | None = None
    error: str = ""

    @property
    def state(self) -> ModelState:
        return ModelState(name=self.served.name, task=self.served.task, ready=self.runner is not None, error=self.error)

    def load(
        self,
        device: torch.device,
        generating_models: int,
        limits: Limits | None,
        config: CurrentConfig,
        metrics: EngineMetrics,
    ) -> None:
        """Load the weights and answer a first forward; ready after that.

        Args:
            generating_models: how many share the memory for KV caches.
            limits: by default what suits the device.

        Raises:
            ModelLoadError: the folder can't be served.
        """
        loaded = load(self.served, device)
        of_model = metrics.of(self.served.name)
        make = GenerationRunner if self.served.task == Task.GENERATION else ClassificationRunner
        runner: Runner = make(loaded, limits or _DEFAULT_LIMITS[device.type], config, of_model)
        runner.warm_up(int(available_memory_bytes(device) * _KV_SHARE[device.type] / max(1, generating_models)))
        of_model.loaded(loaded.load_seconds, loaded.weight_bytes)
        of_model.watch(lambda: runner.running, lambda: runner.waiting, lambda: runner.kv_bytes)
        self.loaded, self.runner = replace(loaded, context_tokens=runner.context_tokens), runner
