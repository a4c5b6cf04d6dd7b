"""One model of an engine: what it is, whether it is ready, and how it gets there."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch

from sixfold_api.modes import Mode
from sixfold_api.runtime_config import ModelState, ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.engine.classification import ClassificationRunner
from sixfold_runtime.engine.device import available_memory_bytes
from sixfold_runtime.engine.drafts import load_alone
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.engine.swap_turn import SwapTurn
from sixfold_runtime.engine.weight_loader import Facts, Place
from sixfold_runtime.engine.weight_sets import WeightSets
from sixfold_runtime.engine.work import CurrentConfig, Output, Runner, Wake

log = logging.getLogger(__name__)

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
    metrics: EngineMetrics
    turn: SwapTurn
    facts: Facts | None = None
    runner: Runner | None = None
    weights: WeightSets | None = None
    """The same as `runner`, of a model that generates."""
    error: str = ""

    @property
    def is_ready(self) -> bool:
        return self.runner is not None and (self.weights is None or not self.weights.is_broken)

    @property
    def why_not_ready(self) -> str:
        """For people; "" if it is."""
        if self.is_ready:
            return ""
        return self.error or (self.weights.weights_error if self.weights else "") or "loading"

    @property
    def is_swapping(self) -> bool:
        """New requests wait for other weights."""
        return self.weights is not None and self.weights.is_swapping

    @property
    def unsupported(self) -> dict[Mode, str]:
        """Modes that are on but don't run, and why."""
        return {} if self.weights is None else self.weights.unsupported

    @property
    def state(self) -> ModelState:
        """What the operator is told."""
        state = ModelState(name=self.served.name, task=self.served.task, ready=self.is_ready, error=self.error)
        weights = self.weights
        if weights is None:
            return state
        return state.model_copy(
            update={
                "error": "" if self.is_ready else self.why_not_ready,
                "weights": weights.active,
                "full_weights": weights.full_weights,
                "swap_seconds": weights.swap_seconds,
                "weights_error": weights.weights_error,
                "draft_shortened": weights.draft_shortened,
            }
        )

    def load(
        self, device: torch.device, generating_models: int, limits: Limits | None, config: CurrentConfig, wake: Wake
    ) -> None:
        """Load the weights and answer a first forward; ready after that, or `error` says why not.

        Args:
            generating_models: how many share the memory for KV caches.
            limits: by default what suits the device.
            wake: called in another thread when `adapt` has something to do.
        """
        try:
            self._load(device, generating_models, limits, config, wake)
        except ModelLoadError as error:
            self.error = str(error)
            log.error("model %s: %s", self.served.name, error)
        except Exception as error:  # whatever a foreign model's code raises: the others still load
            self.error = f"{type(error).__name__}: {error}"
            log.exception("model %s failed to load", self.served.name)

    def _load(
        self, device: torch.device, generating_models: int, limits: Limits | None, config: CurrentConfig, wake: Wake
    ) -> None:
        limits = limits or _DEFAULT_LIMITS[device.type]
        kv_share = _KV_SHARE[device.type] / max(1, generating_models)
        if self.served.task == Task.GENERATION:
            self.weights = WeightSets(
                self.served, Place(device, limits, kv_share), config, self.metrics, wake, self.turn
            )
            self.facts, self.runner = self.weights.facts, self.weights
        else:
            self._load_classifier(device, limits, config)

    def _load_classifier(self, device: torch.device, limits: Limits, config: CurrentConfig) -> None:
        loaded, metrics = load_alone(self.served, device), self.metrics.of(self.served.name)
        runner = ClassificationRunner(loaded, limits, config, metrics)
        runner.warm_up(available_memory_bytes(device))
        metrics.loaded(loaded.load_seconds, loaded.weight_bytes)
        metrics.watch(lambda: runner)
        self.facts = Facts(loaded.tokenizer, runner.context_tokens, loaded.vocabulary_tokens)
        self.runner = runner

    @property
    def can_step(self) -> bool:
        """Whether a step would compute something now."""
        if self.weights is not None:
            return self.weights.can_step
        return self.runner is not None and (self.runner.running > 0 or self.runner.waiting > 0)

    def step(self) -> list[Output]:
        """Compute one step; only where `can_step`."""
        assert self.runner is not None
        if self.weights is not None:
            return self.weights.step()  # it counts the time by weights
        started = time.monotonic()
        outputs = self.runner.step()
        self.metrics.of(self.served.name).busy(time.monotonic() - started)
        return outputs

    def adapt(self) -> bool:
        """Follow the configuration. Returns whether operator and gateways have to be told of a change."""
        return self.weights is not None and self.weights.adapt()

    def close(self) -> None:
        """End threads of the model's own."""
        if self.weights is not None:
            self.weights.close()
