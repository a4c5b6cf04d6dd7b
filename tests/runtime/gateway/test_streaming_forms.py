"""Streams in each form, through the clients that people use: httpx, openai, and both with sse-zstd."""

from __future__ import annotations

import base64
import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import zstandard
from playwright.sync_api import sync_playwright
from typer.testing import CliRunner

from sixfold_runtime.cli import app as cli
from sixfold_runtime.gateway.dictionary import Dictionary
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


ASK = """
async ([path, body]) => {
  const headers = {"Content-Type": "application/json"};
  const answer = await fetch(path, {method: "POST", headers, body: JSON.stringify(body)});
  return [answer.headers.get("content-encoding"), await answer.text()];
}
"""


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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A dictionary, made as a person would."""
    folder = tmp_path_factory.mktemp("text")
    text = folder / "answers.txt"
    text.write_text("\n\n".join(f"The answer to question {at} is {at * at}, and so to bed." for at in range(60)))
    done = CliRunner().invoke(cli, ["dictionary", "train", str(text), "-o", str(folder / "d"), "--size", "2048"])
    assert done.exit_code == 0, done.output
    return (folder / "d").read_bytes()


class TestDictionary:
    @pytest.fixture
    def folder(self, tmp_path: Path, trained: bytes) -> Path:
        folder = tmp_path / "dictionary"
        folder.mkdir()
        (folder / "dictionary").write_bytes(trained)
        return folder

    def link(self, answer: httpx.Response) -> str:
        return str(answer.links.get("compression-dictionary", {}).get("url", ""))

    def test_answers_link_to_it_and_it_is_served(self, new_gateway: Any, engine: Any, folder: Path) -> None:
        gateway = new_gateway(engine.port, dictionary=folder)
        link = self.link(gateway.client.post(PATH, json=CHAT))
        served = gateway.client.get(link)
        assert served.content == (folder / "dictionary").read_bytes()
        assert "immutable" in served.headers["cache-control"]
        assert served.headers["use-as-dictionary"] == 'match="/v1/*"'
        assert gateway.client.get("/v1/stream-dictionary/" + "0" * 64).status_code == 404

    def test_it_needs_a_key_as_everything_does(
        self, new_gateway: Any, engine: Any, folder: Path, tmp_path: Path
    ) -> None:
        keys = tmp_path / "keys"
        keys.mkdir()
        (keys / "alice").write_text("alice-key")
        gateway = new_gateway(engine.port, keys=keys, dictionary=folder)
        path = Dictionary((folder / "dictionary").read_bytes()).path
        assert gateway.client.get(path).status_code == 401
        assert gateway.client.get(path, headers={"Authorization": "Bearer alice-key"}).status_code == 200

    def test_short_answers_get_smaller(self, new_gateway: Any, engine: Any, folder: Path, trained: bytes) -> None:
        gateway = new_gateway(engine.port, dictionary=folder)
        used = Dictionary(trained)
        short = {**CHAT, "max_tokens": 8}
        held = base64.b64encode(bytes.fromhex(used.sha256)).decode()
        dcz = {"Accept-Encoding": "zstd, dcz", "Available-Dictionary": f":{held}:"}
        with gateway.client.stream("POST", PATH, json=short, headers=dcz) as answer:
            assert answer.headers["content-encoding"] == "dcz"
            assert "Available-Dictionary" in answer.headers["vary"]
            sent = b"".join(answer.iter_raw())
        assert sent[:40] == bytes.fromhex("5e2a4d1820000000" + used.sha256)
        text = zstandard.ZstdDecompressor(dict_data=used.raw).decompressobj().decompress(sent[40:]).decode()
        plain = gateway.client.post(PATH, json=short, headers=IDENTITY)
        assert content(text) == content(plain.text) != ""
        with gateway.client.stream("POST", PATH, json=short, headers={"Accept-Encoding": "zstd"}) as answer:
            assert len(sent) < len(b"".join(answer.iter_raw()))

    def test_sse_zstd_uses_it_for_clients_that_hold_it(
        self, new_gateway: Any, engine: Any, folder: Path, trained: bytes
    ) -> None:
        gateway = new_gateway(engine.port, dictionary=folder)
        expected = content(gateway.client.post(PATH, json=CHAT, headers=IDENTITY).text)
        for held, used in ((trained, True), (trained + b"an older one", False), (None, False)):
            with httpx.Client(transport=SseZstdTransport(dictionary=held), base_url=gateway.url, timeout=60) as client:
                answer = client.post(PATH, json=CHAT)
                assert ("dictionary=" in answer.headers["x-stream-compression"]) is used
                assert content(answer.text) == expected

    def test_chromium_uses_it_by_itself(
        self, new_gateway: Any, engine: Any, folder: Path, until: Callable[..., Any]
    ) -> None:
        """RFC 9842: once a page has fetched the dictionary, the browser offers it and decodes what comes."""
        chromium = shutil.which("chromium")
        if chromium is None:
            pytest.skip("Chromium isn't installed")
        gateway = new_gateway(engine.port, dictionary=folder)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page()
            page.goto(f"{gateway.url}/healthz")

            def ask() -> tuple[str, str]:
                encoding, text = page.evaluate(ASK, [PATH, CHAT])
                return encoding, content(text)

            first, said = ask()
            assert first == "zstd"
            page.evaluate(
                "path => fetch(path).then(answer => answer.blob())",
                Dictionary((folder / "dictionary").read_bytes()).path,
            )
            until(lambda: ask() == ("dcz", said), "the browser to use the dictionary", 60)
            browser.close()

    def test_it_is_replaced_while_the_gateway_runs(
        self, new_gateway: Any, engine: Any, folder: Path, trained: bytes
    ) -> None:
        gateway = new_gateway(engine.port, dictionary=folder)
        file = folder / "dictionary"

        def put(data: bytes) -> str:
            (folder / ".partial").write_bytes(data)
            (folder / ".partial").rename(file)
            return self.link(gateway.client.post(PATH, json=CHAT))

        raw = b'data: {"id":"chatcmpl-0000","object":"chat.completion.chunk"}'
        assert put(raw) == Dictionary(raw).path
        assert put(trained[:40]) == "", "a dictionary that was cut off is of no use"
        assert put(b"") == ""
        assert put(trained) == Dictionary(trained).path
        file.unlink()
        assert self.link(gateway.client.post(PATH, json=CHAT)) == ""
