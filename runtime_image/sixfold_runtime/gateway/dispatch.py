"""A request's way to an engine and back: choose, submit, retry where the client can't have noticed."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass

from msgspec.structs import replace

from sixfold_api.gateway import Priority
from sixfold_api.scalars import Task
from sixfold_runtime.engine.protocol import SWAPPING, Chunk, Done, Failure, Generate, MissingModel, ModelInfo, Request
from sixfold_runtime.gateway.affinity import conversation_key, prompt_key
from sixfold_runtime.gateway.batcher import Batcher, Group, Placed, Ticket
from sixfold_runtime.gateway.errors import ApiError, deadline_exceeded, unavailable
from sixfold_runtime.gateway.exchange import Exchange
from sixfold_runtime.gateway.pool import Choice, Pool
from sixfold_runtime.gateway.session import EngineLostError, Session, Stream
from sixfold_runtime.gateway.tasks import task_required, unknown_task
from sixfold_runtime.modes.batching import Waiting

ATTEMPTS = 3
"""A rolling restart may take two engines from under one request."""
MAX_WAITING = 1000
"""Requests that wait for an engine to become ready; those that come then are sent away."""


@dataclass(frozen=True)
class Call:
    """One request for an engine.

    Attributes:
        name: the model as the client named it.
        task: what the endpoint does.
        build: makes the engine's request for the engine that was chosen; raises ApiError.
        buffered: nothing reaches the client before the end, so a lost engine can be replaced at any time.
        slice: the task slice to compute with; "" for none.
        wait_seconds: how long to wait for an engine to become ready.
        priority: of those that wait, the higher one is next.
        deadline_seconds: time.monotonic() from which on a request that hasn't reached an engine is given up.
        conversation: what the client calls the conversation; its turns go to one engine where that has room.
    """

    name: str
    task: Task
    build: Callable[[Choice], Awaitable[Request]]
    buffered: bool
    slice: str = ""
    wait_seconds: float | None = None
    """None is what a client waits."""
    priority: Priority = Priority.NORMAL
    deadline_seconds: float | None = None
    conversation: str = ""


class Restarted:
    """The events so far don't count: their engine was lost and another one begins anew."""


