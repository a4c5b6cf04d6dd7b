"""Loads the weight sets of one model, and makes each ready to answer."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from sixfold_api.runtime_config import ServedModel, SubgraphsConfig
from sixfold_api.scalars import FullWeights, Task
from sixfold_runtime.engine.device import available_memory_bytes, set_threads
from sixfold_runtime.engine.drafts import as_served, load_alone, load_draft, tokenizer_difference
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.forward import make_forward
from sixfold_runtime.engine.generation import GenerationRunner
from sixfold_runtime.engine.held_sets import LoadedSet
from sixfold_runtime.engine.kv_reuse import KVReuse
from sixfold_runtime.engine.kv_shelf import Shelf
from sixfold_runtime.engine.loader import LoadedModel
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.placement import choose_placement, needed_kv_bytes, weight_bytes
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.engine.shadow_generation import Answered, ShadowSide
from sixfold_runtime.engine.slice_loader import TrunkFolder, slice_bytes
from sixfold_runtime.engine.slice_pool import SlicePool
from sixfold_runtime.engine.tokenizer import LoadedTokenizer
from sixfold_runtime.engine.weight_files import ContentDigest, WeightFiles
from sixfold_runtime.engine.work import CurrentConfig

log = logging.getLogger(__name__)
_SHADOW_SHARE = 1 / 16
"""Of the memory of the KV caches, as much again for a comparison with level 0: it comes out of what is left beside."""
_DIGEST_SECONDS = 3.0
"""Weights are ready so much later at most, so that the first request may find keys and values already."""


@dataclass(frozen=True)
class Place:
    """Where a model's weights go, and what they may take there."""

    device: torch.device
    limits: Limits
    kv_share: float
    """Of the memory that the weights leave, for this model's KV caches."""
    available_bytes: Callable[[torch.device], int] = available_memory_bytes


@dataclass(frozen=True)
class Facts:
    """What is true of a model whichever weights answer; gateways rely on it."""

    tokenizer: LoadedTokenizer
    context_tokens: int
    vocabulary_tokens: int
    stop_strings: tuple[str, ...] = ()


@dataclass
class Load:
    """Weights on their way. The loading thread writes, `is_done` last."""

    name: str
    result: LoadedSet | None = None
    error: str = ""
    is_done: bool = False


