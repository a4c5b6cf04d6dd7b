"""Clients that leave: wherever their request is at that moment, it is gone within a step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.engine.scheduler import Limits

PROMPT_TOKENS = 4000
LONG_PROMPT = {"model": "chat", "prompt": [5] * PROMPT_TOKENS, "temperature": 0, "max_tokens": 8}
LONG_ANSWER = {"model": "chat", "prompt": "hello", "temperature": 0, "max_tokens": 4000}
SHORT = {**LONG_ANSWER, "max_tokens": 2}
PATH = "/v1/completions"
BATCHING = {
    "maxBatchTokens": 1024,
    "shortWaitSeconds": 0.01,
    "longWaitSeconds": 0.005,
    "maxWaitSeconds": 0.015,
    "maxQueuedRequests": 100,
}
STREAM = pytest.mark.parametrize("stream", [False, True])


def leave_when(gateway: Any, body: dict[str, Any], until: Callable[..., Any], condition: Callable[[], Any]) -> None:
    """Send a request, and close its connection as soon as the condition holds."""

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=60) as client:
            request = asyncio.create_task(client.post(PATH, json=body))
            await asyncio.to_thread(until, lambda: condition() or request.done(), "the moment to leave")
            assert not request.done(), "it was over before the client left"
            request.cancel()

    asyncio.run(ask())


def ended(engine: Any, outcome: str) -> float:
    return float(engine.metric("sixfold_engine_requests_total", outcome=outcome))


@pytest.fixture(scope="module")
def slow_engine(models: Path, shared_engine: Callable[..., Any]) -> Any:
    """It computes one request at a time, and two tokens of a prompt in a step."""
    served = ServedModel(name="chat", task=Task.GENERATION, path=str(models / "chat"))
    return shared_engine(served, limits=Limits(max_running=1, prefill_tokens=2))


@pytest.fixture(scope="module")
def slow(slow_engine: Any, shared_gateway: Any) -> Any:
    return shared_gateway(slow_engine.port)


@STREAM
def test_while_the_prompt_is_computed(slow: Any, slow_engine: Any, until: Callable[..., Any], stream: bool) -> None:
    cancelled = ended(slow_engine, "cancelled")
    computed = slow_engine.metric("sixfold_tokens_total", kind="actual")
    generated = slow_engine.metric("sixfold_generated_tokens_total")
    leave_when(
        slow,
        {**LONG_PROMPT, "stream": stream},
        until,
        lambda: slow_engine.metric("sixfold_tokens_total", kind="actual") > computed,
    )
    until(lambda: ended(slow_engine, "cancelled") == cancelled + 1, "the engine to cancel")
    assert slow_engine.metric("sixfold_requests_running") == 0
    assert slow_engine.metric("sixfold_tokens_total", kind="actual") - computed < PROMPT_TOKENS
    assert slow_engine.metric("sixfold_generated_tokens_total") == generated


@STREAM
def test_while_it_waits_in_the_engine(slow: Any, slow_engine: Any, until: Callable[..., Any], stream: bool) -> None:
    finished, cancelled = ended(slow_engine, "ok"), ended(slow_engine, "cancelled")
    with slow.client.stream("POST", PATH, json={**LONG_ANSWER, "stream": True}) as running:
        parts = running.iter_raw()  # it closes the connection when it goes
        next(parts)
        leave_when(
            slow,
            {**SHORT, "stream": stream},
            until,
            lambda: slow_engine.metric("sixfold_requests_waiting") == 1,
        )
        until(lambda: ended(slow_engine, "cancelled") == cancelled + 1, "the engine to cancel")
        assert slow_engine.metric("sixfold_requests_waiting") == 0
        assert slow_engine.metric("sixfold_requests_running") == 1, "its neighbour goes on"
    until(lambda: slow_engine.metric("sixfold_requests_running") == 0, "the neighbour to be cancelled too")
    assert ended(slow_engine, "ok") == finished


@STREAM
def test_while_it_waits_in_the_gateway(
    slow_engine: Any, new_gateway: Any, until: Callable[..., Any], stream: bool
) -> None:
    """Two prompts keep the engine busy, so the third one is held back."""
    gateway = new_gateway(slow_engine.port)
    gateway.apply(modes=["DynamicBatching"], batching=BATCHING)
    cancelled = ended(slow_engine, "cancelled")

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=60) as client:
            prompts = [asyncio.create_task(client.post(PATH, json=LONG_PROMPT)) for _ in range(2)]
            both = lambda: (  # noqa: E731
                slow_engine.metric("sixfold_requests_running") + slow_engine.metric("sixfold_requests_waiting") == 2
            )
            await asyncio.to_thread(until, both, "the engine to be busy")
            third = asyncio.create_task(client.post(PATH, json={**SHORT, "stream": stream}))
            queued = lambda: gateway.metric("sixfold_gateway_queue") == 1  # noqa: E731
            await asyncio.to_thread(until, queued, "the third to wait")
            third.cancel()
            await asyncio.to_thread(until, lambda: gateway.metric("sixfold_gateway_queue") == 0, "it to be forgotten")
            assert not any(prompt.done() for prompt in prompts), "they were over before the client left"
            for prompt in prompts:
                prompt.cancel()

    asyncio.run(ask())
    until(lambda: ended(slow_engine, "cancelled") == cancelled + 2, "the prompts to be cancelled")
    until(lambda: gateway.metric("sixfold_requests_total", outcome="cancelled") == 3, "all three to be counted")
    assert ended(slow_engine, "cancelled") == cancelled + 2, "the engine never saw the third"


@STREAM
def test_while_the_answer_is_computed(gateway: Any, engine: Any, until: Callable[..., Any], stream: bool) -> None:
    cancelled = ended(engine, "cancelled")
    generated = engine.metric("sixfold_generated_tokens_total")
    leave_when(
        gateway,
        {**LONG_ANSWER, "stream": stream},
        until,
        lambda: engine.metric("sixfold_generated_tokens_total") > generated,
    )
    until(lambda: ended(engine, "cancelled") == cancelled + 1, "the engine to cancel")
    assert engine.metric("sixfold_requests_running") == 0
    assert engine.metric("sixfold_generated_tokens_total") - generated < 3500
    still = engine.metric("sixfold_generated_tokens_total")
    assert gateway.client.post(PATH, json=SHORT).status_code == 200
    assert engine.metric("sixfold_generated_tokens_total") == still + 2, "nothing goes on for who left"
