"""Clients of a streamed chat: how many bytes come over the wire, and when each event can be read."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai

from sixfold_runtime.stream_client import SseZstdTransport

PATH = "/v1/chat/completions"
Arrivals = list[float]
"""Unix seconds at which each event with text was there, decoded."""


def body(script: int) -> dict[str, Any]:
    """Asks the replaying engine for this script."""
    return {"model": "chat", "messages": [{"role": "user", "content": "?"}], "stream": True, "seed": script}


@dataclass(frozen=True)
class Wire:
    """What came over a connection for one answer, its head left out."""

    bytes: int
    """Chunk sizes of HTTP/1.1 included: six or seven bytes a flush."""
    content: bytes


def over_the_wire(url: str, script: int, headers: dict[str, str]) -> Wire:
    """One answer over a bare socket."""
    address, request = urlsplit(url), json.dumps(body(script)).encode()
    lines = {"Host": address.netloc, "Connection": "close", "Content-Type": "application/json"}
    lines |= {"Content-Length": str(len(request)), **headers}
    head = f"POST {PATH} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=120) as connection:
        connection.sendall(head.encode() + request)
        received = bytearray()
        while part := connection.recv(65536):
            received += part
    answer_head, _, chunked = bytes(received).partition(b"\r\n\r\n")
    if not answer_head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"the gateway answers {bytes(received)[:500]!r}")
    return Wire(len(chunked), _dechunked(chunked))


def _dechunked(chunked: bytes) -> bytes:
    content, at = bytearray(), 0
    while at < len(chunked):
        end = chunked.index(b"\r\n", at)
        length = int(chunked[at:end], 16)
        content += chunked[end + 2 : end + 2 + length]
        at = end + length + 4
    return bytes(content)


def text_of(events: bytes | str) -> str:
    """What the chunks of a chat say."""
    lines = (events if isinstance(events, str) else events.decode()).splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


def _has_text(event: str) -> bool:
    return text_of(event) != ""


def httpx_arrivals(url: str, script: int) -> tuple[Arrivals, str]:
    """With what httpx accepts by itself: zstd."""
    arrivals: Arrivals = []
    waiting = ""
    with httpx.stream("POST", url + PATH, json=body(script), timeout=120, trust_env=False) as answer:
        for text in answer.iter_text():
            *events, waiting = (waiting + text).split("\n\n")
            arrivals += [time.time()] * sum(map(_has_text, events))
        return arrivals, answer.headers.get("content-encoding", "identity")


def _openai_arrivals(client: openai.OpenAI, script: int) -> tuple[Arrivals, str]:
    stream: Any = client.chat.completions.create(**body(script))
    arrivals = [time.time() for event in stream if event.choices and event.choices[0].delta.content]
    headers = stream.response.headers
    return arrivals, headers.get("x-stream-compression") or headers.get("content-encoding", "identity")


def openai_arrivals(url: str, script: int) -> tuple[Arrivals, str]:
    """As it is installed: httpx2, which takes gzip."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        return _openai_arrivals(client, script)


def openai_httpx_arrivals(url: str, script: int) -> tuple[Arrivals, str]:
    """Over httpx, which takes zstd."""
    http = httpx.Client(timeout=120, trust_env=False)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http) as client:
        return _openai_arrivals(client, script)


def openai_sse_arrivals(url: str, script: int) -> tuple[Arrivals, str]:
    """Over httpx with our transport."""
    http = httpx.Client(transport=SseZstdTransport(), timeout=120)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http) as client:
        return _openai_arrivals(client, script)


_FETCH = """
async ([path, body]) => {
  const answer = await fetch(path, {
    method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(body)});
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  const events = [];
  let waiting = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return {encoding: answer.headers.get("content-encoding"), events};
    const now = (performance.timeOrigin + performance.now()) / 1000;
    const parts = (waiting + value).split("\\n\\n");
    waiting = parts.pop();
    for (const part of parts) events.push([now, part]);
  }
}
"""
"""In the page: when each event was there, in Unix seconds."""


@contextmanager
def chromium(url: str) -> Iterator[Callable[[str, int], tuple[Arrivals, str]] | None]:
    """A browser on a page of the gateway, which decodes by itself. None where no Chromium is installed."""
    path = shutil.which("chromium")
    if path is None:
        yield None
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"{url}/healthz")

        def arrivals(_: str, script: int) -> tuple[Arrivals, str]:
            answer = page.evaluate(_FETCH, [PATH, body(script)])
            times = [at for at, event in answer["events"] if _has_text(event)]
            return times, answer["encoding"] or "identity"

        yield arrivals
        browser.close()
