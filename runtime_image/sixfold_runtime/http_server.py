"""HTTP/1.1 on a port that anybody may reach: uvicorn, with limits on clients that are slow, loud or broken."""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import h11
import msgspec
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_FRAME_BYTES = 64 * 2**20
"""Of one WebSocket message."""
MAX_HEADER_BYTES = 64 * 1024
"""Of a request's line and headers together, and of anything else that has to arrive whole before it is understood."""
KEEP_ALIVE_SECONDS = 75
HEADER_SECONDS = 20.0
"""From the first byte of a request, or from the connection, to the end of its headers."""
LINGER_SECONDS = 5.0
"""How long a body may still arrive that nobody reads, since the answer is out: a client that only reads when it has
sent everything gets it too."""


class Server(uvicorn.Server):
    """Leaves the signals to its caller: several servers share the process and stop in order."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def server_config(app: FastAPI, drain_seconds: float, tls: ssl.SSLContext | None = None, **more: Any) -> uvicorn.Config:
    """How each server of the runtime runs; `more` are further settings of uvicorn."""
    if tls is not None:
        more["ssl_context_factory"] = lambda *_: tls
    return uvicorn.Config(
        app,
        http=GuardedProtocol,
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=max(1, round(drain_seconds)),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ws_max_size=MAX_FRAME_BYTES,
        ws_per_message_deflate=False,
        **more,
    )


class GuardedProtocol(H11Protocol):
    """Ends what would otherwise hold a connection for ever: headers that don't end, bodies that nobody reads.

    What isn't HTTP is answered in OpenAI's shape, as everything else is.
    """

    header_seconds = HEADER_SECONDS
    linger_seconds = LINGER_SECONDS
    _limit_seconds: float | None = None
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls it where a request isn't HTTP, and where its headers are too large."""
        error = sys.exception()
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
            self._refuse(431, "headers_too_large", f"the request's headers are larger than {MAX_HEADER_BYTES} bytes")
        else:
            self._refuse(400, "invalid_http", "this is no valid HTTP/1.1 request")

    def _watch(self) -> None:
        """Something happened: limit what the connection does from now on."""
        is_answered = self.cycle is not None and self.cycle.response_complete
        if self.transport.is_closing() or self.transport.get_protocol() is not self:  # it may be a WebSocket now
            self._limit(None)
        elif self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None:
            self._limit(self.header_seconds)
        elif self.conn.their_state is h11.SEND_BODY and is_answered:
            self._limit(self.linger_seconds)
        else:
            self._limit(None)

    def _limit(self, seconds: float | None) -> None:
        """A limit that holds already gains no time by what comes meanwhile."""
        if seconds == self._limit_seconds:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._limit_seconds = seconds
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._is_over)

    def _is_over(self) -> None:
        is_begun = bool(self.conn.trailing_data[0])
        if self.conn.their_state is h11.IDLE and is_begun:
            message = f"the request's headers did not arrive within {self.header_seconds:g} s"
            self._refuse(408, "request_timeout", message)
        else:
            self.transport.close()

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer where no answer has begun, and close."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            problem = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
            body = msgspec.json.encode({"error": problem})
            headers = [
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
            ]
            head = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode())
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
