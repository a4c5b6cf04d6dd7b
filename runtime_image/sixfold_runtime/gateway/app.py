"""The gateway's web application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from sixfold_runtime.config import ConfigStore
from sixfold_runtime.gateway import cache_endpoint, classification, demo, dictionary, generation, listing
from sixfold_runtime.gateway.core import Gateway, exchange_of
from sixfold_runtime.gateway.envelope import Envelope
from sixfold_runtime.gateway.errors import ApiError, json_response
from sixfold_runtime.gateway.exchange import CLIENT_CLOSED
from sixfold_runtime.gateway.openapi import ERRORS, schemas
from sixfold_runtime.gateway.sse import ClientLeftError
from sixfold_runtime.settings import RuntimeSettings


def create_gateway_app(settings: RuntimeSettings, config: ConfigStore) -> FastAPI:
    """The application; `app.state.gateway` is its Gateway. Raises ValueError on engines that aren't host:port.

    Whoever made `config` runs it; the application follows engines and keys by itself.
    """
    gateway = Gateway(settings, config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(gateway.run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await gateway.close()

    # The document is at /openapi.json; FastAPI's page for it would load scripts from elsewhere.
    app = FastAPI(
        title="Sixfold", description="OpenAI-compatible inference.", lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.gateway = gateway
    for part in (generation, classification, listing, cache_endpoint, dictionary, demo):
        app.include_router(part.router(gateway), responses=ERRORS)
    _add_probes(app, gateway)
    _add_error_handlers(app)
    app.openapi().setdefault("components", {}).setdefault("schemas", {}).update(schemas())
    app.add_middleware(Envelope, begin=gateway.begin, is_draining=lambda: gateway.draining)
    return app


def _add_probes(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/healthz", include_in_schema=False)
    async def healthz() -> Response:
        return PlainTextResponse("ok\n")

    @app.get("/readyz", include_in_schema=False)
    async def readyz() -> Response:
        reason = gateway.not_ready
        return PlainTextResponse(f"{reason or 'ok'}\n", 503 if reason else 200)

    @app.get("/state", include_in_schema=False)
    async def state() -> Response:
        return json_response(gateway.state().to_dict())

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(generate_latest(gateway.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        exchange_of(request).error_code = error.code
        return error.response()

    @app.exception_handler(ClientLeftError)
    async def client_left(request: Request, _: ClientLeftError) -> Response:
        exchange_of(request).client_left = True
        return Response(status_code=CLIENT_CLOSED)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        """Paths and methods that don't exist."""
        code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        headers = dict(error.headers or {})
        return await api_error(request, ApiError(error.status_code, code, message, headers=headers))