class Dispatcher:
    """Attributes:
    waiting: requests that wait for an engine to become ready.
    """

    def __init__(
        self,
        pool: Pool,
        batcher: Batcher,
        configured_tasks: Callable[[Task], Collection[str]],
        engine_wait_seconds: Callable[[], float],
    ) -> None:
        """`configured_tasks` names the task slices that the configuration offers for generation or classification;
        `engine_wait_seconds` says how long a request waits for an engine to become ready."""
        self._pool = pool
        self._batcher = batcher
        self._configured_tasks = configured_tasks
        self._engine_wait_seconds = engine_wait_seconds
        self.waiting = 0

    def check(self, name: str, task: Task, slice_name: str) -> None:
        """Raises ApiError (404, or 400 where a task must be named) where the engines are known and none can serve
        `name` with this task slice."""
        if not self._pool.models or not self._pool.is_introduced:
            return
        self._check_model(name, task)
        known = self._pool.tasks(name, task)
        if slice_name:
            # Engines may be a configuration behind this gateway, or ahead of it.
            if slice_name not in known and slice_name not in self._configured_tasks(task):
                raise unknown_task(slice_name, known)
        elif known and task is not Task.GENERATION:
            models = [model for model in self._pool.models if self._pool.matches(model, name, task)]
            if models and not any(model.labels for model in models):
                raise task_required(known)

    def _check_model(self, name: str, task: Task) -> None:
        expected: list[ModelInfo | MissingModel] = [*self._pool.models, *self._pool.missing]
        if any(self._pool.matches(model, name, task) for model in expected):
            return
        other = next((model.task for model in expected if model.name == name), None)
        if other is not None:
            does = "generation" if other == Task.GENERATION else "classification"
            message = f"the model '{name}' is for {does}, this endpoint is for {task.lower()}"
        elif not any((model.task == Task.GENERATION) == (task is Task.GENERATION) for model in expected):
            message = f"nothing here does {task.lower()}: the policy has no spec.{task.lower()}"
        else:
            message = f"the model '{name}' does not exist; GET /v1/models lists those that do"
        raise ApiError(404, "model_not_found", message, "model")

    async def events(self, call: Call, exchange: Exchange) -> AsyncGenerator[Chunk | Done | Restarted, None]:
        """Chunks, then a Done without a failure. Closing the iterator cancels at the engine.

        Raises:
            ApiError: no engine, a refusal by the engine, or an engine lost too late for another try.
        """
        self.check(call.name, call.task, call.slice)
        arrived_seconds = time.monotonic()
        tried: list[Session] = []
        delivered = False
        failure: ApiError | None = None
        while len(tried) < ATTEMPTS:
            # An engine that says when to come again isn't replaced by one that isn't there yet.
            is_swapping = failure is not None and failure.code == SWAPPING
            choice = await self._pick(call, tried, 0.0 if is_swapping else call.wait_seconds)
            if choice is None:
                break
            exchange.model, exchange.task, exchange.slice = choice.model.name, call.task, call.slice
            request = await call.build(choice)
            if exchange.trace is not None:
                request = replace(request, traceparent=exchange.trace.traceparent)
            exchange.longest_tokens = max(exchange.longest_tokens, len(request.token_ids))
            placed = await self._place(_ticket(call, choice, request, arrived_seconds, tried), exchange)
            if placed is None:
                continue
            tried.append(placed.session)
            with closing(placed.stream):
                if delivered:
                    yield Restarted()
                try:
                    async with aclosing(self._attempt(placed.stream, exchange)) as events:
                        async for event in events:
                            delivered = True
                            yield event
                    return
                except EngineLostError:
                    failure = unavailable(
                        "the engine was lost while it answered; send the request again", "engine_lost"
                    )
                except ApiError as error:
                    if error.status != 503 and error.code != SWAPPING:
                        raise
                    failure = error
            if delivered and not call.buffered:
                raise failure
        raise failure or self._none_ready(call)

    async def _place(self, ticket: Ticket, exchange: Exchange) -> Placed | None:
        began_seconds = time.time()
        placed = await self._batcher.place(ticket)
        if exchange.trace is not None:
            pod = "" if placed is None or placed.session.state is None else placed.session.state.pod
            exchange.trace.part("batch", began_seconds, {"sixfold.engine": pod})
        return placed

    async def _pick(self, call: Call, tried: Sequence[Session], wait_seconds: float | None) -> Choice | None:
        """An engine that could serve the call. Raises ApiError (504) where the deadline ends the wait for one."""
        most_seconds = self._engine_wait_seconds() if wait_seconds is None else wait_seconds
        left_seconds = math.inf if call.deadline_seconds is None else call.deadline_seconds - time.monotonic()
        if left_seconds <= 0:
            raise deadline_exceeded()
        if self.waiting >= MAX_WAITING:
            raise unavailable(f"{MAX_WAITING} requests wait for an engine already", "no_engine_ready", 10.0)
        self.waiting += 1
        try:
            within_seconds = min(most_seconds, left_seconds)
            choice = await self._pool.pick(lambda model: self._suits(model, call), tried, within_seconds)
        finally:
            self.waiting -= 1
        if choice is None and left_seconds < most_seconds:
            raise deadline_exceeded()
        return choice

    def _suits(self, model: ModelInfo, call: Call) -> bool:
        return self._pool.matches(model, call.name, call.task) and (
            not call.slice or any(info.name == call.slice for info in model.tasks)
        )

    def _none_ready(self, call: Call) -> ApiError:
        matching = [model for model in self._pool.models if self._pool.matches(model, call.name, call.task)]
        if call.slice and any(self._pool.is_ready(model) for model in matching):
            message = f"no engine offers the task '{call.slice}' so far; try again in a moment"
            return unavailable(message, "task_not_ready")
        if any(model.failed for model in self._pool.missing if self._pool.matches(model, call.name, call.task)):
            return unavailable("the model can't be loaded; the engine's log says why", "model_not_ready", 10.0)
        return unavailable("no engine is ready; try again in a moment", "no_engine_ready")

    async def _attempt(self, stream: Stream, exchange: Exchange) -> AsyncGenerator[Chunk | Done, None]:
        last_seconds: float | None = None
        async for event in stream:
            if isinstance(event, Done):
                exchange.ended(event)
                if event.failure is not None:
                    raise _failed(event.failure)
            else:
                if event.level is not None:
                    exchange.level = event.level
                last_seconds = exchange.tokens(event, last_seconds)
            yield event


def _ticket(call: Call, choice: Choice, request: Request, arrived_seconds: float, tried: Sequence[Session]) -> Ticket:
    affinity = None
    if isinstance(request, Generate) and request.kv_reuse and choice.model.kv_block_tokens:
        if call.conversation:
            affinity = conversation_key(request.tenant, call.conversation)
        else:
            affinity = prompt_key(request.tenant, request.token_ids, choice.model.kv_block_tokens)
    waiting = Waiting[str, Session](
        request.id,
        len(request.token_ids),
        arrived_seconds,
        request.tenant,
        call.priority,
        call.deadline_seconds,
        excluded=tuple(tried),
    )
    return Ticket(request, Group.of(choice.model, call.slice), waiting, affinity)


def _failed(failure: Failure) -> ApiError:
    retry_after_seconds = failure.retry_after_seconds
    if retry_after_seconds is None and failure.status in (429, 503):
        retry_after_seconds = 1.0
    return ApiError(failure.status, failure.code, failure.message, retry_after_seconds=retry_after_seconds)
