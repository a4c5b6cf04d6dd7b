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


@pytest.fixture
def swapping(
    new_engine: Callable[..., Any], models: Path, monkeypatch: pytest.MonkeyPatch, until: Callable[..., Any]
) -> Iterator[Callable[[], Any]]:
    """Starts an engine that is in the middle of an exchange for as long as the test holds the loading lock."""
    monkeypatch.setattr(WeightLoader, "fits_beside", lambda *_: False)
    served = ServedModel(
        name="chat",
        task=Task.GENERATION,
        path=str(models / "chat"),
        quantized=WeightSet(name="chat-int4", path=str(models / "chat")),
        full_weights=FullWeights.SWAP,
    )
    engine = new_engine(served, limits=Limits(max_waiting=1))
    until(lambda: engine.client.get("/readyz").status_code == 200, "the engine to load its model", 60)
    engine.apply(level=0)

    def begin() -> Any:
        drafts._loading.acquire()
        engine.apply(level=1, modes=["Quantized"])
        until(lambda: engine.client.get("/state").json()["models"][0]["weights"] == "", "the exchange to begin")
        return engine

    yield begin
    if drafts._loading.locked():
        drafts._loading.release()


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
    assert engine.client.get("/state").json()["models"][0]["weights"] == "chat-int4"


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
