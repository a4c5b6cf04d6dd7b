"""A canary's share of requests: who is in it, what it obeys, and that each arm is told apart everywhere."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sixfold_api.analysis import HashBy
from sixfold_api.runtime_config import CANARY, STABLE, CanaryConfig, ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.config import default_config
from sixfold_runtime.logs import JsonFormatter
from sixfold_runtime.modes.arms import arm_key, arm_of

CHATS, CLASSIFY = "/v1/chat/completions", "/v1/classify"
TENANT = ""
"""Of an open gateway."""
EXITS = {"rule": "Fixed", "threshold": 0.0, "lengthRelaxation": 0.0, "sanitize": {"keep": "a-z "}}
"""All texts leave after the first layer."""


@pytest.fixture(scope="module")
def running(shared_engine: Any, models: Path, classifiers: Path) -> Any:
    return shared_engine(
        ServedModel(name="chat", task=Task.GENERATION, path=str(models / "chat")),
        ServedModel(name="intent", task=Task.CLASSIFICATION, path=str(classifiers / "intent")),
    )


@pytest.fixture(scope="module")
def front(running: Any, shared_gateway: Any) -> Any:
    return shared_gateway(running.port)


@pytest.fixture
def apply(front: Any, running: Any) -> Callable[..., None]:
    """Stable at level 0, the canary at level 3, in gateway and engine."""

    def both(percent: int, hash_by: str = "Conversation", **canary: Any) -> None:
        share = {"percent": percent, "hashBy": hash_by, "level": 3, **canary}
        running.apply(level=0, canary=share)
        front.apply(level=0, canary=share)

    return both


def say(front: Any, conversation: str = "", *turns: str, request_id: str = "", **body: Any) -> Any:
    """Headers of the answer to the last of the user's turns."""
    headers = {"X-Conversation-Id": conversation, "X-Request-ID": request_id}
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns or ("hello",))]
    answer = front.client.post(
        CHATS,
        json={"model": "assistant", "messages": messages, "max_tokens": 1, "temperature": 0, **body},
        headers={name: value for name, value in headers.items() if value},
    )
    assert answer.status_code == 200, answer.text
    return answer.headers


def expected(percent: int, conversation: str) -> str:
    canary = CanaryConfig(percent=percent, config=default_config(3).stable)
    return arm_of(canary, arm_key(HashBy.CONVERSATION, "", TENANT, conversation, ()))


def test_each_arm_has_its_level_in_headers_and_metrics(front: Any, running: Any, apply: Callable[..., None]) -> None:
    apply(50)
    names = [f"talk-{number}" for number in range(16)]
    arms = {name: expected(50, name) for name in names}
    assert set(arms.values()) == {STABLE, CANARY}
    series = [
        (served, {"arm": arm, "level": level, "variant": "chat"}, name)
        for arm, level in ((STABLE, "0"), (CANARY, "3"))
        for served, name in (
            (front, "sixfold_requests_total"),
            (front, "sixfold_answer_tokens_count"),
            (front, "sixfold_request_engine_seconds_count"),
            (front, "sixfold_request_seconds_count"),
        )
    ]
    before = [served.metric(name, **labels) for served, labels, name in series]
    for name in names:
        headers = say(front, name)
        assert headers["X-Sixfold-Arm"] == arms[name]
        assert headers["X-Sixfold-Level"] == ("3" if arms[name] == CANARY else "0")
    counts = [served.metric(name, **labels) for served, labels, name in series]
    by_arm = {arm: list(arms.values()).count(arm) for arm in (STABLE, CANARY)}
    assert [now - then for now, then in zip(counts, before, strict=True)] == [
        by_arm[labels["arm"]] for _, labels, _ in series
    ]
    for arm, level, other in ((STABLE, "0", "3"), (CANARY, "3", "0")):
        assert running.metric("sixfold_flops_total", arm=arm, level=level, variant="chat") > 0
        assert running.metric("sixfold_flops_total", arm=arm, level=other) == 0


def test_a_conversation_stays_while_the_share_grows(front: Any, apply: Callable[..., None]) -> None:
    names = [f"talk-{number}" for number in range(40)]
    inside: set[str] = set()
    for percent in (5, 25, 50):
        apply(percent)
        now = {name for name in names if say(front, name)["X-Sixfold-Arm"] == CANARY}
        assert inside <= now
        inside = now
    assert inside and inside != set(names)


def test_without_a_name_a_conversation_is_told_by_its_beginning(front: Any, apply: Callable[..., None]) -> None:
    apply(50)
    arms = []
    for number in range(12):
        first, *later = (
            say(front, "", *turns)["X-Sixfold-Arm"]
            for turns in (
                (f"question {number}",),
                (f"question {number}", "answer", "and?"),
                (f"question {number}", "other answer", "and?", "so", "why?"),
            )
        )
        assert set(later) == {first}
        arms.append(first)
    assert set(arms) == {STABLE, CANARY}


