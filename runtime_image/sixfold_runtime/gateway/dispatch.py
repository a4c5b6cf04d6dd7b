"""A request's way to an engine and back: choose, submit, retry where the client can't have noticed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from sixfold_api.scalars import Task
from sixfold_runtime.engine.protocol import SWAPPING, Chunk, Done, Failure, MissingModel, ModelInfo, Request
from sixfold_runtime.gateway.errors import ApiError, unavailable
from sixfold_runtime.gateway.exchange import Exchange
from sixfold_runtime.gateway.pool import Choice, Pool
from sixfold_runtime.gateway.session import EngineLostError, Session

ATTEMPTS = 3
"""A rolling restart may take two engines from under one request."""
ENGINE_WAIT_SECONDS = 5.0
"""How long a request waits for an engine to become ready: the gap of a restart, not of an outage."""


@dataclass(frozen=True)
class Call:
    """One request for an engine.

    Attributes:
        name: the model as the client named it.
        build: makes the engine's request for the engine that was chosen; raises ApiError.
        buffered: nothing reaches the client before the end, so a lost engine can be replaced at any time.
    """

    name: str
    task: Task
    build: Callable[[Choice], Awaitable[Request]]
    buffered: bool


class Restarted:
    """The events so far don't count: their engine was lost and another one begins anew."""


class Dispatcher:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def check_model(self, name: str, task: Task) -> None:
        """Raises ApiError (404) where the engines are known and none serves `name` for `task`."""
        models = self._pool.models
        expected: list[ModelInfo | MissingModel] = [*models, *self._pool.missing]
        if not models or not self._pool.is_introduced or any(self._pool.matches(m, name, task) for m in expected):
            return
        other = next((model.task for model in expected if model.name == name), None)
        if other is not None:
            message = f"the model '{name}' is for {other.lower()}, this endpoint is for {task.lower()}"
        elif not any(model.task == task for model in expected):
            message = f"nothing here does {task.lower()}: the policy has no spec.{task.lower()}"
        else:
            message = f"the model '{name}' does not exist; GET /v1/models lists those that do"
        raise ApiError(404, "model_not_found", message, "model")

    async def events(self, call: Call, exchange: Exchange) -> AsyncGenerator[Chunk | Done | Restarted, None]:
        """Chunks, then a Done without a failure. Closing the iterator cancels at the engine.

        Raises:
            ApiError: no engine, a refusal by the engine, or an engine lost too late for another try.
        """
        self.check_model(call.name, call.task)
        tried: list[Session] = []
        delivered = False
        failure: ApiError | None = None
        while len(tried) < ATTEMPTS:
            # An engine that says when to come again isn't replaced by one that isn't there yet.
            wait_seconds = 0.0 if failure is not None and failure.code == SWAPPING else ENGINE_WAIT_SECONDS
            choice = await self._pool.pick(call.name, call.task, tried, wait_seconds)
            if choice is None:
                break
            tried.append(choice.session)
            exchange.model, exchange.task = choice.model.name, call.task
            request = await call.build(choice)
            if delivered:
                yield Restarted()
            try:
                async with aclosing(self._attempt(choice, request, exchange)) as events:
                    async for event in events:
                        delivered = True
                        yield event
                return
            except EngineLostError:
                failure = unavailable("the engine was lost while it answered; send the request again", "engine_lost")
            except ApiError as error:
                if error.status != 503 and error.code != SWAPPING:
                    raise
                failure = error
            if delivered and not call.buffered:
                raise failure
        raise failure or self._none_ready(call)

    def _none_ready(self, call: Call) -> ApiError:
        if any(model.failed for model in self._pool.missing if self._pool.matches(model, call.name, call.task)):
            return unavailable("the model can't be loaded; the engine's log says why", "model_not_ready", 10.0)
        return unavailable("no engine is ready; try again in a moment", "no_engine_ready")

    async def _attempt(
        self, choice: Choice, request: Request, exchange: Exchange
    ) -> AsyncGenerator[Chunk | Done, None]:
        last_seconds: float | None = None
        async with aclosing(choice.session.events(request)) as events:
            async for event in events:
                if isinstance(event, Done):
                    exchange.level = event.level
                    if event.failure is not None:
                        raise _failed(event.failure)
                    exchange.finish_reason = event.finish_reason
                else:
                    if event.level is not None:
                        exchange.level = event.level
                    last_seconds = exchange.tokens(event, last_seconds)
                yield event


def _failed(failure: Failure) -> ApiError:
    retry_after_seconds = failure.retry_after_seconds
    if retry_after_seconds is None and failure.status in (429, 503):
        retry_after_seconds = 1.0
    return ApiError(failure.status, failure.code, failure.message, retry_after_seconds=retry_after_seconds)
