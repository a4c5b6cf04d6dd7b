"""The gateway's queue over HTTP, in front of engines that answer when the test says so, and of a real one."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request as HttpRequest
from websockets.http11 import Response as HttpResponse
from websockets.typing import Subprotocol

from sixfold_runtime.engine.protocol import (
    SUBPROTOCOL,
    Cancel,
    Chunk,
    Classify,
    Done,
    Erase,
    Erased,
    FinishReason,
    Generate,
    LabelScore,
    ModelInfo,
    Prefetch,
    State,
    Step,
    Submit,
    ToGateway,
    TokenizerBundle,
    decode_to_engine,
    encode,
)

BATCHING = {
    "maxBatchTokens": 1024,
    "shortWaitSeconds": 0.01,
    "longWaitSeconds": 0.005,
    "maxWaitSeconds": 0.015,
    "maxQueuedRequests": 100,
}
KEYS = {"one": "key-of-one", "two": "key-of-two"}


def word_tokenizer() -> bytes:
    """A bundle whose tokens are words."""
    tokenizer = Tokenizer(models.WordLevel({"w": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return msgspec.json.encode(TokenizerBundle(tokenizer.to_str()))


BUNDLE = word_tokenizer()


@dataclass
class HeldEngine:
    """The engine's side of the wire: it takes down what it is sent, and answers what it is told to."""

    pod: str
    block_tokens: int = 0
    port: int = 0
    batches: list[list[Generate | Classify]] = field(default_factory=list)
    """Without an answer so far. What the gateway sends in one moment is one."""
    seen: list[int] = field(default_factory=list)
    """Lengths of all requests."""
    cancelled: list[str] = field(default_factory=list)
    prefetched: list[Prefetch] = field(default_factory=list)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _sockets: list[ServerConnection] = field(default_factory=list)

    def start(self) -> Callable[[], None]:
        started, stop = threading.Event(), asyncio.Event()

        async def main() -> None:
            options: dict[str, Any] = {"subprotocols": [Subprotocol(SUBPROTOCOL)], "compression": None}
            async with serve(self._talk, "127.0.0.1", self.port, process_request=self._http, **options) as server:
                self.port = next(iter(server.sockets)).getsockname()[1]
                started.set()
                await stop.wait()

        thread = threading.Thread(target=self._loop.run_until_complete, args=(main(),), daemon=True)
        thread.start()
        assert started.wait(30)

        def end() -> None:
            self._loop.call_soon_threadsafe(stop.set)
            thread.join(30)

        return end

    @property
    def waiting(self) -> list[str]:
        """Requests without an answer."""
        return [request.id for batch in self.batches for request in batch]

    def answer(self, count: int = 1) -> None:
        """The oldest batches."""
        for _ in range(count):
            batch = self.batches.pop(0)
            for request in batch:
                if isinstance(request, Generate):
                    self.send(Step([Chunk(request.id, "hello", 1, level=3)]))
                scores = [LabelScore("good", 1.0)] if isinstance(request, Classify) else []
                self.send(Done(request.id, FinishReason.STOP, 3, len(request.token_ids), 1, scores))

    def send(self, message: ToGateway) -> None:
        asyncio.run_coroutine_threadsafe(self._sockets[-1].send(encode(message)), self._loop).result(30)

    def cut(self) -> None:
        """Lose the connection, and all that was sent over it."""
        self.batches.clear()
        asyncio.run_coroutine_threadsafe(self._sockets[-1].close(), self._loop).result(30)

    def _http(self, _: ServerConnection, request: HttpRequest) -> HttpResponse | None:
        return HttpResponse(200, "OK", Headers(), BUNDLE) if request.path.startswith("/tokenizer/") else None

    async def _talk(self, socket: ServerConnection) -> None:
        digest = hashlib.sha256(BUNDLE).hexdigest()
        served = [
            ModelInfo("chat", "Generation", 4096, digest, kv_block_tokens=self.block_tokens),
            ModelInfo("mood", "Classification", 4096, digest, labels=["good"]),
        ]
        self._sockets.append(socket)
        await socket.send(encode(State(self.pod, served, sequence=1, level=3)))
        async for frame in socket:
            assert isinstance(frame, bytes)
            message = decode_to_engine(frame)
            if isinstance(message, Submit) and message.requests:
                self.batches.append(list(message.requests))
                self.seen += [len(request.token_ids) for request in message.requests]
            elif isinstance(message, Cancel):
                self.cancelled += message.ids
            elif isinstance(message, Prefetch):
                self.prefetched.append(message)
            elif isinstance(message, Erase):
                await socket.send(encode(Erased(message.id, blocks=3)))


