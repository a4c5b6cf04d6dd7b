"""One model that generates, with full weights, quantised ones, or both by turns.

Each set of weights has a GenerationRunner. New requests go to the set that the level asks for; those that run finish
on theirs, and both compute meanwhile. With Resident both sets stay in memory, with Swap one does; how one gives way to
the other is in `weight_exchange.py`.

With Resident, a canary's requests get the set that its own configuration asks for while the stable arm's get theirs.
With Swap both arms get the stable arm's. Which arm gets what is decided in `weight_routes.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sixfold_api.modes import Mode
from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import FullWeights
from sixfold_runtime.engine.held_sets import HeldSets
from sixfold_runtime.engine.kv_reuse import KVReuse
from sixfold_runtime.engine.kv_shelf import Shelf
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import Generate, TaskInfo
from sixfold_runtime.engine.shadow import Shadows
from sixfold_runtime.engine.shadow_generation import GenerationShadow
from sixfold_runtime.engine.swap_queue import SwapQueue
from sixfold_runtime.engine.swap_turn import SwapTurn
from sixfold_runtime.engine.weight_exchange import WeightExchange
from sixfold_runtime.engine.weight_loader import Facts, Place, WeightLoader
from sixfold_runtime.engine.weight_routes import WeightRoutes, wanted_weights
from sixfold_runtime.engine.work import CurrentConfig, Key, Output, arms_in_use


class WeightSets:
    """A Runner over one or two GenerationRunners. Used from the engine's thread; counts and reports from any.

    Attributes:
        facts: of the model; they don't change with the weights.
        full_weights: Resident or Swap; None where there is but one set.
    """

    def __init__(
        self,
        served: ServedModel,
        place: Place,
        config: CurrentConfig,
        metrics: EngineMetrics,
        wake: Callable[[], None] = lambda: None,
        turn: SwapTurn | None = None,
        shelf: Shelf | None = None,
        shadows: Shadows | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load what the level asks for, the other weights too if they are to be resident, and the draft.

        Args:
            wake: called in another thread when `adapt` has something to do.
            turn: asked before new requests have to wait for an exchange.
            shelf: where keys and values are found and kept; None: nowhere.
            shadows: where answers go that are to be computed again; None: nowhere.

        Raises:
            ModelLoadError: no weights could be loaded.
        """
        self._served = served
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._turn = turn or SwapTurn(wake)
        shadow = GenerationShadow(Shadows() if shadows is None else shadows, lambda: self._routes.level_0())
        self._loader = WeightLoader(served, place, config, metrics, wake, shelf, shadow.answered)
        self.full_weights = self._loader.placement()
        both = self.full_weights is FullWeights.RESIDENT
        loaded, weights_error = self._loader.load_first(wanted_weights(served, config().stable), both)
        self._sets = HeldSets(place.device, metrics, loaded)
        self._routes = WeightRoutes(served, config, self.full_weights, self._sets, loaded[0].name)
        self._sets.enlist(*self._routes.taken)
        assert self._loader.facts is not None
        self.facts: Facts = self._loader.facts
        of_model = metrics.of(served.name)
        self._queue = SwapQueue(place.limits.max_waiting, self.facts.vocabulary_tokens, config, of_model)
        self._exchange = WeightExchange(
            served,
            self.full_weights,
            config,
            of_model,
            self._loader,
            self._sets,
            self._routes,
            self._queue,
            self._turn,
            wake,
            clock,
            weights_error,
        )
        self._last_told = self._told()

    # -- what there is

    @property
    def active(self) -> str:
        """Name of the weights that new requests of the stable arm get; "" while there are none."""
        return self._routes.active

    @property
    def shadow_off(self) -> str:
        """Why answers aren't computed again although the configuration says so; "" where they are."""
        return self._routes.shadow_off

    @property
    def context_tokens(self) -> int:
        return min((held.runner.context_tokens for held in self._sets), default=self.facts.context_tokens)

    @property
    def running(self) -> int:
        return self._sets.running

    @property
    def waiting(self) -> int:
        return self._sets.waiting + len(self._queue)

    @property
    def kv_bytes(self) -> int:
        return self._sets.kv_bytes

    @property
    def can_step(self) -> bool:
        """Whether a step would do something now: requests that wait for weights or slices don't count."""
        return self._queue.has_refused or self._sets.can_step

    @property
    def is_swapping(self) -> bool:
        """New requests wait for other weights."""
        return self._exchange.is_swapping

    @property
    def is_broken(self) -> bool:
        """There are no weights and none are on their way, until the configuration changes."""
        return self._exchange.is_broken

    @property
    def weights_error(self) -> str:
        """Why the weights that the level asks for aren't there."""
        return self._exchange.weights_error

    @property
    def swap_seconds(self) -> float | None:
        """How long the last exchange took, from the level's change."""
        return self._exchange.swap_seconds

    @property
    def unsupported(self) -> dict[Mode, str]:
        """Modes that are on but don't run, and why."""
        arms, found = arms_in_use(self._config()), dict[Mode, str]()
        for name in reversed(self._routes.taken):
            if held := self._sets.get(name):
                found |= held.runner.notes.unsupported
        if problem := self._routes.why_not_quantized(self.weights_error):
            found[Mode.QUANTIZED] = problem
        drafts = any(arm.speculative is not None for arm in arms)
        if drafts and (self._served.draft is None or self._loader.draft_error):
            found[Mode.SPECULATIVE] = self._loader.draft_error or "this pod was started without a draft model"
        return {mode: reason for mode, reason in found.items() if any(arm.is_active(mode) for arm in arms)}

    @property
    def draft_shortened(self) -> str:
        return held.runner.notes.draft_shortened if (held := self._sets.get(self.active)) else ""

    @property
    def tasks(self) -> tuple[TaskInfo, ...]:
        """That requests may name."""
        return self._sets.tasks

    @property
    def slice_failures(self) -> dict[str, str]:
        """Tasks among them that can't be had, and why."""
        return self._sets.slice_failures

    @property
    def kv(self) -> KVReuse | None:
        """What new requests reuse; None while there is nothing."""
        return held.runner.kv if (held := self._sets.get(self.active)) else None

    # -- the Runner

    def submit(self, key: Key, request: Generate) -> None:
        """Hand a request to the weights that the level asks for, or queue it until they are there.

        Raises:
            RequestError: it can't be served; nothing was queued. 429 if too many wait for weights already.
        """
        if self.is_broken:
            raise self._exchange.not_ready
        if self.is_swapping:
            self._queue.add(key, request, self._exchange.seconds_left)
        else:
            self._exchange.runner_of(request).submit(key, request)

    def cancel(self, key: Key) -> None:
        """Forget a request; an unknown one is ignored."""
        self._queue.cancel(key)
        for held in self._sets:
            held.runner.cancel(key)

    def keep_nothing_of(self, tenant: str) -> None:
        """What is being computed for a tenant is not kept."""
        for held in self._sets:
            held.runner.keep_nothing_of(tenant)

    def step(self) -> list[Output]:
        """A step of each set of weights that has requests."""
        outputs = self._queue.take_refused()
        for held in self._sets:
            if held.runner.can_step:
                started = self._clock()
                outputs += held.runner.step()
                self._metrics.of(held.name).busy(self._clock() - started)
        return outputs

    def close(self) -> None:
        """End the runners' own threads."""
        for held in self._sets:
            held.runner.close()

    # -- levels

    def adapt(self) -> bool:
        """Follow the level; to be called after every step and whenever `wake` or the configuration says so.

        Returns whether anything changed that operator and gateways are told.
        """
        self._sets.adapt(*self._routes.taken)
        self._exchange.adapt()
        before, self._last_told = self._last_told, self._told()
        return self._last_told != before

    def _told(self) -> tuple[object, ...]:
        weights = self.active, self.is_swapping, self._turn.is_waiting, self.is_broken, self.weights_error
        return *weights, self.tasks, self.slice_failures, self.kv and self.kv.block_tokens
