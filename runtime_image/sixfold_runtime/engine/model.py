"""One model of an engine: what it is, whether it is ready, and how it gets there."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from sixfold_api.modes import Mode
from sixfold_api.runtime_config import ModelState, ServedModel, SubgraphsConfig
from sixfold_api.scalars import Task
from sixfold_runtime.engine.classification import ClassificationRunner
from sixfold_runtime.engine.device import available_memory_bytes
from sixfold_runtime.engine.drafts import load_alone
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.exit_heads import ExitHeads, load_exit_heads
from sixfold_runtime.engine.kv_shelf import Shelf
from sixfold_runtime.engine.loader import LoadedModel
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import TaskInfo
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.engine.shadow import Shadows
from sixfold_runtime.engine.shadow_classification import ClassificationShadow
from sixfold_runtime.engine.slice_loader import TrunkFolder
from sixfold_runtime.engine.slice_pool import SlicePool
from sixfold_runtime.engine.swap_turn import SwapTurn
from sixfold_runtime.engine.trunk import Trunk
from sixfold_runtime.engine.weight_loader import Facts, Place
from sixfold_runtime.engine.weight_sets import WeightSets
from sixfold_runtime.engine.work import CurrentConfig, Output, Runner, Wake, arms_in_use

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
    config: CurrentConfig
    shadows: Shadows
    facts: Facts | None = None
    runner: Runner | None = None
    weights: WeightSets | None = None
    """The same as `runner`, of a model that generates."""
    classifier: ClassificationRunner | None = None
    """The same as `runner`, of one that classifies."""
    shelf: Shelf | None = None
    """Where a model that generates finds and keeps keys and values."""
    slices: SlicePool | None = None
    """Of a classifier's tasks; those of a model that generates go with its weights."""
    labels: tuple[str, ...] = ()
    """Of a classifier's own head."""
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
    def tasks(self) -> tuple[TaskInfo, ...]:
        """That requests may name."""
        owner = self.weights or self.slices
        return () if owner is None else owner.tasks

    @property
    def slice_errors(self) -> dict[str, str]:
        """Tasks among them that can't be served, and why."""
        if self.weights is not None:
            return self.weights.slice_failures
        return {} if self.slices is None else self.slices.failures

    @property
    def kv_block_tokens(self) -> int:
        """Of the blocks of keys and values that requests find and leave; 0 while there are none."""
        kv = None if self.weights is None else self.weights.kv
        return 0 if kv is None else kv.block_tokens

    @property
    def unsupported(self) -> dict[Mode, str]:
        """Modes that are on but don't run, and why."""
        runner = self.weights or self.classifier
        found = {} if runner is None else dict(runner.unsupported)
        if self.classifier is not None and self.slices is None and self._section() is not None:
            found[Mode.SUBGRAPHS] = f"model {self.served.name} is computed by transformers, which knows no task slices"
        if self.tasks and len(self.slice_errors) == len(self.tasks):
            found[Mode.SUBGRAPHS] = next(iter(self.slice_errors.values()))
        arms = arms_in_use(self.config())
        return {mode: reason for mode, reason in found.items() if any(arm.is_active(mode) for arm in arms)}

    @property
    def shadow_off(self) -> str:
        """Why answers aren't computed again although the configuration says so; "" where they are."""
        return "" if self.weights is None else self.weights.shadow_off

    @property
    def state(self) -> ModelState:
        """What the operator is told."""
        state = ModelState(
            name=self.served.name,
            task=self.served.task,
            ready=self.is_ready,
            error=self.error,
            slice_errors=self.slice_errors,
        )
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

    def load(self, device: torch.device, generating_models: int, limits: Limits | None, wake: Wake) -> None:
        """Load the weights and answer a first forward; ready after that, or `error` says why not.

        Args:
            generating_models: how many share the memory for KV caches.
            limits: by default what suits the device.
            wake: called in another thread when `adapt` has something to do.
        """
        try:
            self._load(device, generating_models, limits, wake)
        except ModelLoadError as error:
            self.error = str(error)
            log.error("model %s: %s", self.served.name, error)
        except Exception as error:  # whatever a foreign model's code raises: the others still load
            self.error = f"{type(error).__name__}: {error}"
            log.exception("model %s failed to load", self.served.name)

    def _load(self, device: torch.device, generating_models: int, limits: Limits | None, wake: Wake) -> None:
        limits = limits or _DEFAULT_LIMITS[device.type]
        kv_share = _KV_SHARE[device.type] / max(1, generating_models)
        if self.served.task == Task.GENERATION:
            self.weights = WeightSets(
                self.served,
                Place(device, limits, kv_share),
                self.config,
                self.metrics,
                wake,
                self.turn,
                self.shelf,
                self.shadows,
            )
            self.facts, self.runner = self.weights.facts, self.weights
        else:
            self._load_classifier(device, limits, wake)

    def _load_classifier(self, device: torch.device, limits: Limits, wake: Wake) -> None:
        loaded, metrics = load_alone(self.served, device), self.metrics.of(self.served.name)
        folder, exits, problem = TrunkFolder(Path(self.served.path), self.served.task), None, ""
        if (trunk := loaded.trunk) is not None:
            exits, problem = self._exits(loaded, trunk, folder)
            self.slices = SlicePool(folder, trunk, self._section, metrics.slices, name=self.served.name, wake=wake)
        shadow = ClassificationShadow(self.shadows, loaded, self.slices, metrics.shadow, limits.prefill_tokens)
        runner = ClassificationRunner(
            loaded,
            limits,
            self.config,
            metrics,
            exits=exits,
            why_no_exits=problem,
            slices=self.slices,
            answered=shadow.answered,
        )
        runner.warm_up(available_memory_bytes(device))
        metrics.loaded(loaded.load_seconds, loaded.weight_bytes)
        metrics.watch(lambda: runner)
        self.facts = Facts(loaded.tokenizer, runner.context_tokens, loaded.vocabulary_tokens)
        self.labels = loaded.labels
        self.runner = self.classifier = runner

    def _exits(self, loaded: LoadedModel, trunk: Trunk, folder: TrunkFolder) -> tuple[ExitHeads | None, str]:
        """The exit heads, or why there are none although there is a file: the model is served without them."""
        try:
            return load_exit_heads(folder.path, trunk, folder.fingerprint, loaded.labels), ""
        except Exception as error:  # whatever a foreign file raises
            log.error("model %s is served without early exits", self.served.name, exc_info=error)
            return None, str(error) if isinstance(error, ModelLoadError) else f"{type(error).__name__}: {error}"

    def _section(self) -> SubgraphsConfig | None:
        return self.config().stable.classification_subgraphs

    @property
    def can_step(self) -> bool:
        """Whether a step would compute something now."""
        return self.runner is not None and self.runner.can_step

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
        return self.runner is not None and self.runner.adapt()

    def close(self) -> None:
        """End threads of the model's own."""
        if self.runner is not None:
            self.runner.close()
        if self.slices is not None:
            self.slices.close()
