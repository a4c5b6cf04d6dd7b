"""The page at / and its stream client, in a real headless Chromium against a real gateway and engine."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.gateway import demo

REPOSITORY = Path(__file__).parents[3]
PAGE = Path(demo.__file__).parent / "demo_page"
CHROMIUM = shutil.which("chromium")
CONFIG: dict[str, Any] = {
    "demoPage": True,
    "modes": ("EarlyExit", "Subgraphs"),
    "earlyExit": {"rule": "Fixed", "threshold": 0.9, "lengthRelaxation": 0.0},
    "classificationSubgraphs": {"tasks": [{"name": "topic"}, {"name": "pos"}], "onDemand": True},
}
TEXTS = ["hello the user", "say", "the other assistant says hello to the user", "x y z"]
FORMS = {"sse-zstd": "zstd inside the events", "http": "zstd", "identity": "plain events"}

in_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium isn't installed (e2e/cluster/packages.py chromium)")


@pytest.fixture(scope="module")
def running(shared_engine: Any, models: Path, classifiers: Path) -> Any:
    chat = ServedModel(name="chat", task=Task.GENERATION, path=str(models / "chat"))
    served = shared_engine(chat, ServedModel(name="intent", task=Task.CLASSIFICATION, path=str(classifiers / "intent")))
    served.apply(**CONFIG)
    return served


@pytest.fixture(scope="module")
def front(running: Any, shared_gateway: Any) -> Any:
    gateway = shared_gateway(running.port)
    gateway.apply(**CONFIG)
    return gateway


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Visit:
    """The page, open in a tab of its own. Fails where it asks another host or writes an error to the console."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.tab = browser.new_context(**options).new_page()
        self.requested: list[str] = []
        self.chats: list[Any] = []
        self.errors: list[str] = []
        self.tab.on("request", self._note)
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.on("console", lambda line: self.errors.append(line.text) if line.type == "error" else None)
        self.url = url
        self.tab.goto(url)

    def _note(self, request: Any) -> None:
        self.requested.append(request.url)
        if request.url.endswith("/v1/chat/completions"):
            self.chats.append(request)

    def sent_turns(self) -> list[list[dict[str, str]]]:
        """The messages of each request for an answer."""
        return [request.post_data_json["messages"] for request in self.chats]

    def ready(self) -> Visit:
        self.tab.wait_for_selector("#model option", state="attached")
        return self

    def text(self, element_id: str) -> str:
        return str(self.tab.inner_text(f"#{element_id}"))

    def answers(self) -> list[str]:
        return list(self.tab.eval_on_selector_all(".message.assistant .text", "all => all.map(one => one.textContent)"))

    def press(self, *keys: str) -> None:
        for key in keys:
            self.tab.keyboard.press(key)

    def focused(self) -> str:
        return str(self.tab.evaluate("document.activeElement.id"))

    def tab_to(self, element_id: str) -> None:
        """As a person without a mouse gets there."""
        for _ in range(40):
            if self.focused() == element_id:
                return
            self.press("Tab")
        pytest.fail(f"40 times Tab don't lead to #{element_id}")

    def ask(self, text: str) -> None:
        self.tab.fill("#prompt", text)
        self.tab.press("#prompt", "Enter")
        self.complete()

    def complete(self) -> None:
        self.tab.wait_for_selector("#send", state="visible")
        self.tab.wait_for_selector(".message.assistant:last-child[aria-busy=false]")

    def close(self) -> None:
        self.tab.context.close()
        assert {url.split("/")[2] for url in self.requested} == {self.url.split("/")[2]}, self.requested
        assert self.errors == []


@pytest.fixture
def visit(browser: Any, front: Any) -> Iterator[Callable[..., Visit]]:
    visits: list[Visit] = []

    def open_page(url: str = front.url, **options: Any) -> Visit:
        visits.append(Visit(browser, url, **options))
        return visits[-1]

    yield open_page
    for one in visits:
        one.close()


def size(count: float) -> str:
    return f"{count:.0f} B" if count < 1000 else f"{count / 1000:.1f} kB"


