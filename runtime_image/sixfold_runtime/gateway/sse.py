"""Answers that notice when the client leaves, and server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sixfold_runtime.gateway.errors import ApiError, internal_error
from sixfold_runtime.gateway.exchange import Exchange
from sixfold_runtime.modes.streaming import StreamCompressor

log = logging.getLogger(__name__)
T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
_encoder = msgspec.json.Encoder()


class ClientLeftError(Exception):
    """The connection closed before the answer was complete."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises ClientLeftError as soon as the client leaves."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeftError
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The body; raises ApiError (413) as soon as it is known to be larger than `limit_bytes`."""
    too_large = ApiError(413, "body_too_large", f"the body is larger than {limit_bytes} bytes")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit_bytes:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit_bytes:
            raise too_large
    return bytes(body)


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + _encoder.encode(data) + b"\n\n"


class EventStream(Response):
    """Sends events as they come, compressed where that was negotiated, until they end or the client leaves.

    An error in mid-stream becomes a last event in OpenAI's shape, without `[DONE]`.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], exchange: Exchange, encoding: str | None, zstd_level: int
    ) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self.headers["Cache-Control"] = "no-cache"
        self.headers["X-Accel-Buffering"] = "no"  # or nginx holds events back
        self.headers["Vary"] = "Accept-Encoding"
        if encoding is not None:
            self.headers["Content-Encoding"] = encoding
        self._compressor = StreamCompressor(zstd_level) if encoding is not None else None
        self._events = events
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        except (ClientLeftError, OSError):
            self._exchange.client_left = True
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for data in self._events:
                await self._send(send, data)
        except ApiError as error:
            await self._fail(send, error)
        except Exception:
            log.exception("request %s failed in mid-stream", self._exchange.id)
            await self._fail(send, internal_error(self._exchange.id))
        end = b"" if self._compressor is None else self._compressor.end()
        self._exchange.metrics.stream_bytes(0, len(end))
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _fail(self, send: Send, error: ApiError) -> None:
        self._exchange.error_code = error.code
        await self._send(send, event(error.body()))

    async def _send(self, send: Send, data: bytes) -> None:
        body = data if self._compressor is None else self._compressor.event(data)
        self._exchange.metrics.stream_bytes(len(data), len(body))
        await send({"type": "http.response.body", "body": body, "more_body": True})
