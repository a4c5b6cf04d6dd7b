"""Streams on live sockets: compression on arrival, levels, clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import zstandard

LONG = {"model": "chat", "prompt": "hello", "temperature": 0, "stream": True, "max_tokens": 3000}
SHORT = {**LONG, "max_tokens": 20}
PATH = "/v1/completions"


def text_of(body: str) -> str:
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])


@pytest.mark.parametrize(
    ("accept", "encoding"),
    [
        ("zstd", "zstd"),
        ("gzip, deflate, br, zstd", "zstd"),
        ("*", "zstd"),
        ("zstd;q=0", None),
        ("*;q=0.5, zstd;q=0", "gzip"),
        ("identity", None),
        ("gzip", "gzip"),
        ("gzip;q=1.0, zstd;q=0.5", "gzip"),
        ("", None),
    ],
)
def test_compression_is_negotiated(gateway: Any, accept: str, encoding: str | None) -> None:
    response = gateway.client.post(PATH, json=SHORT, headers={"Accept-Encoding": accept})
    assert response.headers.get("content-encoding") == encoding
    assert "Accept-Encoding" in response.headers["vary"]
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    plain = gateway.client.post(PATH, json=SHORT, headers={"Accept-Encoding": "identity"})
    assert text_of(response.text) == text_of(plain.text) != ""


def test_each_event_decodes_on_arrival(gateway: Any) -> None:
    """The stream is cancelled before its end, so nothing can have waited for the end of the frame."""
    with gateway.client.stream("POST", PATH, json=LONG, headers={"Accept-Encoding": "zstd"}) as response:
        decompressor = zstandard.ZstdDecompressor().decompressobj()
        events = 0
        for part in response.iter_raw():
            decoded = decompressor.decompress(part)
            assert decoded.endswith(b"\n\n"), "an event was held back"
            events += decoded.count(b"data: ")
            if events >= 20:
                break
    assert events >= 20


def test_the_whole_stream_is_one_small_frame(gateway: Any) -> None:
    raw_before, sent_before = (gateway.metric("sixfold_stream_bytes_total", kind=kind) for kind in ("raw", "sent"))
    with gateway.client.stream(
        "POST", PATH, json={**LONG, "max_tokens": 400}, headers={"Accept-Encoding": "zstd"}
    ) as response:
        sent = b"".join(response.iter_raw())
    raw = zstandard.ZstdDecompressor().decompressobj().decompress(sent)
    assert raw.endswith(b"data: [DONE]\n\n")
    assert len(raw) > 5 * len(sent)
    assert gateway.metric("sixfold_stream_bytes_total", kind="raw") == raw_before + len(raw)
    assert gateway.metric("sixfold_stream_bytes_total", kind="sent") == sent_before + len(sent)


@pytest.fixture
def levels(engine: Any, new_gateway: Any) -> Iterator[Any]:
    """A gateway whose engine changes its level with it; the engine is back at 3 afterwards."""
    gateway = new_gateway(engine.port)
    yield gateway
    engine.apply(level=3)


def test_compression_follows_the_level(levels: Any, engine: Any) -> None:
    headers = {"Accept-Encoding": "zstd"}
    for level, encoding in ((2, None), (3, "zstd"), (0, None)):
        engine.apply(level=level)
        levels.apply(level=level)
        response = levels.client.post(PATH, json=SHORT, headers=headers)
        assert response.headers["x-sixfold-level"] == str(level)
        assert response.headers.get("content-encoding") == encoding
    engine.apply(level=3)
    levels.apply(level=3, compression="Off")
    assert "content-encoding" not in levels.client.post(PATH, json=SHORT, headers=headers).headers


def test_a_request_ends_at_the_level_at_which_it_began(levels: Any, engine: Any) -> None:
    whole = text_of(levels.client.post(PATH, json={**LONG, "max_tokens": 1000}).text)
    body = {**LONG, "max_tokens": 1000}
    with levels.client.stream("POST", PATH, json=body, headers={"Accept-Encoding": "zstd"}) as response:
        parts = response.iter_text()
        received = next(parts)
        engine.apply(level=1)
        levels.apply(level=1)
        received += "".join(parts)
    assert response.headers["x-sixfold-level"] == "3"
    assert response.headers["content-encoding"] == "zstd"
    assert received.endswith("data: [DONE]\n\n")
    assert text_of(received) == whole
    assert levels.client.post(PATH, json=SHORT).headers["x-sixfold-level"] == "1"


def cancelled(engine: Any) -> float:
    return float(engine.metric("sixfold_engine_requests_total", outcome="cancelled"))


def test_a_client_that_leaves_a_stream_stops_the_work(gateway: Any, engine: Any, until: Callable[..., Any]) -> None:
    before = cancelled(engine)
    with gateway.client.stream("POST", PATH, json=LONG) as response:
        next(response.iter_raw())
    until(lambda: cancelled(engine) == before + 1, "the engine to cancel")
    until(lambda: gateway.metric("sixfold_requests_total", outcome="cancelled") >= 1, "the gateway to count it")


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_a_client_that_leaves_a_plain_call_stops_the_work(
    gateway: Any, engine: Any, path: str, until: Callable[..., Any]
) -> None:
    before = cancelled(engine)
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "chat", "max_tokens": 3500, "temperature": 0}
    body |= {"prompt": "hello"} if path == PATH else {"messages": messages}

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as client:
            request = asyncio.create_task(client.post(path, json=body))
            await asyncio.to_thread(until, lambda: engine.metric("sixfold_requests_running") == 1, "the engine to work")
            request.cancel()

    asyncio.run(leave())
    until(lambda: cancelled(engine) == before + 1, "the engine to cancel")
    until(lambda: engine.metric("sixfold_requests_running") == 0, "the engine to be idle")


def test_many_streams_at_once_keep_apart(gateway: Any) -> None:
    async def one(client: httpx.AsyncClient, prompt: str) -> str:
        return text_of((await client.post(PATH, json={**SHORT, "prompt": prompt})).text)

    async def all_of_them(prompts: list[str]) -> list[str]:
        async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=60) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    prompts = [f"user {index}" for index in range(12)]
    alone = [text_of(gateway.client.post(PATH, json={**SHORT, "prompt": prompt}).text) for prompt in prompts]
    assert asyncio.run(all_of_them(prompts)) == alone