def greedy_answer(front: Any, content: str, max_tokens: int) -> str:
    messages = [{"role": "user", "content": content}]
    body = {"model": "chat", "messages": messages, "temperature": 0, "max_tokens": max_tokens}
    return str(front.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"])


# --- what is served


def test_the_page_is_there_only_while_the_policy_says_so(running: Any, new_gateway: Any) -> None:
    gateway = new_gateway(running.port)
    names = ["/", "/demo/app.js", "/demo/stream-client/zstd.wasm"]
    for name in names:
        off = gateway.client.get(name)
        assert (off.status_code, off.json()["error"]["code"]) == (404, "unknown_url")
    gateway.apply(demoPage=True)
    assert [gateway.client.get(name).status_code for name in names] == [200] * 3
    assert gateway.client.get("/demo/../app.py").status_code == 404
    assert gateway.client.get("/demo/index.d.ts").status_code == 404
    gateway.apply()
    assert gateway.client.get("/").status_code == 404


def test_headers_let_nothing_from_elsewhere_in(front: Any) -> None:
    page = front.client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy
    assert not re.search(r"<script(?![^>]*src=)|<style|\b(style|on[a-z]+)=|https?://", page.text)
    wasm = front.client.get("/demo/stream-client/zstd.wasm")
    assert wasm.headers["content-type"] == "application/wasm"
    again = front.client.get("/demo/stream-client/zstd.wasm", headers={"If-None-Match": wasm.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_pages_client_is_the_packages_source(front: Any) -> None:
    source = REPOSITORY / "runtime_image/stream-client/src"
    assert (PAGE / "stream-client").resolve() == source.resolve()
    for path in source.iterdir():
        if path.suffix in (".js", ".wasm"):
            assert front.client.get(f"/demo/stream-client/{path.name}").content == path.read_bytes()


@pytest.mark.skipif(shutil.which("node") is None, reason="node isn't installed: the package's own tests need it")
def test_the_packages_own_tests() -> None:
    folder = REPOSITORY / "runtime_image/stream-client"
    tests = subprocess.run(["node", "--test"], cwd=folder, capture_output=True, text=True, timeout=120)
    assert tests.returncode == 0, tests.stdout[-5000:]


# --- chat


@in_chromium
def test_a_chat_without_a_mouse(visit: Callable[..., Visit], front: Any) -> None:
    page = visit().ready()
    page.tab_to("temperature")
    page.press("ControlOrMeta+a", "0", "Shift+Tab")
    assert page.focused() == "max-tokens"
    page.press("ControlOrMeta+a", *"40")
    page.tab.evaluate("document.activeElement.blur()")
    page.tab_to("prompt")
    page.tab.keyboard.type("hello the")
    page.press("Shift+Enter")
    page.tab.keyboard.type("user")
    page.press("Enter")
    page.complete()
    assert page.answers() == [greedy_answer(front, "hello the\nuser", 40)]
    assert page.focused() == "prompt", "the next message can be typed at once"
    assert page.tab.input_value("#prompt") == ""
    page.tab.keyboard.type("say hello")
    page.tab_to("send")
    page.press("Enter")
    page.complete()
    assert len(page.answers()) == 2
    assert page.focused() == "prompt"
    page.tab_to("clear")
    page.press("Space")
    assert page.answers() == []
    assert page.focused() == "prompt"


@in_chromium
def test_every_form_gives_the_same_answer_and_says_what_it_cost(visit: Callable[..., Visit], front: Any) -> None:
    page = visit().ready()
    page.tab.fill("#temperature", "0")
    page.tab.fill("#max-tokens", "120")
    expected = greedy_answer(front, "hello", 120)
    for compression, name in FORMS.items():
        before = {kind: front.metric("sixfold_stream_bytes_total", kind=kind) for kind in ("raw", "sent")}
        page.tab.click("#clear")
        page.tab.select_option("#compression", compression)
        page.ask("hello")
        raw, sent = (front.metric("sixfold_stream_bytes_total", kind=kind) - before[kind] for kind in before)
        assert page.answers() == [expected]
        assert page.text("form") == name
        assert page.text("bytes") == f"{size(raw)} → {size(sent)}, {raw / sent:.1f}\u00d7"
        assert (raw / sent > 3) == (compression != "identity")
    assert page.text("tokens") == "120"
    assert page.text("level") == "3"
    assert re.fullmatch(r"0 of \d+", page.text("cached"))
    assert page.text("accepted") == "none"
    for time in ("ttfb", "ttft"):
        assert re.fullmatch(r"\d+ ms|\d+\.\d\d s", page.text(time))


@in_chromium
def test_tokens_show_while_the_answer_is_on_its_way(visit: Callable[..., Visit]) -> None:
    page = visit().ready()
    page.tab.fill("#max-tokens", "400")
    page.tab.evaluate(
        """() => {
            window.lengths = new Set();
            new MutationObserver(() => {
                const last = document.querySelector(".message.assistant[aria-busy=true] .text");
                if (last !== null) window.lengths.add(last.textContent.length);
            }).observe(document.querySelector("#log"), {subtree: true, childList: true, characterData: true});
        }"""
    )
    page.ask("hello")
    assert page.tab.evaluate("window.lengths.size") > 5


@in_chromium
@pytest.mark.parametrize("way", ["Escape", "button"])
def test_stopping_cancels_the_request_and_keeps_what_came(
    visit: Callable[..., Visit], front: Any, until: Any, way: str
) -> None:
    page = visit().ready()
    page.tab.fill("#max-tokens", "3000")
    cancelled = front.metric("sixfold_requests_total", outcome="cancelled")
    page.tab.fill("#prompt", "hello")
    page.tab.press("#prompt", "Enter")
    until(lambda: any(len(text) > 20 for text in page.answers()), "the first words")
    if way == "Escape":
        page.press("Escape")
    else:
        page.tab_to("stop")
        page.press("Enter")
    page.complete()
    until(lambda: front.metric("sixfold_requests_total", outcome="cancelled") == cancelled + 1, "the engine to be told")
    assert "stopped" in page.tab.inner_text(".message.assistant .facts")
    assert len(page.answers()[0]) > 20
    assert page.focused() == "prompt"
    page.tab.fill("#max-tokens", "5")
    page.ask("and now?")
    assert len(page.answers()) == 2


@in_chromium
def test_a_dictionary_is_used_from_the_second_answer_on(
    visit: Callable[..., Visit], running: Any, new_gateway: Any, tmp_path: Path
) -> None:
    (tmp_path / "dictionary").write_bytes(b'data: {"id":"chatcmpl-","object":"chat.completion.chunk","created":' * 20)
    gateway = new_gateway(running.port, dictionary=tmp_path)
    gateway.apply(**CONFIG)
    page = visit(gateway.url).ready()
    page.tab.fill("#max-tokens", "5")
    with page.tab.expect_response(lambda response: "/v1/stream-dictionary/" in response.url):
        page.ask("hello")
    assert page.text("form") == FORMS["sse-zstd"]
    page.ask("hello")
    assert page.text("form") == FORMS["sse-zstd"] + ", with a dictionary"
    assert sum("/stream-dictionary/" in url for url in page.requested) == 1


@in_chromium
def test_the_decoder_is_there_before_it_is_needed(visit: Callable[..., Visit]) -> None:
    page = visit().ready()
    page.tab.wait_for_load_state("networkidle")
    assert any(url.endswith("/zstd.wasm") for url in page.requested)
    assert not any("/v1/chat" in url for url in page.requested)


# --- keys and errors


@in_chromium
def test_the_key_is_typed_in_and_kept_nowhere(browser: Any, running: Any, new_gateway: Any, tmp_path: Path) -> None:
    (tmp_path / "team").write_text("a-secret-key")
    gateway = new_gateway(running.port, keys=tmp_path)
    gateway.apply(**CONFIG)
    page = Visit(browser, gateway.url)
    page.tab.wait_for_selector("#key-note.wrong")
    assert "API key" in page.text("key-note")
    page.ask("hello")
    assert "invalid_api_key" in page.tab.inner_text(".message.assistant [role=alert]")
    page.tab.fill("#key", "a-secret-key")
    page.tab.press("#key", "Tab")
    page.ready()
    page.tab.fill("#max-tokens", "5")
    page.ask("hello")
    assert page.text("tokens") == "5"
    kept = "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
    assert "secret" not in page.tab.evaluate(kept)
    assert not any("secret" in url for url in page.requested)
    page.tab.reload()
    page.tab.wait_for_selector("#key")
    assert page.tab.input_value("#key") == ""
    page.tab.context.close()
    assert all("401" in error for error in page.errors)


@in_chromium
def test_what_the_model_is_told_of_the_chat(browser: Any, front: Any, until: Any) -> None:
    page = Visit(browser, front.url).ready()
    page.tab.fill("#max-tokens", "99999")
    page.ask("hello")
    assert "max_tokens may be at most" in page.tab.inner_text(".message.assistant [role=alert]")
    page.tab.fill("#max-tokens", "5")
    page.ask("<img src=x onerror=alert(1)>")
    assert page.tab.locator("#log img").count() == 0
    assert page.text("tokens") == "5"
    assert [len(turns) for turns in page.sent_turns()] == [1, 1], "what was refused isn't sent again"
    page.ask("and?")
    assert [turn["role"] for turn in page.sent_turns()[-1]] == ["user", "assistant", "user"]
    page.tab.fill("#max-tokens", "3000")
    page.tab.fill("#prompt", "long")
    page.tab.press("#prompt", "Enter")
    until(lambda: page.answers()[-1:] and len(page.answers()[-1]) > 20, "the first words")
    page.tab.click("#clear")
    page.tab.wait_for_selector("#send", state="visible")
    page.tab.fill("#max-tokens", "5")
    page.ask("anew")
    assert page.sent_turns()[-1] == [{"role": "user", "content": "anew"}]
    conversations = [request.headers["x-conversation-id"] for request in page.chats]
    assert len(set(conversations)) == 2
    assert conversations[0] == conversations[-2] != conversations[-1]
    page.tab.context.close()


# --- classify


@in_chromium
def test_labels_and_where_each_text_left(visit: Callable[..., Visit], front: Any) -> None:
    page = visit().ready()
    page.tab_to("tab-chat")
    page.press("ArrowRight")
    assert page.focused() == "tab-classify"
    page.tab_to("texts")
    for text in TEXTS:
        page.tab.keyboard.type(text)
        page.press("Enter")
    page.press("ControlOrMeta+Enter")
    page.tab.wait_for_selector(".result")
    expected = front.client.post("/v1/classify", json={"model": "assistant", "input": TEXTS}).json()["data"]
    shown = page.tab.eval_on_selector_all(".result", "all => all.map(one => one.innerText)")
    assert len(shown) == len(TEXTS)
    for text, item, row in zip(TEXTS, expected, shown, strict=True):
        assert text in row
        assert f"{item['label']}\n{item['score'] * 100:.1f} %" in re.sub(r"\n+", "\n", row)
        assert (f"left after {item['layers']} layers" if item["exited"] else f"all {item['layers']} layers") in row
    assert page.text("exits") == f"{sum(item['exited'] for item in expected)} of {len(TEXTS)}"
    page.tab_to("task")
    page.press("ArrowDown", "ArrowDown")
    assert page.tab.input_value("#task") in ("topic", "pos")
    page.tab.select_option("#task", "pos")
    page.tab.click("#label")
    page.tab.wait_for_selector(".result .chips")


# --- how it looks


CONTRAST = """() => {
    const luminance = ([r, g, b]) => [r, g, b]
        .map(value => value / 255)
        .map(value => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
        .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
    const numbers = color => color.match(/[\\d.]+/g).map(Number);
    const ground = element => {
        for (let at = element; at !== null; at = at.parentElement) {
            const color = numbers(getComputedStyle(at).backgroundColor);
            if (color.length < 4 || color[3] > 0) return color;
        }
    };
    const poor = [];
    for (const element of document.querySelectorAll("body *")) {
        const own = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim() !== "");
        if (!own && !["INPUT", "TEXTAREA", "SELECT"].includes(element.tagName)) continue;
        if (!element.checkVisibility()) continue;
        const colors = [numbers(getComputedStyle(element).color), ground(element)];
        const pair = colors.map(luminance).sort((a, b) => b - a);
        const contrast = (pair[0] + 0.05) / (pair[1] + 0.05);
        if (contrast < 4.5) poor.push([element.tagName, element.id, element.className, contrast]);
    }
    return poor;
}"""

NAMELESS = """() => [...document.querySelectorAll("button, input, select, textarea, meter, summary")]
    .filter(one => !one.labels?.length && !one.textContent.trim() && !one.getAttribute("aria-label"))
    .map(one => one.outerHTML)"""


@in_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 768, 360])
def test_it_fits_and_can_be_read(visit: Callable[..., Visit], scheme: str, width: int) -> None:
    page = visit(color_scheme=scheme, viewport={"width": width, "height": 800}).ready()
    page.ask("hello " + "longword" * 30)
    for name in ("chat", "classify"):
        page.tab.click(f"#tab-{name}")
        if name == "classify":
            page.tab.fill("#texts", "\n".join(TEXTS))
            page.tab.click("#label")
            page.tab.wait_for_selector(".result")
        assert page.tab.evaluate("document.documentElement.scrollWidth") <= width
        assert page.tab.evaluate(CONTRAST) == []
        assert page.tab.evaluate(NAMELESS) == []
        small = "all => all.filter(one => one.checkVisibility() && one.offsetHeight < 32).map(one => one.id)"
        assert page.tab.eval_on_selector_all("button, select, textarea", small) == []


def test_streams_for_the_packages_tests_are_the_gateways(tmp_path: Path) -> None:
    """The file decodes with the decoder of today; its bytes may differ with zstd's version."""
    import base64

    import zstandard

    folder = REPOSITORY / "runtime_image/stream-client/test"
    stream = json.loads((folder / "streams.json").read_text())["plain"]
    sent = b"".join(base64.b64decode(outer.removeprefix("data: ")) for outer in stream["sent"])
    assert zstandard.ZstdDecompressor().decompressobj().decompress(sent).decode() == "".join(stream["events"])
