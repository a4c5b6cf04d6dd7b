"""Requests that wait while a model's weights are exchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sixfold_runtime.engine.errors import RequestError
from sixfold_runtime.engine.generation import GenerationRunner
from sixfold_runtime.engine.metrics import ModelMetrics
from sixfold_runtime.engine.protocol import SWAPPING, Generate
from sixfold_runtime.engine.work import CurrentConfig, Key, Output, check_prompt, check_sampling, failed


class SwapQueue:
    """First come, first served, and bounded."""

    def __init__(self, max_requests: int, vocabulary_tokens: int, config: CurrentConfig, metrics: ModelMetrics) -> None:
        self._max_requests = max_requests
        self._vocabulary_tokens = vocabulary_tokens
        self._config = config
        self._metrics = metrics
        self._waiting: dict[Key, Generate] = {}
        self._refused: dict[Key, Output] = {}
        metrics.watch_swap_queue(self.__len__)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def has_refused(self) -> bool:
        return bool(self._refused)

    def add(self, key: Key, request: Generate, seconds_left: float) -> None:
        """Raises RequestError: the request can't be served, or too many wait already (429)."""
        check_prompt(request.token_ids, self._vocabulary_tokens)
        check_sampling(request.sampling)
        if len(self._waiting) >= self._max_requests:
            raise RequestError(
                429,
                SWAPPING,
                f"the model's weights are being exchanged and {len(self._waiting)} requests wait for that: "
                f"try again in about {seconds_left:.0f} s",
                seconds_left,
            )
        self._waiting[key] = request

    def put_first(self, requests: Iterable[tuple[Key, Generate]]) -> None:
        """Those that came before all that wait."""
        self._waiting = {**dict(requests), **self._waiting}

    def cancel(self, key: Key) -> None:
        """An unknown request is ignored."""
        if (request := self._waiting.pop(key, None)) is not None:
            self._metrics.ended(self._config().of(request.arm).level, "cancelled")
        self._refused.pop(key, None)

    def pass_to(self, runner_of: Callable[[Generate], GenerationRunner]) -> None:
        waiting, self._waiting = self._waiting, {}
        for key, request in waiting.items():
            try:
                runner_of(request).submit(key, request)
            except RequestError as error:
                self._refuse(key, request, error)

    def refuse(self, error: RequestError) -> None:
        """There will be no weights."""
        waiting, self._waiting = self._waiting, {}
        for key, request in waiting.items():
            self._refuse(key, request, error)

    def take_refused(self) -> list[Output]:
        refused, self._refused = self._refused, {}
        return list(refused.values())

    def _refuse(self, key: Key, request: Generate, error: RequestError) -> None:
        level = self._config().of(request.arm).level
        self._metrics.ended(level, error.code)
        self._refused[key] = key[0], failed(request.id, level, error, len(request.token_ids))
