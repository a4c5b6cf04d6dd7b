"""Who reaches the engine's port without being a gateway can't crash it, hang it, or touch what gateways asked for."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from sixfold_runtime.engine.protocol import (
    PATH,
    SUBPROTOCOL,
    Cancel,
    Classify,
    Done,
    Erase,
    Generate,
    Prefetch,
    Sampling,
    State,
    Submit,
    decode_to_gateway,
    encode,
)
from sixfold_runtime.http_server import MAX_FRAME_BYTES

SECONDS = 20
LONG = {"model": "chat", "prompt": "hello", "temperature": 0, "max_tokens": 150, "stream": True}


@pytest.fixture
def neighbour(gateway: Any) -> Any:
    """Around each test, a client's stream that has to come out as always."""
    parts: list[str] = []
    with gateway.client.stream("POST", "/v1/completions", json=LONG) as answer:
        lines = answer.iter_lines()
        parts.append(next(lines))
        yield
        parts += lines
    assert parts[-2] == "data: [DONE]"
    assert gateway.client.post("/v1/classify", json={"input": "x"}).status_code == 200


def peer(engine: Any) -> ClientConnection:
    address = f"ws://127.0.0.1:{engine.port}{PATH}"
    return connect(address, subprotocols=[SUBPROTOCOL], max_size=None, compression=None, close_timeout=1)


def ends_with(websocket: ClientConnection) -> int:
    """The code with which the engine closes the connection."""
    try:
        while True:
            websocket.recv(SECONDS)
    except ConnectionClosed as closed:
        return 1006 if closed.rcvd is None else closed.rcvd.code


def answers(websocket: ClientConnection, *ids: str) -> dict[str, Done]:
    found: dict[str, Done] = {}
    while not found.keys() >= set(ids):
        message = decode_to_gateway(bytes(websocket.recv(SECONDS)))
        if isinstance(message, Done):
            found[message.id] = message
    return found


SUBMIT = b"\x82\xa4type\xa6submit\xa8requests"
FRAMES = {
    "an array of four thousand million": SUBMIT + b"\xdd\xff\xff\xff\xff",
    "a map of as many": b"\xdf\xff\xff\xff\xff",
    "a text of 4 GiB": b"\x82\xa4type\xa6cancel\xa3ids\x91\xdb\xff\xff\xff\xff",
    "deep arrays": b"\x82\xa4type\xa6submit\xa1x" + b"\x91" * 1_000_000,
    "deep maps": b"\x82\xa4type\xa6submit\xa1x" + b"\x81\xa1a" * 1_000_000,
    "deep maps as keys": b"\x81" * 1_000_000,
    "no UTF-8": b"\x82\xa4type\xa6cancel\xa3ids\x91\xa2\xff\xfe",
    "a surrogate": b"\x82\xa4type\xa6cancel\xa3ids\x91\xa3\xed\xa0\x80",
    "an extension": b"\xc7\xff\x7f" + b"x" * 255,
    "huge token ids": SUBMIT + b"\x91" + msgspec.msgpack.encode({"type": "generate", "token_ids": [2**64 - 1]}),
    "JSON": b'{"type": "submit"}',
    "a pickle": b"\x80\x04\x95\x1b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "noise": os.urandom(100_000),
}


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES.keys())
def test_frames_that_are_none(engine: Any, neighbour: None, frame: bytes) -> None:
    with peer(engine) as websocket:
        websocket.send(frame)
        assert ends_with(websocket) == 1007


def raw(engine: Any, data: bytes) -> socket.socket:
    """A peer that speaks WebSocket by hand; the handshake is done."""
    client = socket.create_connection(("127.0.0.1", engine.port), SECONDS)
    lines = [
        f"GET {PATH} HTTP/1.1",
        "Host: a",
        "Connection: upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
    ]
    lines += ["Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", f"Sec-WebSocket-Protocol: {SUBPROTOCOL}", "", ""]
    client.sendall("\r\n".join(lines).encode())
    received = b""
    while b"\r\n\r\n" not in received:
        received += client.recv(65536)
    assert received.startswith(b"HTTP/1.1 101")
    client.sendall(data)
    return client


