"""DELETE /v1/kv-cache: what is kept of a tenant's prompts and answers is erased."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from sixfold_runtime.gateway.core import Gateway
from sixfold_runtime.gateway.errors import json_response, unavailable
from sixfold_runtime.gateway.openapi import CacheErased, erasure_document

PATH = "/v1/kv-cache"


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter()

    @routes.delete(PATH, response_class=Response, openapi_extra=erasure_document())
    async def erase(request: Request) -> Response:
        """Erase the keys and values that engines and Redis keep for the tenant of this API key.

        Without API keys all callers are one tenant. Requests that run meanwhile may leave new ones behind.
        """
        exchange = gateway.admit(request)
        if not gateway.pool.connected:
            raise unavailable("no engine is connected, so nothing was erased; send the request again", "not_erased")
        blocks, errors = await gateway.pool.erase(exchange.tenant)
        if errors:
            reasons = "; ".join(dict.fromkeys(errors))
            raise unavailable(f"not all is erased ({blocks} blocks are): {reasons}; send it again", "not_erased")
        return json_response(CacheErased(blocks=blocks))

    return routes
