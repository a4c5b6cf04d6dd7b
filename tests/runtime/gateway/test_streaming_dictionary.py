"""The dictionary of streamed answers: where clients get it, who uses it, and that it follows its file."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard
from playwright.sync_api import sync_playwright
from typer.testing import CliRunner

from sixfold_runtime.cli import app as cli
from sixfold_runtime.gateway.dictionary import Dictionary
from sixfold_runtime.stream_client import SseZstdTransport

PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {
    "model": "chat",
    "messages": [{"role": "user", "content": "hello"}],
    "temperature": 0,
    "stream": True,
    "max_tokens": 40,
}
IDENTITY = {"Accept-Encoding": "identity"}
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A dictionary, made as a person would."""
    folder = tmp_path_factory.mktemp("text")
    text = folder / "answers.txt"
    text.write_text("\n\n".join(f"The answer to question {at} is {at * at}, and so to bed." for at in range(60)))
    done = CliRunner().invoke(cli, ["dictionary", "train", str(text), "-o", str(folder / "d"), "--size", "2048"])
    assert done.exit_code == 0, done.output
    return (folder / "d").read_bytes()


@pytest.fixture
def folder(tmp_path: Path, trained: bytes) -> Path:
    folder = tmp_path / "dictionary"
    folder.mkdir()
    (folder / "dictionary").write_bytes(trained)
    return folder


def link(answer: httpx.Response) -> str:
    return str(answer.links.get("compression-dictionary", {}).get("url", ""))


def test_answers_link_to_it_and_it_is_served(new_gateway: Any, engine: Any, folder: Path) -> None:
    gateway = new_gateway(engine.port, dictionary=folder)
    path = link(gateway.client.post(PATH, json=CHAT))
    served = gateway.client.get(path)
    assert served.content == (folder / "dictionary").read_bytes()
    assert "immutable" in served.headers["cache-control"]
    assert served.headers["use-as-dictionary"] == 'match="/v1/*"'
    assert gateway.client.get("/v1/stream-dictionary/" + "0" * 64).status_code == 404


def test_it_needs_a_key_as_everything_does(new_gateway: Any, engine: Any, folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "alice").write_text("alice-key")
    gateway = new_gateway(engine.port, keys=keys, dictionary=folder)
    path = Dictionary((folder / "dictionary").read_bytes()).path
    assert gateway.client.get(path).status_code == 401
    assert gateway.client.get(path, headers={"Authorization": "Bearer alice-key"}).status_code == 200


def test_short_answers_get_smaller(new_gateway: Any, engine: Any, folder: Path, trained: bytes) -> None:
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


def test_sse_zstd_uses_it_for_clients_that_hold_it(new_gateway: Any, engine: Any, folder: Path, trained: bytes) -> None:
    gateway = new_gateway(engine.port, dictionary=folder)
    expected = content(gateway.client.post(PATH, json=CHAT, headers=IDENTITY).text)
    for held, used in ((trained, True), (trained + b"an older one", False), (None, False)):
        with httpx.Client(transport=SseZstdTransport(dictionary=held), base_url=gateway.url, timeout=60) as client:
            answer = client.post(PATH, json=CHAT)
            assert ("dictionary=" in answer.headers["x-stream-compression"]) is used
            assert content(answer.text) == expected


def test_chromium_uses_it_by_itself(new_gateway: Any, engine: Any, folder: Path, until: Callable[..., Any]) -> None:
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


def test_it_is_replaced_while_the_gateway_runs(new_gateway: Any, engine: Any, folder: Path, trained: bytes) -> None:
    gateway = new_gateway(engine.port, dictionary=folder)
    file = folder / "dictionary"

    def put(data: bytes) -> str:
        (folder / ".partial").write_bytes(data)
        (folder / ".partial").rename(file)
        return link(gateway.client.post(PATH, json=CHAT))

    raw = b'data: {"id":"chatcmpl-0000","object":"chat.completion.chunk"}'
    assert put(raw) == Dictionary(raw).path
    assert put(trained[:40]) == "", "a dictionary that was cut off is of no use"
    assert put(b"") == ""
    assert put(trained) == Dictionary(trained).path
    file.unlink()
    assert link(gateway.client.post(PATH, json=CHAT)) == ""
