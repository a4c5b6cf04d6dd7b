"""One model that generates, with full weights, quantised ones, or both by turns.

Each set of weights has a GenerationRunner. New requests go to the set that the level asks for; those that run finish
on theirs, and both compute meanwhile. With Resident both sets stay in memory. With Swap one does: the other is loaded
beside it where there is room for a moment, so that nobody waits. Where there isn't, new requests queue, running ones
finish, the old weights go, the new ones come, and the queue goes on. Weights that can't be loaded leave those that ran
before in place until the configuration changes again.

With Resident, a canary's requests get the set that its own configuration asks for while the stable arm's get theirs.
With Swap both arms get the stable arm's. Which arm gets what is decided in `weight_routes.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from sixfold_api.modes import Mode
from sixfold_api.runtime_config import RuntimeConfig, ServedModel
from sixfold_api.scalars import FullWeights
from sixfold_runtime.engine.errors import RequestError
from sixfold_runtime.engine.generation import GenerationRunner
from sixfold_runtime.engine.held_sets import HeldSets, LoadedSet
from sixfold_runtime.engine.kv_reuse import KVReuse
from sixfold_runtime.engine.kv_shelf import Shelf
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import Generate, TaskInfo
from sixfold_runtime.engine.shadow import Shadows
from sixfold_runtime.engine.shadow_generation import GenerationShadow
from sixfold_runtime.engine.swap_queue import SwapQueue
from sixfold_runtime.engine.swap_turn import SwapTurn
from sixfold_runtime.engine.weight_loader import Facts, Load, Place, WeightLoader
from sixfold_runtime.engine.weight_routes import WeightRoutes, wanted_weights
from sixfold_runtime.engine.work import CurrentConfig, Key, Output, arms_in_use

log = logging.getLogger(__name__)
_USUAL_SWAP_SECONDS = 10.0
"""What a client is told to wait for an exchange before the first one was measured."""


class WeightSets:
    """A Runner over one or two GenerationRunners. Used from the engine's thread; counts and reports from any.

    Attributes:
        facts: of the model; they don't change with the weights.
        full_weights: Resident or Swap; None where there is but one set.
        swap_seconds: how long the last exchange took, from the level's change.
        weights_error: why the weights that the level asks for aren't there.
        is_broken: there are no weights and none are on their way, until the configuration changes.
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
        self._place = place
        self._config = config
        self._metrics = metrics
        self._wake = wake
        self._clock = clock
        self._turn = turn or SwapTurn(wake)
        shadow = GenerationShadow(Shadows() if shadows is None else shadows, lambda: self._routes.level_0())
        self._loader = WeightLoader(served, place, config, metrics, wake, shelf, shadow.answered)
        self._load: Load | None = None
        self._is_closing = False  # or running requests finish, so that the weights can go
        self._asked_seconds: float | None = None
        self._load_config: RuntimeConfig | None = None
        self._failed_config: RuntimeConfig | None = None
        self.is_broken = False
        self.swap_seconds: float | None = None
        self.full_weights = self._loader.placement()
        both = self.full_weights is FullWeights.RESIDENT
        loaded, self.weights_error = self._loader.load_first(wanted_weights(served, config().stable), both)
        if self.weights_error:
            self._failed_config = config()
        self._sets = HeldSets(place.device, metrics, loaded)
        self._fallback = loaded[0].name
        self._routes = WeightRoutes(served, config, self.full_weights, self._sets, self._fallback)
        self._sets.enlist(*self._routes.taken)
        assert self._loader.facts is not None
        self.facts: Facts = self._loader.facts
        of_model = metrics.of(served.name)
        self._queue = SwapQueue(place.limits.max_waiting, self.facts.vocabulary_tokens, config, of_model)
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
        return self._is_closing or not self.active

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
            raise self._not_ready()
        if self.is_swapping:
            self._queue.add(key, request, self._seconds_left())
        else:
            self._runner_of(request).submit(key, request)

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
        self._take_loaded()
        if self._load is None:
            self._follow_level()
        if self._load is None:
            self._follow_canary()
        self._reroute()
        if self.full_weights is not FullWeights.RESIDENT:
            self._sets.release([held.name for held in self._sets if held.name != self.active and held.is_idle])
        before, self._last_told = self._last_told, self._told()
        return self._last_told != before

    def _runner_of(self, request: Generate) -> GenerationRunner:
        held = self._sets.get(self._routes.of(request.arm))
        assert held is not None, "without active weights new requests wait"
        return held.runner

    def _follow_canary(self) -> None:
        """Where both sets are to be there and the other one isn't yet, the canary's requests get it when it is."""
        missing, config = self._routes.missing, self._config()
        if missing and self._failed_config is not config:
            self._load_config = config
            self._start(missing)

    def _reroute(self) -> None:
        """Requests that have not begun go to the set that their arm gets now."""
        if not self._routes.follow() or self.is_swapping:
            return
        for held in self._sets:
            self._queue.put_first(held.runner.withdraw())
        self._sets.enlist(*self._routes.taken)
        self._open()

    def _follow_level(self) -> None:
        wanted = self._routes.wanted
        if wanted == self.active or self._failed_config is self._config():
            if self._failed_config is not self._config():
                self.weights_error = ""
            self._asked_seconds = None
            self._turn.end()
            self._open()
            return
        if self._asked_seconds is None:
            self._asked_seconds = self._clock()
        if wanted in self._sets:
            self._activate(wanted)
        elif (held := self._sets.get(self.active)) is None or not self._must_make_room(wanted, held):
            self._load_config = self._config()
            self._start(wanted)
        elif self._is_closing or self._turn.ask():
            self._close(held)
            if held.is_idle:
                self._fallback, self._routes.active = held.name, ""
                del held  # or its weights stay in memory
                self._sets.release([self._fallback])
                self._load_config = self._config()
                self._start(wanted)

    def _must_make_room(self, wanted: str, held: LoadedSet) -> bool:
        """Once it is decided that running requests finish first, it stays so."""
        if self.full_weights is FullWeights.RESIDENT:
            return False
        return self._is_closing or self._turn.is_waiting or not self._loader.fits_beside(wanted, held)

    def _start(self, name: str) -> None:
        log.info("model %s: loading the weights %s", self._served.name, name)
        self.is_broken = False
        old = None if self.full_weights is FullWeights.RESIDENT else self._sets.get(self.active)
        self._load = self._loader.start(name, old, self._wake)

    def _take_loaded(self) -> None:
        """Use what a thread has loaded, or deal with its failure."""
        load = self._load
        if load is None or not load.is_done:
            return
        if load.result is None:
            self._take_failure(load)
        else:
            self._sets.add(load.result)
            if load.name == self._routes.wanted:
                self._exchanged(load.name)
            if load.name == self._routes.wanted or not self.active:
                self._activate(load.name)
        if self._load is load:
            self._load = None

    def _take_failure(self, load: Load) -> None:
        self._metrics.of(self._served.name).swap_failed()
        self._failed_config = self._load_config
        if self.active:
            self.weights_error = load.error
        elif load.name != self._fallback:
            self.weights_error = load.error
            self._start(self._fallback)
        else:
            self.weights_error = f"{self.weights_error}; nor can those that ran before be loaded: {load.error}"
            self.is_broken = True
            self._queue.refuse(self._not_ready())

    def _exchanged(self, name: str) -> None:
        self.weights_error, self._failed_config = "", None
        if self._asked_seconds is None:
            return  # the level went away and came back meanwhile
        self.swap_seconds = self._clock() - self._asked_seconds
        self._metrics.of(self._served.name).swapped(self.swap_seconds)
        log.info(
            "model %s: the weights %s are there after %.2f s, %d requests waited",
            self._served.name, name, self.swap_seconds, len(self._queue),
        )  # fmt: skip

    def _activate(self, name: str) -> None:
        """New requests get these weights from now on, and so do those that have not begun."""
        self._asked_seconds = None
        self._routes.active = name
        self._is_closing = False
        self._reroute()
        self._open()

    def _close(self, held: LoadedSet) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._turn.end()
            self._queue.put_first(held.runner.withdraw())

    def _open(self) -> None:
        self._is_closing = False
        if self.active:
            self._queue.pass_to(self._runner_of)

    def _not_ready(self) -> RequestError:
        return RequestError(503, "model_not_ready", f"model {self._served.name!r} isn't ready: {self.weights_error}")

    def _seconds_left(self) -> float:
        so_far_seconds = 0.0 if self._asked_seconds is None else self._clock() - self._asked_seconds
        return max(1.0, (self.swap_seconds or _USUAL_SWAP_SECONDS) - so_far_seconds)

    def _told(self) -> tuple[object, ...]:
        weights = self.active, self.is_swapping, self._turn.is_waiting, self.is_broken, self.weights_error
        return *weights, self.tasks, self.slice_failures, self.kv and self.kv.block_tokens
