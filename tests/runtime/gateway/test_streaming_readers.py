"""Slow readers on real sockets: what they cost stays bounded, what waits travels together, the deaf are cut off."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
import zstandard
from prometheus_client import generate_latest
from starlette.types import Receive, Scope, Send

from sixfold_runtime.config import ConfigStore, default_config
from sixfold_runtime.gateway.deadline import Deadlines
from sixfold_runtime.gateway.exchange import Exchange
from sixfold_runtime.gateway.metrics import GatewayMetrics
from sixfold_runtime.gateway.pool import Pool
from sixfold_runtime.gateway.sse import MAX_WAITING_BYTES, EventStream
from sixfold_runtime.gateway.stream_encoding import Encoding
from sixfold_runtime.modes.streaming import Form
from sixfold_runtime.settings import RuntimeSettings

EVENT = b"data: " + b"x" * 1000 + b"\n\n"
SOCKET_BYTES = 16 * 1024
"""Of each end's buffer, which Linux doubles."""
UVICORN_BYTES = 64 * 1024


@dataclass
class Answer:
    """An ASGI application that answers each request with `count` events, as fast as it is let."""

    count: int
    form: Form = Form.IDENTITY
    stall_seconds: float = 60.0
    made: int = 0
    closed: threading.Event = field(default_factory=threading.Event)
    exchanges: list[Exchange] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings = RuntimeSettings()
        self.metrics = GatewayMetrics(settings, ConfigStore(default_config(3)), Pool([], settings.policy), lambda: 0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange("1", self.metrics, 3, "/", Deadlines().begin(time.monotonic() + 300))
        self.exchanges.append(exchange)
        await EventStream(self._events(), exchange, Encoding(self.form), self.stall_seconds)(scope, receive, send)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        try:
            while self.made < self.count:
                self.made += 1
                await asyncio.sleep(0)
                yield EVENT
        finally:
            self.closed.set()

    def metric(self, name: str) -> float:
        lines = generate_latest(self.metrics.registry).decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))


@pytest.fixture
def connect() -> Iterator[Callable[[Answer], socket.socket]]:
    """Serves an application and gives a client that has sent its request and read nothing; buffers are small."""
    with contextlib.ExitStack() as stack:

        def start(answer: Answer) -> socket.socket:
            listener = socket.create_server(("127.0.0.1", 0))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
            options: dict[str, Any] = {"log_config": None, "lifespan": "off", "timeout_graceful_shutdown": 1}
            server = uvicorn.Server(uvicorn.Config(answer, **options))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
            thread.start()
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
            client.settimeout(60)
            client.connect(listener.getsockname())
            client.sendall(b"GET / HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n\r\n")

            def stop() -> None:
                client.close()
                server.should_exit = True
                thread.join(30)

            stack.callback(stop)
            return client

        yield start


def test_nothing_is_made_that_nobody_reads(connect: Callable[..., socket.socket], until: Callable[..., Any]) -> None:
    answer = Answer(count=100_000, stall_seconds=0.5)
    connect(answer)
    until(answer.closed.is_set, "the stream to be cut off", 60)
    # Twice what may wait: what is being sent, and what waits meanwhile.
    most_bytes = 2 * MAX_WAITING_BYTES + UVICORN_BYTES + 4 * SOCKET_BYTES
    assert answer.made * len(EVENT) < 2 * most_bytes
    until(lambda: answer.metric("sixfold_stream_cut_total") == 1, "the cut to be counted")
    assert answer.exchanges[0].client_left


def test_a_slow_reader_gets_everything(connect: Callable[..., socket.socket]) -> None:
    answer = Answer(count=3000)
    client = connect(answer)
    received = b""
    while part := client.recv(4096):
        received += part
    _, _, body = received.partition(b"\r\n\r\n")
    assert dechunked(body) == EVENT * 3000
    assert answer.metric("sixfold_stream_cut_total") == 0
    assert not answer.exchanges[0].client_left


def test_what_waits_travels_together(connect: Callable[..., socket.socket]) -> None:
    answer = Answer(count=3000, form=Form.ZSTD)
    client = connect(answer)
    received = b""
    while part := client.recv(65536):
        received += part
    _, _, body = received.partition(b"\r\n\r\n")
    assert zstandard.ZstdDecompressor().decompressobj().decompress(dechunked(body)) == EVENT * 3000
    assert answer.metric("sixfold_stream_flush_events_sum") == 3000
    assert answer.metric("sixfold_stream_flush_events_count") < 300


def test_a_client_that_leaves_ends_the_work(connect: Callable[..., socket.socket], until: Callable[..., Any]) -> None:
    answer = Answer(count=1_000_000)
    client = connect(answer)
    client.recv(4096)
    client.close()
    until(answer.closed.is_set, "the answer to be given up", 60)
    assert answer.made < 1_000_000
    until(lambda: answer.exchanges[0].client_left, "the exchange to say so")
    assert answer.metric("sixfold_stream_cut_total") == 0


def dechunked(body: bytes) -> bytes:
    """The content of a chunked body (RFC 9112, 7.1)."""
    content = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        content, body = content + body[:length], body[length + 2 :]
    return content
