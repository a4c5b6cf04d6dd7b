"""What the endpoints share: settings, keys, limits, engines, metrics, and the way into each request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from sixfold_api.runtime_config import EffectiveConfig, ModelState, PodState, Role
from sixfold_api.scalars import Task
from sixfold_runtime.config import ConfigStore
from sixfold_runtime.gateway.activity import Activity
from sixfold_runtime.gateway.batcher import Batcher
from sixfold_runtime.gateway.deadline import Deadlines
from sixfold_runtime.gateway.dictionary import DictionaryFile
from sixfold_runtime.gateway.dispatch import Dispatcher
from sixfold_runtime.gateway.envelope import API_PREFIX, REQUEST_ID_HEADER
from sixfold_runtime.gateway.errors import DEADLINE_EXCEEDED, ApiError
from sixfold_runtime.gateway.exchange import Exchange, request_id
from sixfold_runtime.gateway.headers import asked_terms
from sixfold_runtime.gateway.keys import ApiKeys
from sixfold_runtime.gateway.limits import RateLimiter
from sixfold_runtime.gateway.metrics import GatewayMetrics
from sixfold_runtime.gateway.pool import Pool
from sixfold_runtime.gateway.sse import ClientLeftError, read_body
from sixfold_runtime.modes.arms import arm_key, arm_of
from sixfold_runtime.settings import RuntimeSettings
from sixfold_runtime.tls import PeerContext
from sixfold_runtime.tracing import TRACEPARENT_HEADER, tracing_for

RESTART_SECONDS = 5.0
"""How long a request waits for an engine to become ready: the gap of a restart, not of an outage."""
WAKE_SECONDS = 900.0
"""How long it waits where engines sleep: until one is placed, started and loaded. Its own time may end before."""


class Gateway:
    """One gateway process.

    Attributes:
        draining: set after SIGTERM: unready, but still answering.
    """

    def __init__(self, settings: RuntimeSettings, config: ConfigStore) -> None:
        """Raises ValueError on an engine that isn't host:port."""
        self.settings = settings
        self.config = config
        self._tls = PeerContext(settings.tls_directory, is_server=False) if settings.tls_directory else None
        self.pool = Pool(settings.engines, settings.policy, self._tls)
        self.metrics = GatewayMetrics(settings, config, self.pool, lambda: self.dispatcher.waiting)
        self._batcher = Batcher(self.pool, config, self.metrics.registry, (settings.namespace, settings.policy))
        self.dispatcher = Dispatcher(self.pool, self._batcher, self._configured_tasks, self._engine_wait_seconds)
        self.draining = False
        self.started_unix_seconds = int(time.time())
        self._keys = ApiKeys(settings.api_keys_directory)
        self.stream_dictionary = DictionaryFile(settings.stream_dictionary_directory)
        self._limiter = RateLimiter()
        self._deadlines = Deadlines()
        self._tracing = tracing_for(Role.GATEWAY, settings)
        self._activity = Activity()

    async def run(self) -> None:
        """Follow engines and keys until cancelled. The configuration is followed by whoever made the store."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.pool.run())
            tasks.create_task(self._batcher.run())
            tasks.create_task(self._keys.run())

    async def close(self) -> None:
        """Once nothing runs any more."""
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    def _engine_wait_seconds(self) -> float:
        return WAKE_SECONDS if self.config.current.stable.may_sleep else RESTART_SECONDS

    def begin(self, headers: Headers, path: str) -> Exchange:
        stable = self.config.current.stable
        deadline = self._deadlines.begin(time.monotonic() + stable.request_limits.timeout_seconds)
        exchange = Exchange(request_id(headers.get(REQUEST_ID_HEADER, "")), self.metrics, stable.level, path, deadline)
        if self._tracing is not None and path.startswith(API_PREFIX):
            about = {"url.path": path[:200], "sixfold.request_id": exchange.id}
            exchange.trace = self._tracing.request(headers.get(TRACEPARENT_HEADER, ""), about)
        return exchange

    def drain(self, seconds: float) -> None:
        """Be unready from now on, and end in `seconds` with an error what runs then."""
        self.draining = True
        asyncio.get_running_loop().call_later(seconds, self._deadlines.end_all)

    def authenticate(self, request: Request) -> None:
        """Raises ApiError (401)."""
        tenant = self._keys.tenant(request.headers.get("authorization", ""))
        if tenant is None:
            raise ApiError(
                401,
                "invalid_api_key",
                "missing or wrong API key; send it as `Authorization: Bearer <key>`",
                headers={"WWW-Authenticate": "Bearer"},
            )
        exchange_of(request).tenant = tenant

    def admit(self, request: Request) -> Exchange:
        """Let a request in that may run. Raises ApiError (401, 429)."""
        self.authenticate(request)
        exchange = exchange_of(request)
        limit = self.config.current.stable.rate_limit
        wait_seconds = self._limiter.wait_seconds(exchange.tenant, limit, time.monotonic())
        if wait_seconds > 0:
            self.metrics.rate_limited()
            raise ApiError(
                429,
                "rate_limit_exceeded",
                f"too many requests with this key; the next may come in {wait_seconds:.2f} s",
                retry_after_seconds=wait_seconds,
            )
        return exchange

    async def admit_task(self, request: Request, task: Task) -> bytes:
        """The body of a request for an engine, whose terms are known then.

        Raises:
            ApiError: it may not run (400, 401, 403, 429), or its body is too large (413) or too slow (408).
        """
        exchange_of(request).task = task
        exchange, stable = self.admit(request), self.config.current.stable
        self._activity.begin()
        exchange.activity = self._activity
        limits = stable.request_limits
        exchange.agree(asked_terms(request.headers, exchange.tenant, stable.tenants, limits))
        try:
            with exchange.deadline:
                return await read_body(request, limits.max_bytes)
        except ClientDisconnect:
            raise ClientLeftError from None
        except ApiError as error:
            if error.code != DEADLINE_EXCEEDED:
                raise
            raise ApiError(408, "request_timeout", "the body did not arrive within the request's time") from None

    def choose_arm(self, exchange: Exchange, beginning: Callable[[], Sequence[str | Sequence[int]]]) -> EffectiveConfig:
        """What an admitted request obeys here; arm and level are on it from now on.

        Args:
            beginning: of its conversation, as `arm_key` wants it; called while there is a canary.
        """
        config = self.config.current
        if config.canary is not None:
            key = arm_key(config.canary.hash_by, exchange.id, exchange.tenant, exchange.terms.conversation, beginning())
            exchange.arm = arm_of(config.canary, key)
        effective = config.of(exchange.arm)
        exchange.level = effective.level
        return effective

    def _configured_tasks(self, task: Task) -> set[str]:
        stable = self.config.current.stable
        generates = task is Task.GENERATION
        subgraphs = stable.generation_subgraphs if generates else stable.classification_subgraphs
        return set() if subgraphs is None else {entry.name for entry in subgraphs.tasks}

    @property
    def not_ready(self) -> str:
        """Why no traffic should come; empty when it should."""
        if self.draining:
            return "shutting down"
        if not self.settings.engines:
            return "no engine is configured (SIXFOLD_ENGINES)"
        if self.config.current.stable.may_sleep:
            return ""  # the next request wakes them
        if waiting := self.pool.waiting_for:
            return f"engines that have not been ready yet: {', '.join(waiting)}"
        return "" if self.pool.connected else "no engine is connected"

    def state(self) -> PodState:
        current = self.config.current
        models = [
            ModelState(name=model.name, task=Task(model.task), ready=self.pool.is_ready(model))
            for model in self.pool.models
        ]
        models += [ModelState(name=model.name, task=Task(model.task), ready=False) for model in self.pool.missing]
        return PodState(
            role=Role.GATEWAY,
            pod=self.settings.pod,
            ready=not self.not_ready,
            sequence=current.sequence,
            level=current.stable.level,
            config_error=self.config.error,
            unknown_fields=self.config.unknown_fields,
            models=tuple(models),
            tenants=self._keys.tenants,
            not_found=tuple(self._not_found()),
            idle_seconds=self._activity.idle_seconds,
        )

    def _not_found(self) -> Iterator[str]:
        for tenant in self._keys.without_key(entry.name for entry in self.config.current.stable.tenants):
            yield f"spec.gateway.tenants names {tenant}, which isn't the name of an API key"
        if self._tls is not None and (problem := self._tls.problem):
            yield f"spec.tls names a Secret whose certificates can't be used: {problem}"
        if self.stream_dictionary.current is None and self.stream_dictionary.problem:
            yield self.stream_dictionary.problem


def exchange_of(request: Request) -> Exchange:
    exchange: Exchange = request.scope["state"]["exchange"]
    return exchange
