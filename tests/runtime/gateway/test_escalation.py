"""Texts that no label is sure enough for go to a generating model; without one they keep the classifier's label."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task

PATH = "/v1/classify"
SPOKEN = "neutral."
"""What the generating model says, whatever it is asked: each of its characters follows another one."""
ALWAYS = {"belowConfidence": 1.0, "promptTemplate": "Is {text} {labels}?", "maxTokens": len(SPOKEN)}


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Path:
    """A decoder whose layers add nothing: the last token alone decides which one comes next."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("parrot")
    torch.manual_seed(6)
    model = LlamaForCausalLM(AutoConfig.from_pretrained(models / "chat"))
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    tokenizer = Tokenizer.from_file(str(models / "chat" / "tokenizer.json"))
    start = tokenizer.encode("assistant: ").ids[-1]
    chain = [start, *(tokenizer.token_to_id(character) for character in SPOKEN)]
    embeddings, head = model.model.embed_tokens.weight.data, model.lm_head.weight.data.zero_()
    for last, following in zip(chain, [*chain[1:], chain[-1]], strict=True):
        head[following] += embeddings[last]
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models / "chat" / file, folder)
    return folder


@pytest.fixture(scope="module")
def classifier(models: Path) -> ServedModel:
    return ServedModel(name="sentiment", task=Task.CLASSIFICATION, path=str(models / "sentiment"))


@pytest.fixture(scope="module")
def running(shared_engine: Any, parrot: Path, classifier: ServedModel) -> Any:
    return shared_engine(ServedModel(name="chat", task=Task.GENERATION, path=str(parrot)), classifier)


@pytest.fixture(scope="module")
def front(running: Any, shared_gateway: Any) -> Any:
    return shared_gateway(running.port)


def items(gateway: Any, **body: Any) -> list[dict[str, Any]]:
    response = gateway.client.post(PATH, json={"input": ["hello", "the user"], **body})
    assert response.status_code == 200, response.text
    return list(response.json()["data"])


def test_an_answer_names_the_label_and_says_why(front: Any) -> None:
    front.apply()
    plain = items(front)
    assert all("escalated" not in item for item in plain)
    front.apply(escalate=ALWAYS)
    response = front.client.post(PATH, json={"input": ["hello", "the user"]}).json()
    for item, before in zip(response["data"], plain, strict=True):
        assert (item["escalated"], item["answer"]) == (True, SPOKEN)
        assert (item["label"], item["label_source"]) == ("neutral", "generation")
        assert item["scores"] == before["scores"]
        assert item["score"] == next(entry["score"] for entry in item["scores"] if entry["label"] == "neutral")
    usage = response["usage"]
    assert usage["completion_tokens"] == 2 * len(SPOKEN)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    front.apply()
    assert (
        usage["prompt_tokens"]
        > front.client.post(PATH, json={"input": ["hello", "the user"]}).json()["usage"]["prompt_tokens"]
    )


def test_only_unsure_texts_are_escalated(front: Any) -> None:
    front.apply()
    texts = ["hello", "the user", "say", "and the other one"]
    scores = [item["score"] for item in items(front, input=texts)]
    between = sum(sorted(scores)[1:3]) / 2
    front.apply(escalate=ALWAYS | {"belowConfidence": between})
    labelled = items(front, input=texts, top_k=1)
    assert [item["escalated"] for item in labelled] == [score < between for score in scores]
    for item, score in zip(labelled, scores, strict=True):
        assert len(item["scores"]) == 1
        assert item["label_source"] == ("generation" if score < between else "classification")
        assert ("answer" in item) == item["escalated"]


def test_an_answer_without_a_label_leaves_the_classifiers(front: Any) -> None:
    front.apply()
    plain = items(front)
    front.apply(escalate=ALWAYS | {"maxTokens": 3})
    before = front.metric("sixfold_escalated_total", result="unlabelled")
    for item, unescalated in zip(items(front), plain, strict=True):
        assert (item["escalated"], item["answer"], item["label_source"]) == (True, "neu", "classification")
        assert (item["label"], item["score"]) == (unescalated["label"], unescalated["score"])
    assert front.metric("sixfold_escalated_total", result="unlabelled") == before + 2


def test_requests_are_counted_once(front: Any) -> None:
    front.apply(escalate=ALWAYS)
    names = ("sixfold_requests_total", "sixfold_escalated_total")
    before = [front.metric(name) for name in names]
    items(front)
    assert [front.metric(name) for name in names] == [before[0] + 1, before[1] + 2]
    assert front.metric("sixfold_requests_total", task="Generation") == 0
    assert front.metric("sixfold_time_to_first_token_seconds_count", task="Generation", variant="chat") > 0


@pytest.mark.parametrize("filler", ["{", "}", "{}", "{0}", "{text.__class__}", "%s", "{{text}}"])
def test_braces_in_texts_and_templates_are_harmless(front: Any, filler: str) -> None:
    front.apply(escalate=ALWAYS | {"promptTemplate": filler + "{text}" + filler})
    (item,) = items(front, input="{labels}" + filler)
    assert item["answer"] == SPOKEN


def test_a_prompt_that_is_too_long_loses_no_label(front: Any) -> None:
    front.apply(escalate=ALWAYS | {"promptTemplate": "{text}" + "\u2603" * 2000})
    before = front.metric("sixfold_escalated_total", result="failed")
    for item in items(front):
        assert (item["escalated"], item["label_source"]) == (False, "classification")
        assert item["escalation_error"]["code"] == "context_length_exceeded"
        assert item["label"] == item["scores"][0]["label"]
    assert front.metric("sixfold_escalated_total", result="failed") == before + 2


@pytest.mark.parametrize(("reachable", "code"), [(True, "model_not_found"), (False, "no_engine_ready")])
def test_without_a_generating_engine_no_label_is_lost(
    classifier: ServedModel,
    new_engine: Any,
    new_gateway: Any,
    free_port: int,
    until: Callable[..., Any],
    reachable: bool,
    code: str,
) -> None:
    engine = new_engine(classifier)
    gateway = new_gateway(engine.port, *([] if reachable else [free_port]), ready=False)
    until(lambda: gateway.metric("sixfold_gateway_engines_ready") == 1, "the engine that classifies")
    gateway.apply(escalate=ALWAYS)
    for item in items(gateway):
        assert (item["escalated"], item["escalation_error"]["code"]) == (False, code)
        assert item["label"] == item["scores"][0]["label"]


def test_a_client_that_leaves_cancels_the_generation(front: Any, running: Any, until: Callable[..., Any]) -> None:
    front.apply(escalate=ALWAYS | {"maxTokens": 4000})

    def cancelled() -> float:
        return float(running.metric("sixfold_engine_requests_total", variant="chat", outcome="cancelled"))

    before = cancelled()

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=front.url, trust_env=False) as client:
            request = asyncio.create_task(client.post(PATH, json={"input": "hello"}))
            await asyncio.to_thread(until, lambda: running.metric("sixfold_requests_running") == 1, "the generation")
            request.cancel()

    asyncio.run(leave())
    until(lambda: cancelled() == before + 1, "the engine to cancel")
    until(lambda: running.metric("sixfold_requests_running") == 0, "the engine to be idle")


def test_neither_texts_nor_answers_are_logged(front: Any, caplog: pytest.LogCaptureFixture) -> None:
    front.apply(escalate=ALWAYS)
    caplog.set_level("DEBUG")
    caplog.clear()
    items(front, input="a very private text")
    everything = json.dumps([record.getMessage() + str(getattr(record, "fields", "")) for record in caplog.records])
    assert "private" not in everything
    assert SPOKEN not in everything
