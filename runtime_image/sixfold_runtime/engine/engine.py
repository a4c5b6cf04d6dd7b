"""The engine: one thread owns all models and computes; any other thread submits and cancels through a queue."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.engine.device import choose_device, set_threads
from sixfold_runtime.engine.engine_commands import Call, Cancel, Stop, Submit
from sixfold_runtime.engine.errors import RequestError
from sixfold_runtime.engine.kv_reuse import kv_reuse_in_use
from sixfold_runtime.engine.kv_shelf import Shelf
from sixfold_runtime.engine.live_requests import LiveRequests
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.model import EngineModel
from sixfold_runtime.engine.protocol import Generate, Request
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.engine.shadow import Shadows
from sixfold_runtime.engine.swap_turn import SwapTurn
from sixfold_runtime.engine.work import CurrentConfig, Sink, engine_error, failed

log = logging.getLogger(__name__)

_STOP_SECONDS = 10.0


class Engine:
    """Serves models.

    Attributes:
        models: by name, in the order of the settings.
        shelf: where keys and values are kept; None where no model generates.
        shadows: answers that are still to be computed again.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        config: CurrentConfig,
        metrics: EngineMetrics,
        *,
        device: str = "auto",
        limits: Limits | None = None,
        redis_directory: Path | None = None,
        on_models: Callable[[], None] = lambda: None,
        on_counts: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            config: gives the RuntimeConfig in use, whenever asked.
            device: auto, cpu or cuda.
            limits: of each model, by default what suits the device; kv_tokens is derived from the memory.
            redis_directory: of the Redis in which keys and values are kept, where the configuration wants one.
            on_models: called in the engine's thread when a model was loaded or failed to, or its weights changed.
            on_counts: called in the engine's thread when the number of running or waiting requests changed.
        """
        generates = any(model.task == Task.GENERATION for model in models)
        self.shelf = Shelf.open(metrics, redis_directory, device) if generates else None
        self.shadows = Shadows()
        self.models = {
            model.name: EngineModel(
                model, metrics, SwapTurn(self.config_changed), config, self.shadows, shelf=self.shelf
            )
            for model in models
        }
        self._config = config
        self._metrics = metrics
        self._device_name = device
        self._limits = limits
        self._on_models = on_models
        self._on_counts = on_counts
        self._commands: queue.Queue[Submit | Cancel | Call | Stop] = queue.Queue()
        self._live = LiveRequests()
        self._draining = False
        self._counts = (0, 0)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Load the models and serve them, in the engine's thread; returns at once."""
        self._thread.start()

    def submit(self, sink: Sink, requests: Iterable[Request]) -> None:
        """Queue requests; each gets exactly one Done through the sink unless it is cancelled."""
        for request in requests:
            try:
                self._check(request)
            except RequestError as error:
                self._refuse(sink, request, error)
            else:
                self._commands.put(Submit(sink, request))

    def cancel(self, sink: Sink, ids: Iterable[str]) -> None:
        """Stop these within one step; no Done follows."""
        self._commands.put(Cancel(sink, tuple(ids)))

    def drop(self, sink: Sink) -> None:
        """Cancel all requests of a sink: whoever wanted them is gone."""
        self._commands.put(Cancel(sink, None))

    def give_turns(self, names: AbstractSet[str]) -> None:
        """Let these models exchange their weights: no other engine does at the moment."""
        for name in names & self.models.keys():
            self.models[name].turn.give()

    def config_changed(self) -> None:
        """Follow the configuration, even while there are no requests."""
        self.call(lambda: None)

    def call(self, action: Callable[[], None]) -> None:
        """Do something between two steps, in the engine's thread."""
        self._commands.put(Call(action))

    def drain(self) -> None:
        """Take no new requests; running and queued ones go on."""
        self._draining = True

    def stop(self) -> None:
        """End the thread after the current step; whatever still runs fails with 503. Blocks up to 10 s."""
        if self._thread.is_alive():
            self._commands.put(Stop())
            self._thread.join(_STOP_SECONDS)  # a model that is still loading can't be interrupted

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

    @property
    def is_ready(self) -> bool:
        """Every model is loaded, has answered a first forward, and new work is taken."""
        return bool(self.models) and not self._draining and all(model.is_ready for model in self.models.values())

    @property
    def is_draining(self) -> bool:
        return self._draining

    @property
    def is_idle(self) -> bool:
        """No request is running, queued or about to be."""
        return self._commands.unfinished_tasks == 0 and not self._live

    @property
    def running(self) -> int:
        return sum(model.runner.running for model in self.models.values() if model.runner)

    @property
    def waiting(self) -> int:
        return sum(model.runner.waiting for model in self.models.values() if model.runner)

    def why_not_ready(self) -> str:
        """For people: what keeps the engine from being ready; "" if nothing does."""
        if self._draining:
            return "draining: the engine is about to stop"
        if not self.models:
            return "no models: SIXFOLD_MODELS is empty"
        reasons = {name: model.why_not_ready for name, model in self.models.items()}
        return "; ".join(f"model {name}: {reason}" for name, reason in reasons.items() if reason)

    def _check(self, request: Request) -> None:
        """Refuse what needs no look at the model. Raises RequestError."""
        if self._draining:
            raise RequestError(503, "engine_draining", "this engine is about to stop: try again on another one")
        model = self.models.get(request.model)
        if model is None:
            raise RequestError(404, "model_not_found", f"this engine has no model {request.model!r}")
        wanted = Task.GENERATION if isinstance(request, Generate) else Task.CLASSIFICATION
        if (model.served.task == Task.GENERATION) != (wanted == Task.GENERATION):
            raise RequestError(400, "wrong_task", f"model {request.model!r} is for {model.served.task}, not {wanted}")
        if model.runner is None:
            raise RequestError(503, "model_not_ready", f"model {request.model!r} isn't ready: {model.why_not_ready}")

    def _refuse(self, sink: Sink, request: Request, error: RequestError) -> None:
        level = self._config().of(request.arm).level
        if request.model in self.models:  # anything else would put a client's words into a label
            self._metrics.of(request.model).ended(level, error.code)
        sink.deliver([], [failed(request.id, level, error, len(request.token_ids))])

    # From here on: the engine's thread.

    def _run(self) -> None:
        set_threads()
        self._adapt()  # what is kept is within reach by the time that the models are there
        self._load_models()
        while self._obey():
            for model in self.models.values():
                if model.can_step:
                    self._step(model)
            self._adapt()
            self._report_counts()
            if self._has_spare_time and self._commands.empty():
                self.shadows.advance()
        stopped = RequestError(503, "engine_stopped", "the engine stopped before this request was done: try again")
        self._live.fail_all(self._config().stable.level, stopped)
        self.shadows.clear()
        for model in self.models.values():
            model.close()
        if self.shelf is not None:
            self.shelf.store.close()

    def _load_models(self) -> None:
        try:
            device = choose_device(self._device_name)
        except ValueError as error:
            for model in self.models.values():
                model.error = str(error)
            self._on_models()
            return
        generating = sum(model.served.task == Task.GENERATION for model in self.models.values())
        for model in self.models.values():
            model.load(device, generating, self._limits, self.config_changed)
            self._on_models()

    def _obey(self) -> bool:
        """Do what was asked for; waits while there is nothing to compute. False when asked to stop."""
        while True:
            try:
                command = self._commands.get(block=not (self._can_step or self._has_spare_time))
            except queue.Empty:
                return True
            if isinstance(command, Stop):
                return False
            if isinstance(command, Submit):
                self._admit(command.sink, command.request)
            elif isinstance(command, Cancel):
                self._live.cancel(command.sink, command.ids)
            else:
                self._call(command)
            self._adapt()
            self._commands.task_done()
            self._report_counts()

    @property
    def _can_step(self) -> bool:
        return any(model.can_step for model in self.models.values())

    @property
    def _has_spare_time(self) -> bool:
        """Nobody waits for anything that could be computed now, and there are answers to compute again."""
        return len(self.shadows) > 0 and not self._draining and not self._can_step

    def _adapt(self) -> None:
        """Let weights, and what is kept, follow the configuration."""
        if self.shelf is not None:
            self.shelf.follow(kv_reuse_in_use(self._config()))
        if [model for model in self.models.values() if model.adapt()]:
            self._on_models()

    def _admit(self, sink: Sink, request: Request) -> None:
        runner = self.models[request.model].runner
        assert runner is not None, "submit() lets only requests for loaded models pass"
        try:
            self._live.submit(sink, request, runner)
        except RequestError as error:
            self._refuse(sink, request, error)
        except Exception:  # a fault of ours: it ends this request, not the loop
            log.exception("model %s: a request can't be taken", request.model)
            self._refuse(sink, request, engine_error())

    def _call(self, command: Call) -> None:
        try:
            command.action()
        except Exception:  # a fault of ours: the loop goes on
            log.exception("the engine was asked for something and failed")

    def _step(self, model: EngineModel) -> None:
        try:
            outputs = model.step()
        except Exception:  # a fault of ours: end the requests of this model, not the loop
            log.exception("model %s: a step failed", model.served.name)
            assert model.runner is not None
            outputs = self._live.abandon(model.runner, self._config().stable.level, engine_error())
        self._live.deliver(outputs)

    def _report_counts(self) -> None:
        counts = (self.running, self.waiting)
        if counts != self._counts:
            self._counts = counts
            self._on_counts()
