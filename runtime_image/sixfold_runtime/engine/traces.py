"""What an engine's part of a request's trace is: when it began, gave its first token, and ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sixfold_runtime.engine.protocol import Chunk, Classify, Done, Request
from sixfold_runtime.tracing import Attributes, Tracing


@dataclass
class _Seen:
    request: Request
    arrived_seconds: float
    first_token_seconds: float | None = None


class RequestTraces:
    """The requests of one connection that are traced. The event loop adds to it, the engine's thread ends them."""

    def __init__(self, tracing: Tracing, clock: Callable[[], float] = time.time) -> None:
        self._tracing, self._clock = tracing, clock
        self._seen: dict[str, _Seen] = {}

    def arrived(self, requests: Iterable[Request]) -> None:
        now = self._clock()
        self._seen |= {request.id: _Seen(request, now) for request in requests if request.traceparent}

    def delivered(self, chunks: Sequence[Chunk], dones: Sequence[Done]) -> None:
        if not self._seen:
            return
        now = self._clock()
        for chunk in chunks:
            seen = self._seen.get(chunk.id)
            if seen is not None and seen.first_token_seconds is None and chunk.tokens:
                seen.first_token_seconds = now
        for done in dones:
            seen = self._seen.pop(done.id, None)
            if seen is not None:
                self._record(seen, done, now)

    def forget(self, ids: Iterable[str]) -> None:
        """They were cancelled: their request's own span says so."""
        for request_id in ids:
            self._seen.pop(request_id, None)

    def _record(self, seen: _Seen, done: Done, now: float) -> None:
        request = seen.request
        about: dict[str, str | int | float | bool] = {"sixfold.model": request.model, "sixfold.level": done.level}
        if done.failure is not None:
            about["error.type"] = done.failure.code
        began = min(seen.arrived_seconds + done.queued_seconds, now)

        def record(name: str, begin: float, end: float, more: Attributes) -> None:
            self._tracing.record(name, request.traceparent, begin, end, {**about, **more})

        record("queue", seen.arrived_seconds, began, {})
        prompt = {"gen_ai.usage.input_tokens": done.prompt_tokens}
        if isinstance(request, Classify):
            layers = {} if done.layers is None else {"sixfold.layers": done.layers}
            record("classify", began, now, {**prompt, **layers, "sixfold.exited": done.exited})
            return
        first = now if seen.first_token_seconds is None else seen.first_token_seconds
        record("prefill", began, first, {**prompt, "sixfold.cached_tokens": done.cached_tokens})
        if seen.first_token_seconds is not None:
            tokens = {
                "gen_ai.usage.output_tokens": done.completion_tokens,
                "sixfold.drafted_tokens": done.drafted_tokens,
            }
            record("decode", first, now, {**tokens, "sixfold.accepted_tokens": done.accepted_tokens})
