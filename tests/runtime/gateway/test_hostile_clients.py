"""Clients on real sockets that are slow, loud, broken or gone: each gets a 4xx or an end, and nobody else notices."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import zstandard
from websockets.sync.client import connect

from sixfold_runtime import http_server
from sixfold_runtime.engine.protocol import PATH, SUBPROTOCOL, State, Submit, decode_to_gateway, encode
from sixfold_runtime.http_server import MAX_HEADER_BYTES, GuardedProtocol

CHAT, COMPLETIONS, CLASSIFY = "/v1/chat/completions", "/v1/completions", "/v1/classify"
LONG = {"model": "chat", "prompt": "hello", "temperature": 0, "max_tokens": 4000, "stream": True}
SHORT = {"model": "chat", "prompt": "hello", "max_tokens": 2}


@pytest.fixture
def call(gateway: Any) -> Iterator[Callable[..., socket.socket]]:
    """Opens a connection and sends bytes on it."""
    with contextlib.ExitStack() as stack:

        def start(data: bytes = b"", receive_bytes: int = 0) -> socket.socket:
            client = stack.enter_context(socket.socket())
            if receive_bytes:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            client.settimeout(20)
            client.connect(("127.0.0.1", gateway.port))
            client.sendall(data)
            return client

        yield start
    answer = gateway.client.post(COMPLETIONS, json=SHORT)
    assert answer.status_code == 200, "the next request works"


def read_all(client: socket.socket) -> bytes:
    """Everything up to the end of the connection, however it ends."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65536):
            received += part
    return received


def post(path: str, body: bytes, *headers: bytes) -> bytes:
    lines = [f"POST {path} HTTP/1.1".encode(), b"Host: gateway", *headers]
    return b"\r\n".join([*lines, f"Content-Length: {len(body)}".encode(), b"", body])


