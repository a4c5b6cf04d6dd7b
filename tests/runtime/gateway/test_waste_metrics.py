"""What the control loop sees of known requests: lengths, answers, and engine time, each to the last one."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from sixfold_runtime.logs import JsonFormatter

ENGINE = "sixfold_request_engine_seconds"
Lines = Callable[[int], list[dict[str, Any]]]


@pytest.fixture
def front(engine: Any, new_gateway: Any) -> Any:
    return new_gateway(engine.port)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, until: Callable[..., Any]) -> Lines:
    """Of the request log, when so many are there."""
    caplog.set_level(logging.INFO)
    caplog.clear()

    def read(count: int) -> list[dict[str, Any]]:
        until(lambda: sum(record.name == "sixfold.requests" for record in caplog.records) >= count, "the log")
        return [json.loads(JsonFormatter().format(r)) for r in caplog.records if r.name == "sixfold.requests"]

    return read


def complete(front: Any, prompt: Any, max_tokens: int = 2, **body: Any) -> Any:
    body = {"model": "assistant", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **body}
    return front.client.post("/v1/completions", json=body)


@pytest.mark.parametrize(
    ("tokens", "bucket"),
    [(1, "0-100"), (99, "0-100"), (100, "100-500"), (500, "500-2000"), (1999, "500-2000"), (2000, "2000+")],
)
def test_a_request_is_counted_by_its_length(front: Any, tokens: int, bucket: str) -> None:
    assert complete(front, [5] * tokens, 1).status_code == 200
    assert front.metric("sixfold_requests_total", length_bucket=bucket, outcome="ok", variant="chat") == 1
    assert front.metric("sixfold_requests_total") == 1
    assert front.metric(f"{ENGINE}_count", length_bucket=bucket, variant="chat", task="Generation", level="3") == 1
    assert front.metric(f"{ENGINE}_count") == 1


def test_of_several_prompts_the_longest_counts(front: Any) -> None:
    assert complete(front, [[5] * 3, [5] * 120, [5] * 7], 1).status_code == 200
    assert front.metric("sixfold_requests_total", length_bucket="100-500") == 1


def test_what_was_never_tokenised_has_no_length(front: Any) -> None:
    assert complete(front, "").status_code == 400
    assert front.metric("sixfold_requests_total", length_bucket="", outcome="refused") == 1
    assert front.metric(f"{ENGINE}_count") == 0


def test_answers_are_counted_by_their_tokens(front: Any) -> None:
    for tokens in (1, 2, 3, 9):
        complete(front, "hello", tokens)
    complete(front, ["one", "two"], 4)
    complete(front, "streamed", 4, stream=True)
    name, labels = "sixfold_answer_tokens", {"variant": "chat", "level": "3", "arm": "stable"}
    assert front.metric(f"{name}_count", **labels) == front.metric(f"{name}_count") == 7
    assert front.metric(f"{name}_sum", **labels) == 1 + 2 + 3 + 9 + 3 * 4
    upper = {bound: front.metric(f"{name}_bucket", le=bound) for bound in ("1.0", "2.0", "4.0", "8.0", "16.0")}
    assert upper == {"1.0": 1, "2.0": 2, "4.0": 6, "8.0": 6, "16.0": 7}


def test_the_log_and_the_metric_have_the_same_engine_time(front: Any, lines: Lines) -> None:
    complete(front, ["one", "two and more"], 3)
    front.client.post("/v1/classify", json={"input": ["hello", "the user", "say"]})
    generated, classified = lines(2)
    for line, task, variant in ((generated, "Generation", "chat"), (classified, "Classification", "sentiment")):
        seconds = front.metric(f"{ENGINE}_sum", task=task, variant=variant)
        assert line["engine_seconds"] == pytest.approx(seconds, abs=1e-6)
        assert seconds > 0
        assert front.metric(f"{ENGINE}_count", task=task, variant=variant) == 1, "one request, whatever is in it"


def test_what_an_escalated_text_took_is_the_other_models_time(front: Any, lines: Lines) -> None:
    front.apply(escalate={"belowConfidence": 1.0, "promptTemplate": "Is {text} {labels}?", "maxTokens": 3})
    answer = front.client.post("/v1/classify", json={"input": ["hello", "the user"]})
    assert all(item["escalated"] for item in answer.json()["data"])
    own = front.metric(f"{ENGINE}_sum", variant="sentiment")
    other = front.metric(f"{ENGINE}_sum", variant="chat")
    assert own > 0 and other > 0
    assert front.metric(f"{ENGINE}_count", variant="chat", task="Generation") == 2
    assert lines(1)[0]["engine_seconds"] == pytest.approx(own + other, abs=1e-6)
    assert front.metric("sixfold_answer_tokens_count") == 0, "no client asked for these"
    assert front.metric("sixfold_requests_total") == 1