@pytest.fixture
def until(until: Callable[..., Any]) -> Callable[..., Any]:
    return partial(until, timeout_seconds=20)


@pytest.fixture
def held_engine() -> Iterator[Callable[..., HeldEngine]]:
    with contextlib.ExitStack() as stack:

        def start(pod: str = "a", **options: Any) -> HeldEngine:
            engine = HeldEngine(pod, **options)
            stack.callback(engine.start())
            return engine

        yield start


@dataclass
class Clients:
    """Requests that are on their way at the same time."""

    gateway: Any
    pool: ThreadPoolExecutor

    def classify(self, tokens: int, **headers: str) -> Future[httpx.Response]:
        body = {"input": "w " * tokens, "model": "mood"}
        return self.pool.submit(self.gateway.client.post, "/v1/classify", json=body, headers=headers)

    def generate(self, tokens: int, **headers: str) -> Future[httpx.Response]:
        body = {"prompt": [0] * tokens, "model": "chat", "max_tokens": 5}
        return self.pool.submit(self.gateway.client.post, "/v1/completions", json=body, headers=headers)

    @property
    def queued(self) -> float:
        return float(self.gateway.metric("sixfold_gateway_queue"))

    def outcome(self, outcome: str) -> float:
        return float(self.gateway.metric("sixfold_gateway_queued_total", outcome=outcome))


@pytest.fixture
def clients(new_gateway: Any) -> Iterator[Callable[..., Clients]]:
    with ThreadPoolExecutor(40) as pool:

        def start(*engines: HeldEngine, keys: Path | None = None, **config: Any) -> Clients:
            gateway = new_gateway(*[engine.port for engine in engines], keys=keys)
            gateway.apply(batching=BATCHING | config.pop("batching", {}), **config)
            return Clients(gateway, pool)

        yield start


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir()
    for name, key in KEYS.items():
        (folder / name).write_text(key)
    return folder


def bearer(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[tenant]}"}


def test_a_lone_request_goes_at_once(held_engine: Any, clients: Any, until: Callable[..., Any]) -> None:
    engine = held_engine()
    ours = clients(engine)
    answer = ours.classify(20)
    until(lambda: engine.batches, "the request to arrive")
    engine.answer()
    assert answer.result(30).status_code == 200
    assert ours.gateway.metric("sixfold_gateway_batch_tokens_total", kind="padded") == 20
    waits = ours.gateway.metric("sixfold_gateway_queue_wait_seconds_count", priority="normal")
    assert waits == ours.outcome("sent") == ours.gateway.metric("sixfold_gateway_batch_requests_count") == 1