class WeightLoader:
    """Turns folders into runners.

    Attributes:
        facts: of the first weights that were loaded, None before; others have to agree.
        draft_error: why there is no draft although the model has one; "" if there is.
    """

    def __init__(
        self,
        served: ServedModel,
        place: Place,
        config: CurrentConfig,
        metrics: EngineMetrics,
        wake: Callable[[], None] = lambda: None,
        shelf: Shelf | None = None,
        answered: Answered = lambda sequence, side, metrics: None,
    ) -> None:
        """
        Args:
            wake: called in another thread when a runner has something to take: slices, or keys and values.
            shelf: where the runners find and keep keys and values; None: nowhere.
            answered: told of every complete answer, and by which weights.
        """
        self._wake = wake
        self._shelf = shelf
        self._answered = answered
        self._files: dict[str, WeightFiles] = {}
        self._slices = TrunkFolder(Path(served.path), Task.GENERATION)
        self.facts: Facts | None = None
        self.draft_error = ""
        self._served = served
        self._place = place
        self._config = config
        self._metrics = metrics
        self._draft: LoadedModel | None = None
        self._folders = {served.name: served}
        if served.quantized is not None:
            self._folders[served.quantized.name] = as_served(served.quantized)

    def placement(self) -> FullWeights | None:
        """Resident or Swap, or None for a model with one set of weights; to be asked before any is loaded.

        Swap where a folder can't be read.
        """
        served, place = self._served, self._place
        if served.quantized is None:
            return None
        if served.full_weights is not FullWeights.AUTO:
            return served.full_weights
        available = place.available_bytes(place.device)
        try:
            draft_bytes = weight_bytes(Path(served.draft.path), place.device, available) if served.draft else 0
            full, quantized = (weight_bytes(Path(f.path), place.device, available) for f in self._folders.values())
            kv_bytes = needed_kv_bytes(Path(served.path), 4 if place.device.type == "cpu" else 2, place.kv_share)
        except ModelLoadError as error:
            log.warning("model %s: one set of weights at a time, since %s", served.name, error)
            return FullWeights.SWAP
        choice = choose_placement(served.full_weights, available - draft_bytes, full, quantized, kv_bytes)
        log.info(
            "model %s: fullWeights %s: %.1f MB full, %.1f MB quantised, %.1f MB for KV, %.1f MB available",
            served.name, choice, full / 1e6, quantized / 1e6, kv_bytes / 1e6, available / 1e6,
        )  # fmt: skip
        return choice

    def load_first(self, wanted: str, both: bool) -> tuple[list[LoadedSet], str]:
        """Load `wanted`, full weights where quantised ones can't be, the other set too if `both`, and the draft.

        Returns what was loaded, the first to be used first, and why others that were tried are missing.

        Raises:
            ModelLoadError: no weights could be loaded, or the full ones are wanted and can't be.
        """
        models: dict[str, LoadedModel] = {}
        problem = ""
        for name in (wanted, *(other for other in self._folders if other != wanted)):
            if models and not both:
                break
            try:
                models[name] = self._load(name)
            except Exception as error:  # whatever foreign files raise: the other set may still do
                if name == self._served.name and not models:
                    raise
                problem = self._describe(name, error)
        first = next(iter(models.values()))
        self.facts = Facts(first.tokenizer, first.context_tokens, first.vocabulary_tokens, first.stop_strings)
        self._load_draft(first)
        share_bytes = self._kv_budget_bytes() // len(models)
        return [self._ready(model, share_bytes) for model in models.values()], problem

    def start(self, name: str, old: LoadedSet | None, on_done: Callable[[], None]) -> Load:
        """Load a set in a thread of its own; `old` is what goes when it is there. Then `on_done`, in that thread."""
        load = Load(name)
        old_bytes = 0 if old is None else old.weight_bytes + old.runner.kv_bytes

        def work() -> None:
            set_threads()
            try:
                load.result = self._ready(self._load(name), self._kv_budget_bytes(old_bytes))
            except Exception as error:  # the weights that are there go on
                load.error = self._describe(name, error)
            load.is_done = True
            on_done()

        threading.Thread(target=work, name=f"load-{name}", daemon=True).start()
        return load

    def fits_beside(self, name: str, other: LoadedSet) -> bool:
        """Whether a set can be loaded while the other one answers and its KV caches grow."""
        available = self._place.available_bytes(self._place.device)
        try:
            return weight_bytes(Path(self._folders[name].path), self._place.device, available) <= (
                available - other.unspent_kv_bytes
            )
        except ModelLoadError:
            return True  # loading will say what is wrong; nothing has to be given up for that

    def _load(self, name: str) -> LoadedModel:
        self._files[name] = WeightFiles.of(Path(self._folders[name].path))
        loaded = load_alone(self._folders[name], self._place.device)
        if self.facts is not None and (difference := tokenizer_difference(self.facts.tokenizer, loaded.tokenizer)):
            raise ModelLoadError(f"{self._folders[name].path}: another tokenizer than before: {difference}")
        return loaded

    def _load_draft(self, target: LoadedModel) -> None:
        draft = self._served.draft
        if draft is None:
            return
        try:
            self._draft = load_draft(draft, target)
        except Exception as error:  # decoding stays plain
            self.draft_error = self._describe(draft.name, error)
            return
        self._metrics.of(draft.name).loaded(self._draft.load_seconds, self._draft.weight_bytes)
        for name in self._folders:
            self._metrics.of(name).draft_device(self._draft.device.type == "cpu")

    def _ready(self, model: LoadedModel, kv_budget_bytes: int) -> LoadedSet:
        """A runner that has answered a first forward. Raises ModelLoadError."""
        metrics = self._metrics.of(model.served.name)
        slices = None
        if model.decoder is not None:
            slices = SlicePool(
                self._slices, model.decoder, self._section, metrics.slices, name=model.served.name, wake=self._wake
            )
        side = self._shadow_side(model, slices, kv_budget_bytes)
        runner = GenerationRunner(
            model,
            self._place.limits,
            self._config,
            metrics,
            draft=self._draft,
            slices=slices,
            kv=self._reuse(model),
            answered=partial(self._answered, side=side, metrics=metrics.shadow),
        )
        runner.warm_up(kv_budget_bytes)
        metrics.loaded(model.load_seconds, model.weight_bytes)
        weights = weakref.ref(model.decoder or model.module)
        return LoadedSet(model.served.name, runner, model.weight_bytes, kv_budget_bytes, weights, side)

    def _shadow_side(self, model: LoadedModel, slices: SlicePool | None, kv_budget_bytes: int) -> ShadowSide:
        return ShadowSide(
            make_forward(model),
            slices,
            model.device,
            model.vocabulary_tokens,
            self._place.limits.prefill_tokens,
            int(kv_budget_bytes * _SHADOW_SHARE),
        )

    def _reuse(self, model: LoadedModel) -> KVReuse | None:
        if self._shelf is None:
            return None
        digest = ContentDigest(self._files[model.served.name], model.served.digest, self._wake)
        reuse = KVReuse(self._shelf, digest, model, make_forward(model), self._config, self._wake)
        reuse.adapt()
        digest.wait(_DIGEST_SECONDS)
        return reuse

    def _section(self) -> SubgraphsConfig | None:
        return self._config().stable.generation_subgraphs

    def _kv_budget_bytes(self, freed_bytes: int = 0) -> int:
        available = self._place.available_bytes(self._place.device) + freed_bytes
        # Half of it at least: slices come one by one, and one that finds no memory fails alone.
        left = max(available // 2, available - slice_bytes(self._slices, self._section()))
        return int(left * self._place.kv_share)

    def _describe(self, name: str, error: Exception) -> str:
        """For people; the log gets all of it."""
        log.error("model %s: %s can't be loaded", self._served.name, name, exc_info=error)
        return str(error) if isinstance(error, ModelLoadError) else f"{type(error).__name__}: {error}"
