"""What every exchange has: an id, level and arm in headers, a line in the log, its place in the metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sixfold_runtime.gateway.errors import internal_error
from sixfold_runtime.gateway.exchange import Exchange

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-ID"
LEVEL_HEADER = "X-Sixfold-Level"
ARM_HEADER = "X-Sixfold-Arm"
API_PREFIX = "/v1/"


class Envelope:
    """ASGI middleware around the API; `/healthz` and the like only get the headers.

    Plain ASGI, since a middleware that wraps responses would hide that the client left.
    """

    def __init__(
        self, app: ASGIApp, begin: Callable[[Headers, str], Exchange], is_draining: Callable[[], bool]
    ) -> None:
        """`begin(headers, path)` starts an exchange."""
        self._app = app
        self._begin = begin
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = self._begin(Headers(scope=scope), scope["path"])
        scope.setdefault("state", {})["exchange"] = exchange

        async def send_enveloped(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = exchange.id
                headers[LEVEL_HEADER] = str(exchange.level)
                headers[ARM_HEADER] = exchange.arm
                if self._is_draining():
                    headers["Connection"] = "close"  # the next request of this client goes to another gateway
            await send(message)

        try:
            await self._app(scope, receive, send_enveloped)
        except Exception:
            if exchange.status:
                raise  # the answer is on its way; the server closes the connection
            log.exception("request %s failed", exchange.id)
            error = internal_error(exchange.id)
            exchange.error_code = error.code
            await error.response()(scope, receive, send_enveloped)
        finally:
            exchange.deadline.close()
            if scope["path"].startswith(API_PREFIX):
                exchange.end()