def test_what_waits_is_batched_by_length(held_engine: Any, clients: Any, until: Callable[..., Any]) -> None:
    engine = held_engine()
    ours = clients(engine)
    answers = [ours.classify(7)]
    until(lambda: len(engine.batches) == 1, "the first to be sent")
    # Behind the first goes one more batch, however long that takes; the rest keeps together here.
    answers.append(ours.classify(900))
    until(lambda: len(engine.batches) == 2, "the batch behind it")
    answers += [ours.classify(tokens) for tokens in (300, 10, 310, 20, 305, 12)]
    until(lambda: ours.queued == 6, "six to wait")
    finish(engine, answers, until)
    assert engine.seen == [7, 900, 10, 12, 20, 300, 305, 310] or engine.seen == [7, 900, 300, 305, 310, 10, 12, 20]
    assert ours.gateway.metric("sixfold_gateway_batch_requests_count") == 4
    assert ours.gateway.metric("sixfold_gateway_batch_tokens_total", kind="actual") == 7 + 900 + 915 + 42
    assert ours.gateway.metric("sixfold_gateway_batch_tokens_total", kind="padded") == 7 + 900 + 930 + 60


def busy(engine: HeldEngine, ours: Clients, until: Callable[..., Any], **headers: str) -> list[Future[httpx.Response]]:
    """Two batches that the engine has."""
    answers = []
    for count in (1, 2):
        answers.append(ours.classify(900, **headers))
        until(lambda count=count: len(engine.batches) == count, "a batch to be sent")
    return answers


def finish(engine: HeldEngine, answers: list[Future[httpx.Response]], until: Callable[..., Any]) -> None:
    """Answer whatever comes, until all have their answers, which are good."""
    while not all(answer.done() for answer in answers):
        until(lambda: engine.batches or all(answer.done() for answer in answers), "the next batch or the end")
        if engine.batches:
            engine.answer()
    assert {answer.result().status_code for answer in answers} == {200}


def test_high_priority_is_next(held_engine: Any, clients: Any, keys: Path, until: Callable[..., Any]) -> None:
    engine = held_engine()
    tenants = [{"name": "one", "priority": "Normal", "maxPriority": "High"}]
    ours = clients(engine, keys=keys, tenants=tenants)
    answers = busy(engine, ours, until, **bearer("one"))
    answers += [ours.classify(1000, **bearer("one")) for _ in range(3)]
    until(lambda: ours.queued == 3, "three to wait")
    answers.append(ours.classify(50, **bearer("one"), **{"X-Priority": "high"}))
    until(lambda: ours.queued == 4, "four to wait")
    finish(engine, answers, until)
    assert engine.seen == [900, 900, 50, 1000, 1000, 1000]
    assert ours.gateway.metric("sixfold_gateway_queue_wait_seconds_count", priority="high") == 1


def test_a_client_that_leaves_is_forgotten(held_engine: Any, clients: Any, until: Callable[..., Any]) -> None:
    engine = held_engine()
    ours = clients(engine)
    answers = busy(engine, ours, until)
    with pytest.raises(httpx.ReadTimeout):
        ours.gateway.client.post("/v1/classify", json={"input": "w"}, timeout=0.2)
    until(lambda: ours.outcome("left") == 1, "the one in the queue to be forgotten")
    finish(engine, answers, until)
    assert engine.batches == [] and engine.cancelled == []


def test_a_client_that_leaves_the_engine_cancels(held_engine: Any, clients: Any, until: Callable[..., Any]) -> None:
    engine = held_engine()
    ours = clients(engine)
    with pytest.raises(httpx.ReadTimeout):
        ours.gateway.client.post("/v1/classify", json={"input": "w"}, timeout=0.2)
    until(lambda: engine.cancelled == engine.waiting, "the request to be cancelled")
    # What was cancelled takes no place.
    engine.batches.clear()
    answers = busy(engine, ours, until)
    finish(engine, answers, until)


def test_a_full_queue_says_when_to_come_again(held_engine: Any, clients: Any, until: Callable[..., Any]) -> None:
    engine = held_engine()
    ours = clients(engine, batching={"maxQueuedRequests": 2})
    answers = busy(engine, ours, until)
    answers += [ours.classify(1000) for _ in range(2)]
    until(lambda: ours.queued == 2, "the queue to be full")
    refused = ours.classify(1000).result(30)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "gateway_overloaded"
    assert int(refused.headers["Retry-After"]) >= 1
    finish(engine, answers, until)
    assert ours.outcome("refused") == 1