def is_ended(client: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        while client.recv(65536):
            pass
    return True


BROKEN = {
    "a frame of 2**62 bytes": b"\x82\xff" + struct.pack(">Q", 2**62) + b"\0" * 4,
    "one byte more than allowed": b"\x82\xff" + struct.pack(">Q", MAX_FRAME_BYTES + 1) + b"\0" * 4,
    "an unknown kind": b"\x8b\x80\0\0\0\0",
    "reserved bits": b"\xf2\x80\0\0\0\0",
    "without a mask": b"\x82\x05hello",
    "a long ping": b"\x89\xfe\xff\xff\0\0\0\0" + b"x" * 0xFFFF,
    "a part of nothing": b"\x80\x80\0\0\0\0",
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
def test_websockets_that_are_broken(engine: Any, neighbour: None, data: bytes) -> None:
    with raw(engine, data) as client:
        assert is_ended(client)


def test_a_frame_that_never_ends_and_one_that_is_cut(engine: Any, neighbour: None) -> None:
    with raw(engine, b"\x82\xff" + struct.pack(">Q", 10_000_000) + b"\0" * 1000):
        pass
    with raw(engine, b"\x82\xff" + struct.pack(">Q", 10_000_000) + b"\0" * 1000) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_no_websocket(engine: Any, neighbour: None) -> None:
    for path, method in ((PATH, "GET"), (PATH, "POST"), ("/tokenizer/00", "GET"), ("/", "DELETE")):
        assert 400 <= engine.client.request(method, path).status_code < 500
    with socket.create_connection(("127.0.0.1", engine.port), SECONDS) as client:
        client.sendall(b"\x16\x03\x01" + os.urandom(500) + b"\r\n\r\n")
        assert is_ended(client)


def sampling(**fields: Any) -> Sampling:
    return Sampling(**{"max_tokens": 3, **fields})


REQUESTS = {
    "no tokens": Generate("x", "chat", [], sampling()),
    "a negative token": Generate("x", "chat", [-1], sampling()),
    "no token of the model": Generate("x", "chat", [10**6], sampling()),
    "a very large token": Generate("x", "chat", [2**63 - 1], sampling()),
    "a million tokens": Generate("x", "chat", [5] * 1_000_000, sampling()),
    "nothing to generate": Generate("x", "chat", [5], sampling(max_tokens=0)),
    "less than nothing": Generate("x", "chat", [5], sampling(max_tokens=-5)),
    "no temperature": Generate("x", "chat", [5], sampling(temperature=float("nan"))),
    "too hot": Generate("x", "chat", [5], sampling(temperature=float("inf"))),
    "no nucleus": Generate("x", "chat", [5], sampling(top_p=0.0)),
    "a penalty of nothing": Generate("x", "chat", [5], sampling(repetition_penalty=0.0)),
    "an endless penalty": Generate("x", "chat", [5], sampling(presence_penalty=float("-inf"))),
    "a large seed": Generate("x", "chat", [5], sampling(seed=2**63 - 1)),
    "an empty stop": Generate("x", "chat", [5], sampling(stop=("",))),
    "ten thousand stops": Generate("x", "chat", [5], sampling(stop=tuple(map(str, range(10_000))))),
    "all log-probabilities": Generate("x", "chat", [5], sampling(logprobs=2**62)),
    "negative top k": Generate("x", "chat", [5], sampling(top_k=-5)),
    "no such model": Generate("x", "../chat", [5], sampling()),
    "no such task": Generate("x", "chat", [5], sampling(), task="../x"),
    "no such arm": Generate("x", "chat", [5], sampling(), arm="nowhere"),
    "another kind": Classify("x", "chat", [5]),
    "a text of nothing": Classify("x", "sentiment", []),
    "labels of nothing": Classify("x", "sentiment", [5], top_k=0),
    "a long text": Classify("x", "sentiment", [5] * 100_000),
}
CARRIED_OUT = {"a large seed", "no such arm", "an empty stop", "ten thousand stops", "all log-probabilities"}
"""They mean something, and cost no more than others."""


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_that_no_gateway_sends(engine: Any, neighbour: None, name: str) -> None:
    good = Generate("good", "chat", [5, 6], sampling())
    with peer(engine) as websocket:
        websocket.send(encode(Submit([REQUESTS[name], good])))
        done = answers(websocket, "x", "good")
    assert done["good"].failure is None
    if (failure := done["x"].failure) is not None:
        assert 400 <= failure.status < 500, failure
    else:
        assert name in CARRIED_OUT


def test_other_messages_about_what_is_not_there(engine: Any, neighbour: None) -> None:
    with peer(engine) as websocket:
        websocket.send(encode(Cancel(["a", "", "x" * 100_000] * 100)))
        websocket.send(encode(Prefetch("nobody", "", "x" * 100_000)))
        websocket.send(encode(Erase("1", "\x00nobody")))
        websocket.send(encode(Submit([], ["nobody", "chat"] * 1000)))
        websocket.send(encode(Submit([Generate("twice", "chat", [5], sampling())] * 2)))
        first = answers(websocket, "twice")["twice"]
    assert first.failure is None or first.failure.code == "duplicate_request_id"


def test_a_peer_can_not_cancel_what_it_did_not_ask_for(engine: Any, neighbour: None) -> None:
    with peer(engine) as one, peer(engine) as other:
        one.send(encode(Submit([Generate("same-name", "chat", [5, 6], sampling(max_tokens=100))])))
        other.send(encode(Cancel(["same-name"])))
        other.send(encode(Submit([Generate("same-name", "chat", [5, 6], sampling(max_tokens=2))])))
        assert answers(other, "same-name")["same-name"].completion_tokens == 2
        assert answers(one, "same-name")["same-name"].completion_tokens == 100


def test_a_peer_that_reads_nothing(engine: Any, neighbour: None, until: Callable[..., Any]) -> None:
    with raw(engine, b"") as client:
        requests = [Generate(str(number), "chat", [5], sampling(max_tokens=500)) for number in range(4)]
        body = encode(Submit(requests))
        client.sendall(b"\x82\xfe" + struct.pack(">H", len(body)) + b"\0" * 4 + body)
        until(lambda: engine.metric("sixfold_requests_running") >= 2, "the engine to begin")
    until(lambda: engine.metric("sixfold_requests_running") <= 1, "the engine to stop for it")


def test_many_connections_that_say_nothing(engine: Any, neighbour: None) -> None:
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(peer(engine)) for _ in range(30)]
        silent[0].send(encode(Submit([Generate("x", "chat", [5], sampling())])))
        assert answers(silent[0], "x")["x"].failure is None
        assert isinstance(decode_to_gateway(bytes(silent[-1].recv(SECONDS))), State)
