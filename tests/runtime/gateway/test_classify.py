"""/v1/classify with exits, tasks and words, over a real trunk with exit heads and slices."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.gateway import core
from sixfold_runtime.logs import JsonFormatter

PATH = "/v1/classify"
TOPICS, TAGS, LAYERS = ["sport", "music", "war", "food"], ["NOUN", "OTHER"], 4
TEXTS = ["hello the user", "say", "the other assistant says hello to the user", "x y z", "one two three", "no"]
EXITS: dict[str, Any] = {"rule": "Fixed", "threshold": 0.9, "lengthRelaxation": 0.0}


def subgraphs(*names: str) -> dict[str, Any]:
    return {"tasks": [{"name": name} for name in names], "onDemand": True}


def level_3(tasks: Sequence[str] = ("topic", "pos"), **more: Any) -> dict[str, Any]:
    return {
        "modes": ("EarlyExit", "Subgraphs"),
        "earlyExit": EXITS,
        "classificationSubgraphs": subgraphs(*tasks),
        **more,
    }


@pytest.fixture(scope="module")
def served(classifiers: Path) -> ServedModel:
    return ServedModel(name="intent", task=Task.CLASSIFICATION, path=str(classifiers / "intent"))


@pytest.fixture(scope="module")
def running(shared_engine: Any, served: ServedModel) -> Any:
    return shared_engine(served)


@pytest.fixture(scope="module")
def front(running: Any, shared_gateway: Any) -> Any:
    return shared_gateway(running.port)


@pytest.fixture
def pair(front: Any, running: Any) -> Any:
    """The gateway, with `apply` for both sides, at level 3."""

    class Pair:
        url, client, metric = front.url, front.client, front.metric

        def apply(self, **config: Any) -> None:
            running.apply(**config)
            front.apply(**config)

        def post(self, body: dict[str, Any], task: str | None = None) -> Any:
            return self.client.post(PATH, json=body, headers={} if task is None else {"X-Task": task})

        def items(self, body: dict[str, Any], task: str | None = None) -> list[dict[str, Any]]:
            response = self.post(body, task)
            assert response.status_code == 200, response.text
            return list(response.json()["data"])

    both = Pair()
    both.apply(**level_3())
    return both


def scores(item: dict[str, Any]) -> dict[str, float]:
    """Best first. Other texts in the batch change the last digits."""
    return {entry["label"]: entry["score"] for entry in item["scores"]}


def test_texts_exit_and_say_where(pair: Any) -> None:
    early = pair.items({"input": TEXTS})
    assert {item["layers"] for item in early} > {LAYERS}, "some leave early, others run through"
    for item in early:
        assert item["exited"] == (item["layers"] < LAYERS)
        assert item["score"] >= EXITS["threshold"] or not item["exited"]
        assert (item["label"], item["score"]) == tuple(item["scores"][0].values())
        assert (item["task"], item["sanitized"]) == (None, False)
        assert "tokens" not in item and "escalated" not in item
    full = pair.items({"input": TEXTS, "early_exit": False})
    assert {(item["layers"], item["exited"]) for item in full} == {(LAYERS, False)}
    pair.apply(**level_3() | {"level": 2, "modes": (), "earlyExit": None})
    below = pair.items({"input": TEXTS})
    for item, through in zip(below, full, strict=True):
        assert scores(item) == pytest.approx(scores(through), abs=1e-5)


def test_alone_and_in_a_batch_a_text_gets_the_same(pair: Any) -> None:
    for text, together in zip(TEXTS, pair.items({"input": TEXTS}), strict=True):
        (alone,) = pair.items({"input": text})
        assert (alone["label"], alone["layers"]) == (together["label"], together["layers"])
        assert alone["score"] == pytest.approx(together["score"], abs=1e-5)


def test_the_engine_sends_the_best_labels_only(pair: Any) -> None:
    full = pair.items({"input": TEXTS})
    best = pair.items({"input": TEXTS, "top_k": 1})
    assert [[*scores(item)] for item in best] == [[item["label"]] for item in full]
    many = pair.items({"input": TEXTS, "top_k": 50})
    assert [[*scores(item)] for item in many] == [[*scores(item)] for item in full]


def test_a_task_has_its_own_labels(pair: Any) -> None:
    for body, header in (({}, "topic"), ({"task": "topic"}, None), ({"task": "topic"}, "topic")):
        response = pair.post({"input": TEXTS[:2], **body}, header).json()
        assert response["task"] == "topic"
        for item in response["data"]:
            assert sorted(score["label"] for score in item["scores"]) == sorted(TOPICS)
            assert (item["task"], item["layers"], item["exited"]) == ("topic", LAYERS, False)


def test_words_are_places_in_the_text_as_it_was_sent(pair: Any) -> None:
    pair.apply(**level_3() | {"earlyExit": EXITS | {"sanitize": {"keep": "a-z ", "otherScripts": "Remove"}}})
    text = "  the <user> 你好 says\n🎉 hello!"
    (item,) = pair.items({"input": text}, "pos")
    assert [text[word["start"] : word["end"]] for word in item["tokens"]] == [word["text"] for word in item["tokens"]]
    assert "".join(word["text"] for word in item["tokens"]) == "".join(text.split())
    assert {"the", "says", "hello"} <= {word["text"] for word in item["tokens"]}
    assert all(word["label"] in TAGS and 0.5 <= word["score"] <= 1 for word in item["tokens"])
    assert (item["task"], item["layers"], item["sanitized"]) == ("pos", LAYERS, False)
    assert "label" not in item and "scores" not in item
    assert pair.items({"input": " "}, "pos")[0]["tokens"] == []


def test_tasks_are_listed(pair: Any) -> None:
    for name in ("assistant", "intent"):
        assert pair.client.get(f"/v1/models/{name}").json()["tasks"] == [
            {"name": "topic", "task": "Classification", "labels": TOPICS},
            {"name": "pos", "task": "TokenClassification", "labels": TAGS},
        ]


@pytest.mark.parametrize(
    ("body", "header", "status", "code", "words"),
    [
        ({}, "poetry", 404, "task_not_found", ["'poetry'", "topic, pos"]),
        ({"task": "poetry"}, None, 404, "task_not_found", ["'poetry'", "topic, pos"]),
        ({"task": "topic"}, "pos", 400, "invalid_value", ["X-Task", "task"]),
        ({"top_k": 1}, "pos", 400, "invalid_value", ["top_k"]),
        ({"task": ""}, None, 400, "invalid_value", ["task"]),
        ({"task": 5}, None, 400, "invalid_value", ["task"]),
        ({"task": ["topic"]}, None, 400, "invalid_value", ["task"]),
        ({"early_exit": "no"}, None, 400, "invalid_value", ["early_exit"]),
        ({"top_k": 1.0}, None, 400, "invalid_value", ["top_k"]),
        ({"model": "nobody"}, "topic", 404, "model_not_found", ["nobody"]),
        ({"input": ["a", "word " * 500]}, "pos", 400, "context_length_exceeded", ["input.1"]),
    ],
)
def test_what_is_refused(
    pair: Any, body: dict[str, Any], header: str | None, status: int, code: str, words: list[str]
) -> None:
    response = pair.post({"input": "hello", **body}, header)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code)
    assert all(word in error["message"] for word in words), error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_a_slice_for_other_weights_is_refused_and_the_others_serve(pair: Any, classifiers: Path) -> None:
    slices = classifiers / "intent" / "slices"
    (slices / "foreign.safetensors").write_bytes((classifiers / "trunk" / "slices" / "pos.safetensors").read_bytes())
    pair.apply(**level_3(tasks=("topic", "foreign")))
    response = pair.post({"input": "hello"}, "foreign")
    (slices / "foreign.safetensors").unlink()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "slice_unusable")
    assert pair.items({"input": "hello"}, "topic")[0]["label"] in TOPICS


def test_a_trunk_without_a_head_needs_a_task(classifiers: Path, new_engine: Any, new_gateway: Any) -> None:
    engine = new_engine(ServedModel(name="trunk", task=Task.CLASSIFICATION, path=str(classifiers / "trunk")))
    engine.apply(**level_3())
    gateway = new_gateway(engine.port)
    response = gateway.client.post(PATH, json={"input": "hello"})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "task_required", "task")
    assert "topic, pos" in error["message"]
    answer = gateway.client.post(PATH, json={"input": "hello"}, headers={"X-Task": "topic"})
    assert answer.json()["data"][0]["label"] in TOPICS


def test_a_model_that_labels_tokens(classifiers: Path, new_engine: Any, new_gateway: Any) -> None:
    path = str(classifiers / "tagger")
    gateway = new_gateway(new_engine(ServedModel(name="tagger", task=Task.TOKEN_CLASSIFICATION, path=path)).port)
    texts = ["the old dog", "ran  home"]
    items = gateway.client.post(PATH, json={"input": texts}).json()["data"]
    assert [[word["text"] for word in item["tokens"]] for item in items] == [text.split() for text in texts]
    assert items[1]["tokens"][1]["start"] == 5
    response = gateway.client.post(PATH, json={"input": texts, "top_k": 2})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "top_k")


def test_tasks_reach_engines_that_have_them(
    pair: Any, running: Any, served: ServedModel, new_engine: Any, new_gateway: Any, until: Callable[..., Any]
) -> None:
    """Engines and gateways may be a configuration apart."""
    behind = new_engine(served)
    gateway = new_gateway(running.port, behind.port, ready=False)
    until(lambda: gateway.metric("sixfold_gateway_engines_ready") == 2, "both engines")
    for _ in range(4):
        assert gateway.client.post(PATH, json={"input": "hello"}, headers={"X-Task": "topic"}).status_code == 200

    alone = new_gateway(behind.port)
    assert alone.client.post(PATH, json={"input": "hello"}, headers={"X-Task": "topic"}).status_code == 404
    alone.apply(**level_3())
    answers: list[Any] = []
    call = threading.Thread(
        target=lambda: answers.append(alone.client.post(PATH, json={"input": "hello"}, headers={"X-Task": "topic"}))
    )
    call.start()
    behind.apply(**level_3())
    call.join(60)
    assert answers[0].status_code == 200, answers[0].text


def test_a_task_that_no_engine_offers_so_far(
    pair: Any, running: Any, new_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "RESTART_SECONDS", 0.1)
    ahead = new_gateway(running.port)
    ahead.apply(**level_3(tasks=("topic", "poetry")))
    response = ahead.client.post(PATH, json={"input": "hello"}, headers={"X-Task": "poetry"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "task_not_ready")
    assert int(response.headers["retry-after"]) >= 1


def test_texts_are_sanitised_where_they_may_exit(pair: Any) -> None:
    plain = pair.items({"input": "hello user"})[0]
    pair.apply(**level_3() | {"earlyExit": EXITS | {"sanitize": {"keep": "a-z "}}})
    cleaned, same, other, empty = pair.items({"input": ["hel|lo 🎉us§er", "hello user", "héllo §", "§§"]})
    assert [item["sanitized"] for item in (cleaned, same, other, empty)] == [True, False, False, False]
    assert scores(cleaned) == pytest.approx(scores(plain), abs=1e-5)
    assert scores(same) == pytest.approx(scores(plain), abs=1e-5)
    for result in ("changed", "unchanged", "other_script", "would_be_empty"):
        assert pair.metric("sixfold_sanitized_requests_total", result=result) == 1
    for body, task in (({"input": "§hello"}, "topic"), ({"input": "§hello", "early_exit": False}, None)):
        assert not pair.items(body, task)[0]["sanitized"], "these don't exit"
    pair.apply(level=2, classificationSubgraphs=subgraphs("topic"))
    assert not pair.items({"input": "§hello"})[0]["sanitized"]
    assert pair.metric("sixfold_sanitized_requests_total") == 4


def test_metrics_and_log_name_the_task(pair: Any, caplog: pytest.LogCaptureFixture, until: Callable[..., Any]) -> None:
    caplog.set_level(logging.INFO, "sixfold.requests")
    before = pair.metric("sixfold_requests_total", slice="topic", task="Classification", outcome="ok")
    pair.items({"input": "hello"}, "topic")
    pair.post({"input": "hello"}, "made-up-by-a-caller")
    until(lambda: len(caplog.records) >= 2, "two lines in the log")
    assert pair.metric("sixfold_requests_total", slice="topic", outcome="ok") == before + 1
    assert pair.metric("sixfold_request_seconds_count", slice="topic") >= 1
    good, bad = (json.loads(JsonFormatter().format(record)) for record in caplog.records[:2])
    assert (good["task"], good["model_name"]) == ("topic", "intent")
    assert bad["error_code"] == "task_not_found"
    assert "made-up" not in json.dumps(bad) + pair.client.get("/metrics").text


def test_the_document_tells_of_it(pair: Any) -> None:
    document = pair.client.get("/openapi.json").json()
    operation = document["paths"][PATH]["post"]
    assert [parameter["name"] for parameter in operation["parameters"]] == ["X-Task", "X-Priority", "X-Request-Timeout"]
    reference = operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
    answer = document["components"]["schemas"][reference.rpartition("/")[2]]
    item = document["components"]["schemas"]["LabelledText"]["properties"]
    assert answer["properties"]["data"]["items"] == {"$ref": "#/components/schemas/LabelledText"}
    assert {"label", "score", "scores", "layers", "exited", "tokens", "sanitized", "escalated", "answer"} <= item.keys()