def test_a_full_queue_is_shared(held_engine: Any, clients: Any, keys: Path, until: Callable[..., Any]) -> None:
    """The tenant that has most of it makes room for another one."""
    engine = held_engine()
    ours = clients(engine, keys=keys, batching={"maxQueuedRequests": 3})
    answers = busy(engine, ours, until, **bearer("one"))
    flood = [ours.classify(1000, **bearer("one")) for _ in range(3)]
    until(lambda: ours.queued == 3, "the queue to be full")
    other = ours.classify(1000, **bearer("two"))
    until(lambda: ours.outcome("displaced") == 1, "one to make room")
    until(lambda: any(answer.done() for answer in flood), "its answer")
    [refused] = [answer.result() for answer in flood if answer.done()]
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_share_exceeded"
    assert int(refused.headers["Retry-After"]) >= 1
    again = ours.classify(1000, **bearer("one")).result(30)
    assert again.status_code == 429, "it has its share"
    finish(engine, [*answers, other, *(answer for answer in flood if not answer.done())], until)


def test_a_deadline_ends_the_wait(held_engine: Any, clients: Any, until: Callable[..., Any]) -> None:
    engine = held_engine()
    ours = clients(engine)
    answers = busy(engine, ours, until)
    late = ours.classify(10, **{"X-Request-Timeout": "0.2"}).result(30)
    assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_exceeded"
    until(lambda: ours.queued == 0, "the queue to be empty")
    finish(engine, answers, until)


def test_what_a_lost_engine_had_goes_to_another(held_engine: Any, clients: Any, until: Callable[..., Any]) -> None:
    first, second = held_engine("a"), held_engine("b")
    ours = clients(first, second)
    answers = [ours.classify(900) for _ in range(4)]
    until(lambda: len(first.waiting) == len(second.waiting) == 2, "both to have two batches")
    answers += [ours.classify(900) for _ in range(2)]
    until(lambda: ours.queued == 2, "two to wait")
    first.cut()
    until(lambda: first.batches, "the engine to be back, with work")
    while not all(answer.done() for answer in answers):
        until(lambda: first.batches or second.batches or all(a.done() for a in answers), "the next batch or the end")
        for engine in (first, second):
            if engine.batches:
                engine.answer()
    assert [answer.result().status_code for answer in answers] == [200] * 6


def test_switched_off_all_that_wait_are_sent(held_engine: Any, clients: Any, until: Callable[..., Any]) -> None:
    engine = held_engine()
    ours = clients(engine)
    answers = busy(engine, ours, until)
    answers += [ours.classify(900) for _ in range(3)]
    until(lambda: ours.queued == 3, "three to wait")
    ours.gateway.apply()
    until(lambda: len(engine.waiting) == 5, "all to be sent")
    answers.append(ours.classify(900))
    until(lambda: len(engine.waiting) == 6, "a new one to be sent at once")
    engine.answer(len(engine.batches))
    assert [answer.result(30).status_code for answer in answers] == [200] * 6


def test_an_engine_is_free_for_prompts_after_the_first_token(
    held_engine: Any, clients: Any, until: Callable[..., Any]
) -> None:
    engine = held_engine()
    ours = clients(engine)
    answers = [ours.generate(900)]
    until(lambda: len(engine.batches) == 1, "the first prompt")
    answers += [ours.generate(900) for _ in range(2)]
    until(lambda: len(engine.waiting) == 2 and ours.queued == 1, "one behind it, one in the queue")
    engine.send(Step([Chunk(engine.waiting[0], "he", 1, level=3)]))
    until(lambda: len(engine.waiting) == 3, "the third prompt, while the first is decoded")
    finish(engine, answers, until)
    assert [answer.result().json()["choices"][0]["text"] for answer in answers].count("hello") == 2


# Keys and values


