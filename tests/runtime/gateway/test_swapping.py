"""Engines whose weights are being exchanged: others are preferred, and a full queue is a 429 that says when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from sixfold_api.runtime_config import ServedModel, WeightSet
from sixfold_api.scalars import FullWeights, Task
from sixfold_runtime.engine import drafts
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.engine.weight_loader import WeightLoader

COMPLETION = {"model": "chat", "prompt": "hello", "max_tokens": 4, "temperature": 0}


def weights(engine: Any) -> str:
    return str(engine.client.get("/state").json()["models"][0]["weights"])


@pytest.fixture
def new_swapping(
    new_engine: Callable[..., Any], models: Path, monkeypatch: pytest.MonkeyPatch, until: Callable[..., Any]
) -> Iterator[Callable[[], Any]]:
    """Starts engines without room for two sets of weights. They can't load any while the test holds the lock."""
    monkeypatch.setattr(WeightLoader, "fits_beside", lambda *_: False)
    served = ServedModel(
        name="chat",
        task=Task.GENERATION,
        path=str(models / "chat"),
        quantized=WeightSet(name="chat-int4", path=str(models / "chat")),
        full_weights=FullWeights.SWAP,
    )

    def start() -> Any:
        engine = new_engine(served, limits=Limits(max_waiting=1))
        until(lambda: engine.client.get("/readyz").status_code == 200, "the engine to load its model", 60)
        engine.apply(level=0)
        return engine

    yield start
    if drafts._loading.locked():
        drafts._loading.release()


@pytest.fixture
def swapping(new_swapping: Callable[[], Any], until: Callable[..., Any]) -> Callable[[], Any]:
    """Starts an engine that is in the middle of an exchange for as long as the test holds the loading lock."""
    engine = new_swapping()

    def begin() -> Any:
        drafts._loading.acquire()
        engine.apply(level=1, modes=["Quantized"])
        until(lambda: weights(engine) == "", "the exchange to begin", 60)
        return engine

    return begin


def test_a_lone_engine_queues_and_then_says_when_to_come_again(
    swapping: Callable[[], Any], new_gateway: Any, until: Callable[..., Any]
) -> None:
    engine = swapping()
    client = new_gateway(engine.port).openai()
    assert engine.client.get("/readyz").status_code == 200, "it takes requests meanwhile"
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(lambda: client.completions.create(**COMPLETION))
        until(lambda: engine.metric("sixfold_swap_queued_requests", variant="chat") == 1, "the first request to queue")
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(**COMPLETION)
        assert refused.value.code == "engine_swapping"
        assert 1 <= int(refused.value.response.headers["retry-after"]) <= 10
        drafts._loading.release()
        assert waits.result(60).usage.completion_tokens == 4
    assert weights(engine) == "chat-int4"


def test_requests_go_to_engines_that_are_not_swapping(
    swapping: Callable[[], Any], new_engine: Callable[..., Any], new_gateway: Any, models: Path, until: Any
) -> None:
    other = new_engine(ServedModel(name="chat", task=Task.GENERATION, path=str(models / "chat")))
    until(lambda: other.client.get("/readyz").status_code == 200, "the other engine to load its model")
    engine = swapping()
    gateway = new_gateway(engine.port, other.port)
    until(lambda: gateway.metric("sixfold_gateway_engines_ready") == 2, "both engines")
    for _ in range(4):
        assert gateway.openai().completions.create(**COMPLETION).usage.completion_tokens == 4
    assert other.metric("sixfold_engine_requests_total", variant="chat", outcome="length") == 4
    assert engine.metric("sixfold_swap_queued_requests", variant="chat") == 0


def test_engines_exchange_weights_one_at_a_time(
    new_swapping: Callable[[], Any], new_gateway: Any, until: Callable[..., Any]
) -> None:
    """While one loads, the other one answers with the weights that it has."""
    engines = [new_swapping(), new_swapping()]
    gateway = new_gateway(*(engine.port for engine in engines))
    until(lambda: gateway.metric("sixfold_gateway_engines_ready") == 2, "both engines", 60)
    drafts._loading.acquire()
    for engine in engines:
        engine.apply(level=1, modes=["Quantized"])
    until(lambda: "" in map(weights, engines), "one exchange to begin", 60)
    for _ in range(4):
        assert gateway.openai().completions.create(**COMPLETION).usage.completion_tokens == 4
    assert sorted(map(weights, engines)) == ["", "chat"]
    assert sum(engine.metric("sixfold_swap_queued_requests") for engine in engines) == 0
    drafts._loading.release()
    until(lambda: list(map(weights, engines)) == ["chat-int4"] * 2, "both exchanges", 60)
    assert sum(engine.metric("sixfold_weight_swaps_total", result="ok") for engine in engines) == 2
