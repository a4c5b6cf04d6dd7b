"""Answers that notice when the client leaves, and server-sent events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sixfold_runtime.gateway.errors import ApiError, internal_error
from sixfold_runtime.gateway.exchange import Exchange
from sixfold_runtime.gateway.stream_encoding import Encoding
from sixfold_runtime.modes.streaming import wait_seconds

log = logging.getLogger(__name__)
T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
MAX_WAITING_BYTES = 64 * 1024
STALL_SECONDS = 60.0
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
    """The body; raises ApiError (413) as soon as it is known to be larger than `limit_bytes`, or (415) if it is packed.

    A few packed bytes may stand for gigabytes, and no client of this API packs its requests.
    """
    packed = request.headers.get("content-encoding", "identity").strip().lower()
    if packed not in ("", "identity"):
        message = "send the body as it is: this server takes no Content-Encoding in requests"
        raise ApiError(
            415, "unsupported_content_encoding", message, "Content-Encoding", headers={"Accept-Encoding": "identity"}
        )
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


class _Outlet:
    """Sends events at once while they come slowly, and together while they come fast or the client is slow.

    Bounded: `put` returns when less than MAX_WAITING_BYTES wait, so an answer that nobody reads doesn't pile up here.
    """

    def __init__(self, write: Callable[[list[bytes], bool], Awaitable[None]]) -> None:
        """`write(events, is_last)` returns when the socket takes more."""
        self._write = write
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._sent_seconds = -inf
        self._later: asyncio.Task[None] | None = None
        self._is_ending = self._is_ended = False

    async def put(self, event: bytes) -> None:
        """Raises what `write` raised."""
        self._waiting.append(event)
        self._waiting_bytes += len(event)
        if self._later is not None:
            if not self._later.done() and self._waiting_bytes < MAX_WAITING_BYTES:
                return
            await self._later
            self._later = None
        if wait_seconds(self._sent_seconds, time.monotonic()) > 0:
            self._later = asyncio.create_task(self._flush_later())
        elif self._waiting:
            await self._flush()

    async def end(self) -> None:
        """Send what waits, and the end. Raises what `write` raised."""
        self._is_ending = True
        if self._later is not None:
            await self._later
        if not self._is_ended:
            await self._flush()

    async def close(self) -> None:
        if self._later is not None:
            self._later.cancel()
            await asyncio.gather(self._later, return_exceptions=True)

    async def _flush_later(self) -> None:
        while self._waiting:
            await asyncio.sleep(wait_seconds(self._sent_seconds, time.monotonic()))
            await self._flush()

    async def _flush(self) -> None:
        events, self._waiting, self._waiting_bytes = self._waiting, [], 0
        self._is_ended = self._is_ending
        await self._write(events, self._is_ended)
        self._sent_seconds = time.monotonic()


class EventStream(Response):
    """Sends events as they come, in the form that was negotiated, until they end or the client leaves.

    Events that come fast, or while the client is slow to read, travel together. A client that reads less than uvicorn's
    buffer (48 KiB) in `stall_seconds` is cut off. An error in mid-stream becomes a last event in OpenAI's shape,
    without `[DONE]`.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        exchange: Exchange,
        encoding: Encoding,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        super().__init__(media_type="text/event-stream", headers=encoding.headers)
        del self.headers["content-length"]
        self.headers["Cache-Control"] = "no-cache"
        self.headers["X-Accel-Buffering"] = "no"  # or nginx holds events back
        self._form = encoding.form
        self._encoder = encoding.encoder()
        self._events = events
        self._exchange = exchange
        self._stall_seconds = stall_seconds
        self._writing_seconds: float | None = None
        self._is_stalled = self._is_sent = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        except asyncio.CancelledError:
            if not self._is_stalled:
                raise
            log.warning("request %s: the client read nothing for %g s", self._exchange.id, self._stall_seconds)
            self._exchange.metrics.streams.cut()
            self._exchange.client_left = True
        except (ClientLeftError, OSError):
            # Servers report the end of a whole answer as they do a client's leaving.
            self._exchange.client_left = not self._is_sent
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        outlet = _Outlet(lambda events, is_last: self._write(send, events, is_last))
        try:
            with self._cut_when_stalled():
                async for data in self._events_or_error():
                    await outlet.put(data)
                await outlet.end()
        finally:
            await outlet.close()

    async def _events_or_error(self) -> AsyncGenerator[bytes, None]:
        try:
            async for data in self._events:
                yield data
        except ApiError as error:
            self._exchange.error_code = error.code
            yield event(error.body())
        except Exception:
            log.exception("request %s failed in mid-stream", self._exchange.id)
            ours = internal_error(self._exchange.id)
            self._exchange.error_code = ours.code
            yield event(ours.body())

    async def _write(self, send: Send, events: list[bytes], is_last: bool) -> None:
        data = b"".join(events)
        body = self._encoder.encode(data, is_last)
        self._exchange.metrics.streams.sent(self._form, len(events), len(data), len(body))
        self._writing_seconds = time.monotonic()
        await send({"type": "http.response.body", "body": body, "more_body": not is_last})
        self._writing_seconds = None
        self._is_sent = is_last

    @contextmanager
    def _cut_when_stalled(self) -> Iterator[None]:
        """Cancels the task when one write takes too long. One timer a stream: one a write would cost more than it."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        timer: asyncio.TimerHandle

        def check() -> None:
            nonlocal timer
            now = time.monotonic()
            due = (self._writing_seconds or now) + self._stall_seconds
            if self._writing_seconds is not None and due <= now:
                self._is_stalled = task.cancel()
            else:
                timer = loop.call_later(due - now, check)

        check()
        try:
            yield
        finally:
            timer.cancel()