def test_turns_of_a_conversation_go_to_one_engine(
    held_engine: Any, clients: Any, keys: Path, until: Callable[..., Any]
) -> None:
    engines = [held_engine("a", block_tokens=16), held_engine("b", block_tokens=16)]
    ours = clients(*engines, keys=keys)
    seen: dict[tuple[str, str], set[str]] = {}
    for _turn in range(3):
        for tenant in KEYS:
            for conversation in ("x", "y", "z", "u", "v"):
                answer = ours.generate(40, **bearer(tenant), **{"X-Conversation-Id": conversation})
                until(lambda: any(engine.batches for engine in engines), "the request to arrive")
                [engine] = [engine for engine in engines if engine.batches]
                seen.setdefault((tenant, conversation), set()).add(engine.pod)
                engine.answer()
                assert answer.result(30).status_code == 200
    assert all(len(pods) == 1 for pods in seen.values())
    assert set.union(*seen.values()) == {"a", "b"}


def test_an_idle_engine_is_better_than_one_that_knows_the_prompt(
    held_engine: Any, clients: Any, until: Callable[..., Any]
) -> None:
    engines = [held_engine("a", block_tokens=16), held_engine("b", block_tokens=16)]
    ours = clients(*engines)
    answers = [ours.generate(40) for _ in range(2)]
    until(lambda: all(engine.batches for engine in engines), "each to have one of the same prompts")
    for engine in engines:
        engine.answer()
    assert [answer.result(30).status_code for answer in answers] == [200] * 2


def test_prefetch_goes_where_the_request_will(held_engine: Any, clients: Any, until: Callable[..., Any]) -> None:
    engines = [held_engine("a", block_tokens=16), held_engine("b", block_tokens=16)]
    ours = clients(*engines)
    server = ours.gateway.app.state.gateway
    for conversation in map(str, range(6)):
        answer = ours.generate(40, **{"X-Conversation-Id": conversation})
        until(lambda: any(engine.batches for engine in engines), "the request to arrive")
        [engine] = [engine for engine in engines if engine.batches]
        engine.answer()
        answer.result(30)
        before = [len(other.prefetched) for other in engines]
        server.pool.prefetch("chat", "", conversation)
        # The queue of the session is read by the gateway's loop, which the next request wakes.
        ours.gateway.client.get("/v1/models")
        until(lambda before=before: [len(e.prefetched) for e in engines] != before, "the prefetch to arrive")
        assert engine.prefetched[-1].conversation == conversation


def test_without_blocks_nothing_is_prefetched(held_engine: Any, clients: Any) -> None:
    engine = held_engine()
    ours = clients(engine)
    ours.gateway.app.state.gateway.pool.prefetch("chat", "", "x")
    assert ours.gateway.client.get("/v1/models").status_code == 200
    assert engine.prefetched == []


# A real engine


def test_a_real_engine_answers_the_same_in_batches(engine: Any, new_gateway: Any) -> None:
    plain, batching = new_gateway(engine.port), new_gateway(engine.port)
    batching.apply(batching=BATCHING)
    texts = ["hello " * count for count in (1, 5, 2, 9, 3, 8, 4, 7)]
    body = {"input": texts, "model": "sentiment"}
    scores = [
        [
            [entry["score"] for entry in item["scores"]]
            for item in gateway.client.post("/v1/classify", json=body).json()["data"]
        ]
        for gateway in (plain, batching)
    ]
    assert all(first == pytest.approx(second, abs=1e-5) for first, second in zip(*scores, strict=True))
    prompts = {"prompt": texts, "model": "chat", "max_tokens": 6, "temperature": 0}
    answers = [gateway.client.post("/v1/completions", json=prompts).json() for gateway in (plain, batching)]
    assert [choice["text"] for choice in answers[0]["choices"]] == [choice["text"] for choice in answers[1]["choices"]]
    assert batching.metric("sixfold_gateway_batch_requests_sum") == 16
    assert batching.metric("sixfold_gateway_batch_requests_count") < 16