def test_prompts_and_texts_have_arms_too(front: Any, apply: Callable[..., None]) -> None:
    apply(50)
    seen = set()
    for number in range(12):
        long = f"{number} " + "word " * 60
        prompts = [long, long + "more", [long + "again", "another choice"]]
        bodies = [{"model": "assistant", "prompt": prompt, "max_tokens": 1} for prompt in prompts]
        arms = {front.client.post("/v1/completions", json=body).headers["X-Sixfold-Arm"] for body in bodies}
        assert len(arms) == 1
        seen |= arms
    assert seen == {STABLE, CANARY}
    by_ids = {
        front.client.post(
            "/v1/completions", json={"model": "assistant", "prompt": [start, 5, 6], "max_tokens": 1}
        ).headers["X-Sixfold-Arm"]
        for start in range(2, 14)
    }
    assert by_ids == {STABLE, CANARY}


def test_by_request_each_request_draws_anew(front: Any, apply: Callable[..., None]) -> None:
    apply(50, "Request")
    drawn = {name: say(front, "one-talk", request_id=name)["X-Sixfold-Arm"] for name in map(str, range(12))}
    assert set(drawn.values()) == {STABLE, CANARY}
    assert drawn == {name: say(front, "another", request_id=name)["X-Sixfold-Arm"] for name in drawn}


def test_a_classification_obeys_its_arm_as_a_whole(front: Any, apply: Callable[..., None]) -> None:
    """Exits, sanitising and batches: all texts of a request go through the same layers."""
    apply(50, modes=("EarlyExit",), earlyExit=EXITS)
    seen = set()
    for number in range(12):
        answer = front.client.post(CLASSIFY, json={"input": [f"text \u00a7 {number}", "hello", "say"]})
        arm = answer.headers["X-Sixfold-Arm"]
        is_canary = arm == CANARY
        data = answer.json()["data"]
        assert [item["layers"] for item in data] == [1 if is_canary else 4] * 3
        assert [item["exited"] for item in data] == [is_canary] * 3
        assert data[0]["sanitized"] == is_canary
        seen.add(arm)
    assert seen == {STABLE, CANARY}


def test_an_escalated_text_stays_in_its_requests_arm(front: Any, running: Any, apply: Callable[..., None]) -> None:
    apply(99, escalate={"belowConfidence": 1.0, "promptTemplate": "Is {text} {labels}?", "maxTokens": 3})
    text = next(text for text in map(str, range(50)) if _text_arm(99, text) == CANARY)
    names = {"variant": "chat", "level": "3", "arm": CANARY}
    before = running.metric("sixfold_flops_total", **names)
    answer = front.client.post(CLASSIFY, json={"input": text})
    assert answer.json()["data"][0]["escalated"] is True
    assert answer.headers["X-Sixfold-Arm"] == CANARY
    assert running.metric("sixfold_flops_total", **names) > before


def _text_arm(percent: int, text: str) -> str:
    canary = CanaryConfig(percent=percent, config=default_config(3).stable)
    return arm_of(canary, arm_key(HashBy.CONVERSATION, "", TENANT, "", [text]))


def test_only_streams_of_the_arm_with_the_mode_are_compressed(front: Any, apply: Callable[..., None]) -> None:
    apply(50)
    forms: dict[str, set[str | None]] = {}
    for name in (f"talk-{number}" for number in range(12)):
        body = {"model": "assistant", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True}
        headers = {"X-Conversation-Id": name, "Accept-Encoding": "gzip"}
        answer = front.client.post(CHATS, json=body, headers=headers)
        forms.setdefault(answer.headers["X-Sixfold-Arm"], set()).add(answer.headers.get("Content-Encoding"))
    assert forms == {STABLE: {None}, CANARY: {"gzip"}}


def test_without_a_canary_all_are_stable(front: Any, running: Any) -> None:
    running.apply(level=3)
    front.apply(level=3)
    assert {say(front, f"talk-{number}")["X-Sixfold-Arm"] for number in range(8)} == {STABLE}
    assert front.client.get("/v1/models").headers["X-Sixfold-Arm"] == STABLE


def test_an_engine_that_knows_of_no_canary_yet_answers_as_it_can(front: Any, running: Any) -> None:
    """The gateway reads the configuration first: its word for an arm that isn't there does no harm."""
    running.apply(level=0)
    front.apply(level=0, canary={"percent": 99, "level": 3})
    headers = [say(front, f"talk-{number}") for number in range(3)]
    assert {(header["X-Sixfold-Arm"], header["X-Sixfold-Level"]) for header in headers} == {(CANARY, "0")}


def test_the_log_says_which_arm_it_was_and_what_the_engine_spent(
    front: Any, apply: Callable[..., None], caplog: pytest.LogCaptureFixture, until: Callable[..., Any]
) -> None:
    apply(50)
    caplog.set_level(logging.INFO)
    caplog.clear()
    arms = [say(front, name)["X-Sixfold-Arm"] for name in ("talk-1", "talk-2", "talk-3")]
    until(lambda: sum(record.name == "sixfold.requests" for record in caplog.records) >= 3, "three lines")
    lines = [json.loads(JsonFormatter().format(r)) for r in caplog.records if r.name == "sixfold.requests"]
    assert [line["arm"] for line in lines] == arms
    assert all(line["engine_seconds"] > 0 for line in lines)
