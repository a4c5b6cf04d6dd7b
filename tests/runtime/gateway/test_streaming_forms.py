"""Streams in each form, through the clients that people use: httpx, openai, and both with sse-zstd."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import httpx
import openai
import pytest
import zstandard

from sixfold_runtime.stream_client import AsyncSseZstdTransport, SseZstdTransport

PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {
    "model": "chat",
    "messages": [{"role": "user", "content": "hello"}],
    "temperature": 0,
    "stream": True,
    "max_tokens": 40,
}
LONG = {**CHAT, "max_tokens": 3000}
IDENTITY = {"Accept-Encoding": "identity"}
SSE = {"X-Stream-Compression": "sse-zstd"}


def content(body: str) -> str:
    """What an answer's events say; the frames differ in id and time."""
    events = [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


def outer(body: bytes) -> list[bytes]:
    """The compressed bytes in each outer event of an sse-zstd answer, which holds nothing else."""
    events = body.split(b"\n\n")
    assert events.pop() == b""
    assert all(event.startswith(b"data: ") for event in events)
    return [base64.b64decode(event[6:], validate=True) for event in events]


def test_sse_zstd_is_as_described(gateway: Any) -> None:
    plain = gateway.client.post(PATH, json=CHAT, headers=IDENTITY)
    answer = gateway.client.post(PATH, json=CHAT, headers={**SSE, "Accept-Encoding": "gzip, zstd"})
    assert answer.headers["x-stream-compression"] == "sse-zstd"
    assert "content-encoding" not in answer.headers
    assert answer.headers["content-type"].startswith("text/event-stream")
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    text = ""
    for part in outer(answer.content):
        decoded = decompressor.decompress(part)
        assert decoded.endswith(b"\n\n"), "an inner event was cut in two"
        text += decoded.decode()
    assert decompressor.eof
    assert text.endswith("data: [DONE]\n\n")
    assert content(text) == content(plain.text) != ""
    assert len(answer.content) < len(text) / 4.2


@pytest.mark.parametrize("form", ["gzip", "sse-zstd"])
def test_each_event_decodes_on_arrival(gateway: Any, form: str) -> None:
    """The stream is left before its end, so nothing can have waited for the end of the frame."""
    headers = SSE if form == "sse-zstd" else {"Accept-Encoding": form}
    gunzip = zlib.decompressobj(wbits=31)
    unzstd = zstandard.ZstdDecompressor().decompressobj()
    events = 0
    with gateway.client.stream("POST", PATH, json=LONG, headers=headers) as answer:
        for part in answer.iter_raw():
            decoded = gunzip.decompress(part) if form == "gzip" else b"".join(map(unzstd.decompress, outer(part)))
            assert decoded.endswith(b"\n\n"), "an event was held back"
            events += decoded.count(b"data: ")
            if events >= 20:
                break
    assert events >= 20


def test_openai_reads_sse_zstd_unchanged(gateway: Any) -> None:
    http = httpx.Client(transport=SseZstdTransport(), timeout=60)
    expected = content(gateway.client.post(PATH, json=CHAT, headers=IDENTITY).text)
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", http_client=http) as client:
        stream = client.chat.completions.create(**CHAT)
        assert stream.response.headers["x-stream-compression"] == "sse-zstd"
        chunks = list(stream)
        whole = client.chat.completions.create(**{**CHAT, "stream": False})
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == expected == whole.choices[0].message.content != ""


async def test_openai_reads_sse_zstd_unchanged_in_asyncio(gateway: Any) -> None:
    http = httpx.AsyncClient(transport=AsyncSseZstdTransport(), timeout=60)
    expected = content(gateway.client.post(PATH, json=CHAT, headers=IDENTITY).text)
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", http_client=http) as client:
        chunks = [chunk async for chunk in await client.chat.completions.create(**CHAT)]
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == expected


@pytest.mark.parametrize("accepted", ["zstd", "gzip", "identity"])
def test_openai_reads_what_httpx_decodes(gateway: Any, accepted: str) -> None:
    http = httpx.Client(headers={"Accept-Encoding": accepted}, timeout=60)
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", http_client=http) as client:
        stream = client.chat.completions.create(**CHAT)
        assert stream.response.headers.get("content-encoding", "identity") == accepted
        text = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
    assert text == content(gateway.client.post(PATH, json=CHAT, headers=IDENTITY).text)


def test_openais_own_client_gets_what_it_asks_for(gateway: Any) -> None:
    """With httpx2 and without its zstd extra, that is gzip."""
    with gateway.openai() as client:
        stream = client.chat.completions.create(**CHAT)
        assert stream.response.headers["content-encoding"] in stream.response.request.headers["accept-encoding"]
        text = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
    assert text == content(gateway.client.post(PATH, json=CHAT, headers=IDENTITY).text)


def test_a_stream_that_was_cut_is_an_error(gateway: Any) -> None:
    """A proxy that ends an answer early doesn't make half an answer look whole."""
    body = gateway.client.post(PATH, json=CHAT, headers=SSE).content
    headers = {"X-Stream-Compression": "sse-zstd", "Content-Type": "text/event-stream"}

    def read(sent: bytes) -> str:
        proxy = httpx.MockTransport(lambda _: httpx.Response(200, headers=headers, content=sent))
        with httpx.Client(transport=SseZstdTransport(proxy)) as client:
            return client.post("http://gateway" + PATH).text

    assert read(body).endswith("data: [DONE]\n\n")
    assert read(b": a comment of the proxy's\n\n" + body.replace(b"\n", b"\r\n")) == read(body)
    for cut in (0, 10, len(body) // 2, len(body) - 3):
        with pytest.raises(httpx.RemoteProtocolError, match="was cut"):
            read(body[:cut])
    with pytest.raises(httpx.RemoteProtocolError, match="doesn't decode"):
        read(body[: len(body) // 2] + b"\n\ndata: ???\n\n")


@pytest.mark.parametrize("asked", ["zstd", "sse-brotli", "sse-zstd; dictionary=12"])
def test_unknown_forms_are_refused_before_any_work(gateway: Any, engine: Any, asked: str) -> None:
    before = engine.metric("sixfold_engine_requests_total")
    answer = gateway.client.post(PATH, json=CHAT, headers={"X-Stream-Compression": asked})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Stream-Compression"
    assert engine.metric("sixfold_engine_requests_total") == before


def test_plain_text_for_browsers_that_ask(gateway: Any) -> None:
    answer = gateway.client.post(PATH, json=CHAT, headers={"X-Stream-Compression": "identity"})
    assert answer.headers["x-stream-compression"] == "identity"
    assert "content-encoding" not in answer.headers
    assert answer.text.endswith("data: [DONE]\n\n")


def test_below_level_3_the_answer_says_that_it_is_plain(new_gateway: Any, engine: Any) -> None:
    gateway = new_gateway(engine.port)
    try:
        engine.apply(level=2)
        gateway.apply(level=2)
        answer = gateway.client.post(PATH, json=CHAT, headers=SSE)
    finally:
        engine.apply(level=3)
    assert answer.headers["x-stream-compression"] == "identity"
    assert answer.text.endswith("data: [DONE]\n\n")


def test_bytes_and_flushes_are_counted_by_form(new_gateway: Any, engine: Any) -> None:
    gateway = new_gateway(engine.port)
    answer = gateway.client.post(PATH, json=LONG, headers=SSE)
    zstd = zstandard.ZstdDecompressor().decompressobj()
    raw = b"".join(map(zstd.decompress, outer(answer.content)))

    def count(kind: str, encoding: str) -> float:
        return float(gateway.metric("sixfold_stream_bytes_total", kind=kind, encoding=encoding))

    assert (count("raw", "sse-zstd"), count("sent", "sse-zstd")) == (len(raw), len(answer.content))
    assert count("raw", "zstd") == count("sent", "identity") == 0
    assert gateway.metric("sixfold_stream_flush_events_sum") == raw.count(b"data: ")
    assert gateway.metric("sixfold_stream_flush_events_count") == len(outer(answer.content))
