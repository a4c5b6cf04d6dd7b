"""Levels 0 to 3 differ in cost: which weights answer, whether tokens are drafted, and what the status says of it."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import openai
import pytest
from levels import LevelMeter
from stack import JOURNEY_KEY, Cluster, Document, condition, pod_metrics, wait_until

QUESTION = [{"role": "user", "content": "What news from the court, and who brought it?"}]
WEIGHTS = {0: "chat", 1: "chat-int4", 2: "chat-int4", 3: "chat-int4"}
DRAFTS = {0: False, 1: False, 2: True, 3: True}


@pytest.fixture
def client(gateway: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway}/v1", api_key=JOURNEY_KEY, max_retries=0)


def test_quantised_weights_say_what_they_cost(cluster: Cluster, namespace: str) -> None:
    variant = ready_variant(cluster, namespace, "chat-int4")
    quality, budget = variant["status"]["quality"], condition(variant, "WithinBudget")
    assert budget["status"] == "True", budget
    assert quality["metric"] == "perplexity"
    assert float(quality["loss"]) <= float(quality["budget"]) == 1.0
    assert variant["status"]["artifact"]["scheme"] == "GPTQ"
    full = ready_variant(cluster, namespace, "chat")["status"]["artifact"]
    assert variant["status"]["artifact"]["digest"] != full["digest"]
    assert variant["status"]["artifact"]["tokenizerFingerprint"] == full["tokenizerFingerprint"]
    print(f"\nchat-int4: perplexity {quality['source']} -> {quality['prepared']} ({quality['loss']} %), {budget}")


def test_a_draft_is_measured_against_its_target(cluster: Cluster, namespace: str) -> None:
    variant = ready_variant(cluster, namespace, "chat-draft")
    draft, compatible = variant["status"]["draft"], condition(variant, "DraftCompatible")
    assert draft["target"] == "chat"
    assert (compatible["status"] == "True") == (not draft.get("warnings")), compatible
    assert 0 < float(draft["latencyRatio"]) < 1 > float(draft["parameterRatio"]) > 0
    print(f"\nchat-draft: {draft} {compatible['reason']}: {compatible['message']}")


async def test_each_level_answers_with_its_own_weights(cluster: Cluster, namespace: str, client: openai.OpenAI) -> None:
    """Tokens of an answer are counted under the weights that made them, and drafts only where the level drafts."""
    meter = LevelMeter(cluster, namespace, "assistant")
    for level in (0, 1, 2, 3):
        await asyncio.to_thread(meter.move, level)
        await asyncio.to_thread(wait_until, f"level {level}", lambda level=level: modes_at(cluster, namespace, level))
        before = generated(cluster, namespace)
        answer = await asyncio.to_thread(ask, client)
        after = generated(cluster, namespace)
        made = {name: after[name] - before.get(name, 0) for name in after if after[name] > before.get(name, 0)}
        assert made == {WEIGHTS[level]: answer.usage.completion_tokens}
        details = answer.usage.completion_tokens_details
        drafted = details.accepted_prediction_tokens + details.rejected_prediction_tokens
        assert (drafted > 0) == DRAFTS[level]
        print(f"\nlevel {level}: {made}, {drafted} drafted, {details.accepted_prediction_tokens} accepted", end="")


async def test_a_request_can_opt_out_of_drafts(cluster: Cluster, namespace: str, client: openai.OpenAI) -> None:
    await asyncio.to_thread(LevelMeter(cluster, namespace, "assistant").move, 3)
    plain = await asyncio.to_thread(ask, client, speculative=False)
    details = plain.usage.completion_tokens_details
    assert details is None or not (details.accepted_prediction_tokens or details.rejected_prediction_tokens)


def ask(client: openai.OpenAI, **extra: Any) -> Any:
    return client.chat.completions.create(
        model="assistant", messages=QUESTION, max_tokens=48, temperature=0, extra_body=extra
    )


def ready_variant(cluster: Cluster, namespace: str, name: str) -> Document:
    variant = cluster.get(namespace, "mvar", name)
    assert variant is not None
    assert condition(variant, "Ready")["status"] == "True", variant["status"]
    return variant


def generated(cluster: Cluster, namespace: str) -> dict[str, int]:
    """Tokens that the engine has generated so far, by the variant whose weights made them."""
    counts: dict[str, int] = {}
    for line in pod_metrics(cluster, namespace, "engine").splitlines():
        if line.startswith("sixfold_generated_tokens_total{"):
            name = re.search(r'variant="([^"]+)"', line)
            assert name is not None
            counts[name[1]] = counts.get(name[1], 0) + round(float(line.rsplit(" ", 1)[1]))
    return counts


def modes_at(cluster: Cluster, namespace: str, level: int) -> bool:
    """Whether the status has the level, with the states that its modes must have; pods say that sampling is in line."""
    status = (cluster.get(namespace, "ipol", "assistant") or {})["status"]
    states = {mode["name"]: mode["state"] for mode in status["modes"]}
    return status["effectiveLevel"] == level and {
        name: states[name] for name in ("Quantized", "Speculative", "SamplerPipeline")
    } == {
        "Quantized": "Active" if level >= 1 else "BelowLevel",
        "Speculative": "Active" if level >= 2 else "BelowLevel",
        "SamplerPipeline": "Unsupported" if level >= 3 else "BelowLevel",
    }
