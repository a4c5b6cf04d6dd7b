"""Which weights of a model new requests get: follows the configuration, loads what is missing, exchanges the sets.

With Swap, the other set is loaded beside the one in use where there is room for a moment. Where there isn't, new
requests queue, running ones finish, the old weights go, and the new ones come. Weights that can't be loaded leave those
that ran before in place until the configuration changes again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from sixfold_api.runtime_config import RuntimeConfig, ServedModel
from sixfold_api.scalars import FullWeights
from sixfold_runtime.engine.errors import RequestError
from sixfold_runtime.engine.generation import GenerationRunner
from sixfold_runtime.engine.held_sets import HeldSets, LoadedSet
from sixfold_runtime.engine.metrics import ModelMetrics
from sixfold_runtime.engine.protocol import Generate
from sixfold_runtime.engine.swap_queue import SwapQueue
from sixfold_runtime.engine.swap_turn import SwapTurn
from sixfold_runtime.engine.weight_loader import Load, WeightLoader
from sixfold_runtime.engine.weight_routes import WeightRoutes
from sixfold_runtime.engine.work import CurrentConfig

log = logging.getLogger(__name__)
_USUAL_SWAP_SECONDS = 10.0
"""What a client is told to wait for an exchange before the first one was measured."""


class WeightExchange:
    """Changed by the engine's thread.

    Attributes:
        swap_seconds: how long the last exchange took, from the level's change.
        weights_error: why the weights that the level asks for aren't there.
        is_broken: there are no weights and none are on their way, until the configuration changes.
    """

    def __init__(
        self,
        served: ServedModel,
        full_weights: FullWeights | None,
        config: CurrentConfig,
        metrics: ModelMetrics,
        loader: WeightLoader,
        sets: HeldSets,
        routes: WeightRoutes,
        queue: SwapQueue,
        turn: SwapTurn,
        wake: Callable[[], None],
        clock: Callable[[], float],
        weights_error: str,
    ) -> None:
        """
        Args:
            turn: asked before new requests have to wait for an exchange.
            wake: called in another thread when `adapt` has something to do.
            weights_error: why the active weights aren't those that the configuration asks for; "": they are.
        """
        self._served = served
        self._full_weights = full_weights
        self._config = config
        self._metrics = metrics
        self._loader = loader
        self._sets = sets
        self._routes = routes
        self._queue = queue
        self._turn = turn
        self._wake = wake
        self._clock = clock
        self._load: Load | None = None
        self._is_closing = False  # or running requests finish, so that the weights can go
        self._asked_seconds: float | None = None
        self._load_config: RuntimeConfig | None = None
        self._failed_config = config() if weights_error else None
        self._fallback = routes.active
        self.weights_error = weights_error
        self.is_broken = False
        self.swap_seconds: float | None = None

    @property
    def active(self) -> str:
        """Name of the weights that new requests of the stable arm get; "" while there are none."""
        return self._routes.active

    @property
    def is_loading(self) -> bool:
        return self._load is not None

    @property
    def is_swapping(self) -> bool:
        """New requests wait for other weights."""
        return self._is_closing or not self.active

    @property
    def seconds_left(self) -> float:
        """Of the exchange, as far as anybody can tell."""
        so_far_seconds = 0.0 if self._asked_seconds is None else self._clock() - self._asked_seconds
        return max(1.0, (self.swap_seconds or _USUAL_SWAP_SECONDS) - so_far_seconds)

    @property
    def not_ready(self) -> RequestError:
        return RequestError(503, "model_not_ready", f"model {self._served.name!r} isn't ready: {self.weights_error}")

    def runner_of(self, request: Generate) -> GenerationRunner:
        """Which computes a request's answer; not while it would have to wait for weights."""
        held = self._sets.get(self._routes.of(request.arm))
        assert held is not None, "without active weights new requests wait"
        return held.runner

    def adapt(self) -> None:
        """Follow the level; to be called after every step and whenever `wake` or the configuration says so."""
        self._take_loaded()
        if self._load is None:
            self._follow_level()
        if self._load is None:
            self._follow_canary()
        self._reroute()
        if self._full_weights is not FullWeights.RESIDENT:
            self._sets.release([held.name for held in self._sets if held.name != self.active and held.is_idle])

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
        if self._full_weights is FullWeights.RESIDENT:
            return False
        return self._is_closing or self._turn.is_waiting or not self._loader.fits_beside(wanted, held)

    def _start(self, name: str) -> None:
        log.info("model %s: loading the weights %s", self._served.name, name)
        self.is_broken = False
        old = None if self._full_weights is FullWeights.RESIDENT else self._sets.get(self.active)
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
        self._metrics.swap_failed()
        self._failed_config = self._load_config
        if self.active:
            self.weights_error = load.error
        elif load.name != self._fallback:
            self.weights_error = load.error
            self._start(self._fallback)
        else:
            self.weights_error = f"{self.weights_error}; nor can those that ran before be loaded: {load.error}"
            self.is_broken = True
            self._queue.refuse(self.not_ready)

    def _exchanged(self, name: str) -> None:
        self.weights_error, self._failed_config = "", None
        if self._asked_seconds is None:
            return  # the level went away and came back meanwhile
        self.swap_seconds = self._clock() - self._asked_seconds
        self._metrics.swapped(self.swap_seconds)
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
            self._queue.pass_to(self.runner_of)
