"""The engine's HTTP face: the WebSocket for gateways, and what operator, kubelet and Prometheus read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from fastapi import FastAPI, HTTPException, Request, Response, WebSocket
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import HTTPConnection

from sixfold_api.runtime_config import PodState, Role, RuntimeConfig
from sixfold_runtime.engine.connection import Connection
from sixfold_runtime.engine.engine import Engine
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import PATH, SUBPROTOCOL, MissingModel, ModelInfo, State
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.settings import RuntimeSettings
from sixfold_runtime.tracing import tracing_for

log = logging.getLogger(__name__)

_COUNTS_SECONDS = 0.25
"""Counts of running and waiting requests are told at most this often."""
_DRAIN_POLL_SECONDS = 0.02
_PROTOCOL_ERROR = 1002


class ConfigSource(Protocol):
    """What the engine needs of a ConfigStore."""

    error: str
    unknown_fields: tuple[str, ...]

    @property
    def current(self) -> RuntimeConfig: ...

    def subscribe(self, callback: Callable[[RuntimeConfig], None]) -> None: ...


class EngineServer:
    """An engine, its gateways' connections, and the State that they are told."""

    def __init__(self, settings: RuntimeSettings, config: ConfigSource, limits: Limits | None) -> None:
        self.settings = settings
        self.config = config
        self.metrics = EngineMetrics(settings)
        self.tracing = tracing_for(Role.ENGINE, settings)
        self.connections: set[Connection] = set()
        self._loop = asyncio.get_running_loop()
        self._counts_changed = asyncio.Event()
        self._told: State | None = None
        self.engine = Engine(
            settings.models,
            lambda: config.current,
            self.metrics,
            device=settings.device,
            limits=limits,
            redis_directory=settings.redis_directory,
            on_models=lambda: self._call_soon(self.tell),
            on_counts=lambda: self._call_soon(self._counts_changed.set),
        )
        config.subscribe(lambda _: self._call_soon(self._config_applied))
        self._config_applied()

    async def run(self) -> None:
        """Start the engine; tell gateways of changed counts, until cancelled."""
        self.engine.start()
        while True:
            await self._counts_changed.wait()
            self._counts_changed.clear()
            self.tell()
            await asyncio.sleep(_COUNTS_SECONDS)

    def tell(self) -> None:
        """Send State to every gateway if it isn't what they know."""
        state = self.state()
        if state != self._told:
            self._told = state
            for connection in self.connections:
                connection.send(state)

    async def serve(self, socket: WebSocket) -> None:
        """Serve one gateway until the connection ends."""
        await socket.accept(SUBPROTOCOL if SUBPROTOCOL in socket.scope["subprotocols"] else None)
        if SUBPROTOCOL not in socket.scope["subprotocols"]:
            await socket.close(_PROTOCOL_ERROR, f"this engine speaks {SUBPROTOCOL}")
            return
        connection = Connection(socket, self.engine, self.tracing)
        connection.send(self.state())
        self.connections.add(connection)
        self._share_turns()
        try:
            await connection.run()
        finally:
            self.connections.discard(connection)
            self._share_turns()

    async def drain(self) -> None:
        """Take no new requests; return when the others are done and told, or after drain_seconds."""
        self.engine.drain()
        self.tell()
        try:
            async with asyncio.timeout(self.settings.drain_seconds):
                is_idle = is_flushed = False
                while not (is_idle and is_flushed):
                    is_idle = self.engine.is_idle
                    # In this pause the last results reach their connections.
                    await asyncio.sleep(_DRAIN_POLL_SECONDS)
                    is_flushed = all(connection.is_flushed for connection in self.connections)
        except TimeoutError:
            log.warning("%d requests still ran after %.0f s", self.engine.running, self.settings.drain_seconds)

    def state(self) -> State:
        """What gateways are told."""
        engine, config = self.engine, self.config.current
        return State(
            pod=self.settings.pod,
            models=[
                ModelInfo(
                    name=name,
                    task=model.served.task.value,
                    context_tokens=model.runner.context_tokens,
                    tokenizer=model.facts.tokenizer.sha256,
                    ready=model.is_ready,
                    stop=model.facts.stop_strings,
                    swapping=model.is_swapping,
                    swap_pending=model.turn.is_waiting,
                    labels=list(model.labels),
                    tasks=list(model.tasks),
                    kv_block_tokens=model.kv_block_tokens,
                )
                for name, model in engine.models.items()
                if model.facts is not None and model.runner is not None
            ],
            sequence=config.sequence,
            level=config.stable.level,
            running=engine.running,
            waiting=engine.waiting,
            draining=engine.is_draining,
            missing=[
                MissingModel(name=name, task=model.served.task.value, failed=bool(model.error))
                for name, model in engine.models.items()
                if model.runner is None
            ],
        )

    def pod_state(self) -> PodState:
        """What the operator is told."""
        config = self.config.current
        return PodState(
            role=Role.ENGINE,
            pod=self.settings.pod,
            ready=self.engine.is_ready,
            sequence=config.sequence,
            level=config.stable.level,
            config_error=self.config.error,
            unknown_fields=self.config.unknown_fields,
            unsupported={
                mode: reason for model in self.engine.models.values() for mode, reason in model.unsupported.items()
            },
            models=tuple(model.state for model in self.engine.models.values()),
            shadow_off="; ".join(model.shadow_off for model in self.engine.models.values() if model.shadow_off),
        )

    def tokenizer_bundle(self, sha256: str) -> bytes | None:
        bundles = (model.facts.tokenizer for model in self.engine.models.values() if model.facts)
        return next((entry.bundle for entry in bundles if entry.sha256 == sha256), None)

    def _share_turns(self) -> None:
        for model in self.engine.models.values():
            model.turn.is_shared = bool(self.connections)

    def _call_soon(self, callback: Callable[[], None]) -> None:
        """Run in the event loop, from any thread; nobody is left to be told once the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def _config_applied(self) -> None:
        self.metrics.config_applied(self.config.current)
        self.engine.config_changed()
        self.tell()


def create_engine_app(settings: RuntimeSettings, config: ConfigSource, *, limits: Limits | None = None) -> FastAPI:
    """The engine as an ASGI application; models load in the background once it runs.

    Uvicorn closes WebSockets as soon as it is told to stop, before the lifespan ends. So whoever handles SIGTERM
    awaits `app.state.drain()` first and stops the server then.

    Args:
        config: holds the RuntimeConfig in use; the caller runs its watcher.
        limits: of each model's scheduler, for tests.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server = EngineServer(settings, config, limits)
        app.state.server, app.state.drain = server, server.drain
        task = asyncio.create_task(server.run())
        yield
        await server.drain()
        task.cancel()
        await asyncio.to_thread(server.engine.stop)
        if server.tracing is not None:
            await asyncio.to_thread(server.tracing.close)

    app = FastAPI(title="Sixfold engine", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    _add_observation(app)

    @app.websocket(PATH)
    async def engine(socket: WebSocket) -> None:
        await _server(socket).serve(socket)

    @app.get("/tokenizer/{sha256}")
    async def tokenizer(sha256: str, request: Request) -> Response:
        bundle = _server(request).tokenizer_bundle(sha256)
        if bundle is None:
            return JSONResponse({"error": f"no loaded model has a tokenizer with digest {sha256}"}, 404)
        return Response(bundle, media_type="application/json")

    return app


def create_observer_app(engine: FastAPI) -> FastAPI:
    """What kubelet, operator and Prometheus read of an engine, without what gateways use.

    Args:
        engine: made by `create_engine_app`; it runs in the same process, and starts first.
    """
    app = FastAPI(title="Sixfold engine", docs_url=None, redoc_url=None, openapi_url=None)
    app.state = engine.state
    _add_observation(app)
    return app


def _add_observation(app: FastAPI) -> None:
    @app.get("/state")
    async def state(request: Request) -> Response:
        return JSONResponse(_server(request).pod_state().to_dict())

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        return Response(generate_latest(_server(request).metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/healthz")
    async def healthz(request: Request) -> Response:
        alive = _server(request).engine.is_alive
        return PlainTextResponse("ok" if alive else "the engine's thread has ended", 200 if alive else 503)

    @app.get("/readyz")
    async def readyz(request: Request) -> Response:
        reason = _server(request).engine.why_not_ready()
        return PlainTextResponse(reason or "ready", 503 if reason else 200)


def _server(connection: HTTPConnection) -> EngineServer:
    server: EngineServer | None = getattr(connection.app.state, "server", None)
    if server is None:
        raise HTTPException(503, "the engine is starting")
    return server