def error_of(answer: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return int(head.split()[1]), error


MANY = b"".join(b"X-%d: 1\r\n" % number for number in range(20_000))
NOT_HTTP = {
    "noise": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "no version": (b"GET /healthz\r\n\r\n", 400),
    "no host": (b"GET /healthz HTTP/1.1\r\n\r\n", 400),
    "a header without a name": (b"GET /healthz HTTP/1.1\r\nHost: a\r\n: x\r\n\r\n", 400),
    "NUL in a header": (b"GET /healthz HTTP/1.1\r\nHost: a\r\nX: a\x00b\r\n\r\n", 400),
    "a long header": (b"GET /healthz HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 2 * MAX_HEADER_BYTES, 431),
    "many headers": (b"GET /healthz HTTP/1.1\r\nHost: a\r\n" + MANY, 431),
    "a long path": (b"GET /" + b"x" * 2 * MAX_HEADER_BYTES, 431),
    "two lengths": (post(CHAT, b"{}", b"Content-Length: 7"), 400),
    "a negative length": (b"POST /v1/classify HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n", 400),
    "a long length": (b"POST /v1/classify HTTP/1.1\r\nHost: a\r\nContent-Length: " + b"9" * 400 + b"\r\n\r\n", 400),
    "a bad chunk": (b"POST /v1/classify HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    "another coding": (b"POST /v1/classify HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\nzz\r\n", 400),
}


@pytest.mark.parametrize(("data", "status"), NOT_HTTP.values(), ids=NOT_HTTP.keys())
def test_what_is_not_http(call: Callable[..., socket.socket], data: bytes, status: int) -> None:
    found, error = error_of(read_all(call(data)))
    assert (found, error["type"]) == (status, "invalid_request_error")


def test_headers_that_never_end(call: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GuardedProtocol, "header_seconds", 0.2)
    for data in (b"GET /healthz HTTP/1.1\r\n", b"G", b"POST /v1/classify HTTP/1.1\r\nHost: a\r\nX: "):
        assert error_of(read_all(call(data)))[0] == 408
    assert read_all(call()) == b"", "who says nothing gets nothing"


def test_headers_that_trickle_gain_no_time(call: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GuardedProtocol, "header_seconds", 0.3)
    whole = b"GET /healthz HTTP/1.1\r\nHost: gateway\r\n\r\n"
    client = call(whole)
    assert read_until_end(client).endswith(b"\r\n\r\nok\n"), "the connection is kept, and then"
    client.settimeout(0.02)
    received = b""
    with contextlib.suppress(ConnectionError):
        while b"request_timeout" not in received:
            client.sendall(b"x")
            with contextlib.suppress(TimeoutError):
                received += client.recv(65536) or pytest.fail("closed without a word")
    assert received.startswith(b"HTTP/1.1 408")


def test_a_body_that_does_not_come(call: Callable[..., socket.socket]) -> None:
    head = post(CLASSIFY, b'{"input": "x"}', b"X-Request-Timeout: 0.2")
    status, error = error_of(read_until_end(call(head[:-5])))
    assert (status, error["code"]) == (408, "request_timeout")


def read_until_end(client: socket.socket) -> bytes:
    """One answer with a Content-Length; the connection may stay open."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += client.recv(65536)
    head, _, body = received.partition(b"\r\n\r\n")
    (length,) = (int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    while len(body) < length:
        body += client.recv(65536)
    return head + b"\r\n\r\n" + body


def test_a_body_that_nobody_reads_ends_with_the_connection(
    call: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GuardedProtocol, "linger_seconds", 0.2)
    client = call(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    part = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with contextlib.suppress(ConnectionError):
        while True:  # ends when the gateway has enough of it
            client.sendall(part)
    client = call(b"POST /healthz HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000000000000\r\n\r\nx")
    assert error_of(read_all(client))[0] == 405


PACKED = {
    "gzip": lambda data: gzip.compress(data),
    "deflate": lambda data: zlib.compress(data),
    "zstd": lambda data: zstandard.compress(data),
    "br": lambda data: b"\x0b\x02\x80",
    "gzip, gzip": lambda data: gzip.compress(gzip.compress(data)),
    "x" * 1000: lambda data: data[:10],
}


@pytest.mark.parametrize("encoding", PACKED)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, CLASSIFY])
def test_packed_bodies_are_never_unpacked(gateway: Any, path: str, encoding: str) -> None:
    bomb = PACKED[encoding](b" " * 10_000_000)
    answer = gateway.client.post(path, content=bomb, headers={"Content-Encoding": encoding})
    assert answer.status_code == 415
    assert answer.json()["error"]["code"] == "unsupported_content_encoding"
    plain = gateway.client.post(CLASSIFY, json={"input": "x"}, headers={"Content-Encoding": "identity"})
    assert plain.status_code == 200


TEXTS = {
    "NUL": "a\x00b",
    "controls": "".join(map(chr, range(32))) + "\x7f\x80\x9f",
    "right to left": "\u202e\u2066abc\u2069\u200f" * 50,
    "no characters": "\ufffe\uffff\U0001fffe\U0010ffff",
    "byte order marks": "\ufeff" * 100,
    "nothing to see": "\u200b\u200d\u2060\u00ad" * 25_000,
    "marks": "e" + "\u0301" * 100_000,
    "ligatures": "\ufdfa" * 1000,
    "families": "👨‍👩‍👧‍👦" * 500,
    "unassigned": "\U000e0fff\u0378",
    "private": "\ue000\U000f0000",
    "spaces": " \u00a0\u2003\u3000\u2028\u2029" * 2000,
    "a very long word": "a" * 1_000_000,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_text_of_all_kinds(gateway: Any, text: str) -> None:
    bodies = {
        CHAT: {"model": "assistant", "messages": [{"role": "user", "content": text}], "max_tokens": 2},
        COMPLETIONS: {**SHORT, "prompt": [text, text]},
        CLASSIFY: {"input": [text, "x"]},
    }
    for path, body in bodies.items():
        answer = gateway.client.post(path, json=body)
        assert answer.status_code in (200, 400), answer.text[:300]
        if len(text) < 50:
            assert answer.status_code == 200
        else:
            assert answer.status_code == 200 or answer.json()["error"]["code"] == "context_length_exceeded"
    short = text[:200]
    for field in ("stop", "user", "task", "model", short):
        assert gateway.client.post(COMPLETIONS, json={**SHORT, field: short}).status_code in (200, 400, 404)
    header = {"X-Task": short.encode()} if short.isprintable() else {}
    assert gateway.client.post(COMPLETIONS, json=SHORT, headers=header).status_code in (200, 400, 404)


@pytest.mark.parametrize("escaped", [r"\ud800", r"\udfff\ud800", r"a\udc00b", r"\u0000", r"\uFFFE"])
def test_escapes_in_any_place(gateway: Any, escaped: str) -> None:
    for body in (
        f'{{"model": "chat", "prompt": "x{escaped}", "max_tokens": 2}}',
        f'{{"model": "chat", "prompt": "x", "max_tokens": 2, "stop": "{escaped}"}}',
        f'{{"model": "chat", "prompt": "x", "max_tokens": 2, "user": "{escaped}"}}',
        f'{{"model": "{escaped}", "prompt": "x", "max_tokens": 2}}',
        f'{{"model": "chat", "prompt": "x", "max_tokens": 2, "{escaped}": 1}}',
    ):
        answer = gateway.client.post(COMPLETIONS, content=body.encode())
        assert answer.status_code in (200, 400, 404), answer.text


NUMBERS = ["1e400", "-1e400", "1E-400", "9" * 4000, "-0", "0.1e1", "1" + "0" * 300 + ".5", "0x10", "Infinity", "1_000"]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number[:10])
@pytest.mark.parametrize("field", ["max_tokens", "temperature", "top_k", "seed", "logprobs", "prompt", "stop", "n"])
def test_numbers_of_all_sizes(gateway: Any, field: str, number: str) -> None:
    fields = {"model": '"chat"', "prompt": '"x"', "max_tokens": "2", field: number}
    body = "{" + ",".join(f'"{name}": {value}' for name, value in fields.items()) + "}"
    assert gateway.client.post(COMPLETIONS, content=body.encode()).status_code in (200, 400)


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
@pytest.mark.parametrize("field", ["prompt", "stop", "messages", "extra"])
def test_deep_nesting(gateway: Any, field: str, opening: str) -> None:
    for depth in (150, 100_000):
        closing = "]" if opening == "[" else "}" if opening.startswith("{") else "}]"
        body = f'{{"model": "chat", "{field}": {opening * depth}1{closing * depth}}}'
        for path in (CHAT, COMPLETIONS):
            assert gateway.client.post(path, content=body.encode()).status_code == 400


def begin_stream(call: Callable[..., socket.socket], **more: Any) -> socket.socket:
    """A long answer of which the first bytes have come."""
    client = call(post(COMPLETIONS, json.dumps({**LONG, **more}).encode()), 4096)
    assert client.recv(1024).startswith(b"HTTP/1.1 200")
    return client


@pytest.mark.parametrize("way", ["half", "reset", "close"])
def test_who_leaves_in_mid_stream_is_forgotten(
    call: Callable[..., socket.socket], engine: Any, until: Callable[..., Any], way: str
) -> None:
    cancelled = engine.metric("sixfold_engine_requests_total", outcome="cancelled")
    client = begin_stream(call)
    if way == "half":
        client.shutdown(socket.SHUT_WR)
    else:
        if way == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    gone = lambda: engine.metric("sixfold_engine_requests_total", outcome="cancelled") == cancelled + 1  # noqa: E731
    until(gone, "the engine to cancel")
    assert engine.metric("sixfold_requests_running") == 0


def test_a_reader_that_stands_still_holds_nobody_up(
    call: Callable[..., socket.socket], gateway: Any, engine: Any, until: Callable[..., Any]
) -> None:
    cancelled = engine.metric("sixfold_engine_requests_total", outcome="cancelled")
    still = [begin_stream(call, logprobs=5) for _ in range(2)]
    with gateway.client.stream("POST", COMPLETIONS, json={**LONG, "max_tokens": 200}) as answer:
        text = "".join(answer.iter_text())
    assert text.endswith("data: [DONE]\n\n")
    for client in still:
        client.close()
    until(lambda: engine.metric("sixfold_requests_running") == 0, "the engine to be idle")
    assert engine.metric("sixfold_engine_requests_total", outcome="cancelled") <= cancelled + 2


def test_many_requests_in_one_piece(call: Callable[..., socket.socket]) -> None:
    request = b"GET /healthz HTTP/1.1\r\nHost: gateway\r\n\r\n"
    client = call(request * 500 + request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert read_all(client).count(b"HTTP/1.1 200") == 501


def test_what_follows_a_body_is_another_request(call: Callable[..., socket.socket]) -> None:
    """Neither length nor coding can hide a second request from whoever counts them in front of the gateway."""
    both = b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n"
    client = call(b"POST /v1/classify HTTP/1.1\r\nHost: a\r\nConnection: close\r\n" + both + b"0\r\n\r\nGET /hidden")
    answer = read_all(client)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"hidden" not in answer


def test_a_websocket_is_refused(gateway: Any) -> None:
    headers = {"Connection": "upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    headers["Sec-WebSocket-Key"] = "dGhlIHNhbXBsZSBub25jZQ=="
    for path in ("/engine", CHAT, "/"):
        assert 400 <= httpx.get(gateway.url + path, headers=headers, trust_env=False).status_code < 500


def test_a_websocket_lives_longer_than_the_limits(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GuardedProtocol, "header_seconds", 0.05)
    monkeypatch.setattr(GuardedProtocol, "linger_seconds", 0.05)
    with connect(f"ws://127.0.0.1:{engine.port}{PATH}", subprotocols=[SUBPROTOCOL]) as websocket:
        assert isinstance(decode_to_gateway(websocket.recv(20)), State)
        with socket.create_connection(("127.0.0.1", engine.port), 20) as idle:
            assert read_all(idle) == b"", "a connection that says nothing has reached its limit"
        websocket.send(encode(Submit([])))
        assert websocket.ping().wait(20)


def test_the_limits_are_what_the_documentation_says() -> None:
    assert (http_server.HEADER_SECONDS, http_server.LINGER_SECONDS) == (20.0, 5.0)
