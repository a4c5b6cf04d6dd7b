"""Level 3 in the gateway and the cache: conversations that aren't computed twice, batches by length, small streams."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Iterator, Sequence

import httpx
import openai
import pytest
from levels import LevelMeter
from stack import (
    JOURNEY_KEY,
    SYSTEM_NAMESPACE,
    Cluster,
    pod_metrics,
    pods,
    wait_ready,
    wait_until,
)
from traffic import Traffic, percentile

from sixfold_runtime.stream_client import SseZstdTransport

REDIS = "sixfold-redis"
BLOCKS = re.compile(r'^sixfold_kv_blocks_total\{.*result="(\w+)".*\} ([0-9.e+]+)$', re.MULTILINE)
READ_BYTES = re.compile(r'^sixfold_kv_bytes_total\{.*direction="read".*\} ([0-9.e+]+)$', re.MULTILINE)
HEADERS = {"Authorization": f"Bearer {JOURNEY_KEY}"}
QUESTIONS = (
    "Good morrow, my lord. " + "I come with letters from the king, and with much news of the war. " * 12,
    "And who shall carry the answer to the court?",
    "What of the queen, and of her daughter?",
    "Then farewell, and may fortune keep thee.",
)


@pytest.fixture
def client(gateway: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway}/v1", api_key=JOURNEY_KEY, max_retries=0)


@pytest.fixture(autouse=True)
async def level_3(cluster: Cluster, namespace: str) -> None:
    await asyncio.to_thread(LevelMeter(cluster, namespace, "assistant").move, 3)


@pytest.fixture
def no_cache(client: openai.OpenAI) -> Iterator[None]:
    """Nothing is kept for the journeys' key, before and after."""
    erase(client)
    yield
    erase(client)


def erase(client: openai.OpenAI) -> int:
    answer = httpx.delete(str(client.base_url).removesuffix("/") + "/kv-cache", headers=HEADERS, timeout=30)
    return int(answer.raise_for_status().json()["blocks"])


def converse(client: openai.OpenAI, questions: Sequence[str], conversation: str) -> list[tuple[int, int]]:
    """Prompt and cached tokens of each turn."""
    messages: list[dict[str, str]] = []
    turns = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        answer = client.chat.completions.create(
            model="assistant",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=48,
            temperature=0,
            extra_headers={"X-Conversation-Id": conversation},
        )
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        turns.append((answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens or 0))
        time.sleep(0.3)  # what was answered is kept in the background
    return turns


def blocks(cluster: Cluster, namespace: str) -> dict[str, float]:
    counts: dict[str, float] = {}
    for result, count in BLOCKS.findall(pod_metrics(cluster, namespace, "engine")):
        counts[result] = counts.get(result, 0) + float(count)
    return counts


def mode(cluster: Cluster, namespace: str, name: str) -> dict[str, str]:
    status = (cluster.get(namespace, "ipol", "assistant") or {})["status"]
    return next(entry for entry in status["modes"] if entry["name"] == name)


def test_the_modes_are_on(cluster: Cluster, namespace: str) -> None:
    for name in ("KVCacheReuse", "DynamicBatching", "CompressedStreaming"):
        wait_until(f"{name} is Active", lambda name=name: mode(cluster, namespace, name)["state"] == "Active", 30)


def test_four_turns_compute_only_what_is_new(
    cluster: Cluster, namespace: str, client: openai.OpenAI, no_cache: None, capsys: pytest.CaptureFixture[str]
) -> None:
    before = blocks(cluster, namespace)
    turns = converse(client, QUESTIONS, "journey-1")
    after = blocks(cluster, namespace)
    hits = {name: after.get(name, 0) - before.get(name, 0) for name in ("hit_memory", "hit_redis", "miss")}
    with capsys.disabled():
        print(f"\nprompt and cached tokens by turn: {turns}; blocks: {hits}")
    assert turns[0][1] == 0
    for (earlier, _), (prompt, cached) in itertools.pairwise(turns):
        assert earlier - 32 < cached < prompt
    assert hits["hit_memory"] + hits["hit_redis"] > 0


def test_a_new_pod_goes_on_where_the_old_one_was(
    cluster: Cluster, namespace: str, client: openai.OpenAI, no_cache: None
) -> None:
    """The engine's pod is replaced between two turns; what it had computed comes from Redis."""
    converse(client, QUESTIONS[:2], "journey-2")
    cluster.kubectl("rollout", "restart", "-n", namespace, "deployment/assistant-engine")
    cluster.kubectl("rollout", "status", "-n", namespace, "deployment/assistant-engine", "--timeout=180s")
    wait_until("one engine pod", lambda: len(pods(cluster, namespace, "engine")) == 1)
    wait_ready(cluster, namespace, "assistant")
    ((prompt, cached),) = converse(client, QUESTIONS[:1], "journey-2")
    assert prompt - 64 < cached < prompt
    # The request finds them in Redis, or in memory, if the word that it is on its way had brought them there.
    assert any(float(count) > 0 for count in READ_BYTES.findall(pod_metrics(cluster, namespace, "engine")))


def test_what_is_kept_can_be_erased(client: openai.OpenAI, no_cache: None) -> None:
    converse(client, QUESTIONS[:1], "journey-3")
    assert erase(client) > 0
    assert erase(client) == 0
    assert converse(client, QUESTIONS[:1], "journey-3")[0][1] == 0


async def test_redis_goes_and_comes_back_under_load(
    cluster: Cluster, namespace: str, gateway: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without it nothing fails and the status says so; with it again blocks are shared as before."""
    async with Traffic(gateway, JOURNEY_KEY, "assistant", clients=4) as traffic:
        await asyncio.sleep(2)
        await asyncio.to_thread(scale_redis, cluster, 0)
        down = await asyncio.to_thread(
            wait_until, "the status says that Redis is gone", lambda: redis_problem(cluster, namespace), 60
        )
        gone = len(traffic.outcomes)
        await asyncio.to_thread(scale_redis, cluster, 1)
        await asyncio.to_thread(
            wait_until, "KVCacheReuse is Active", lambda: mode(cluster, namespace, "KVCacheReuse")["state"] == "Active"
        )
    seconds = [outcome.seconds for outcome in traffic.outcomes]
    with capsys.disabled():
        print(f"\n{len(seconds)} streamed chats, {gone} of them before Redis came back; {down}")
        print(f"P50 {percentile(seconds, 0.5):.2f} s, longest {max(seconds):.2f} s")
    assert not traffic.failed


def redis_problem(cluster: Cluster, namespace: str) -> str:
    now = mode(cluster, namespace, "KVCacheReuse")
    return now["reason"] if now["state"] == "Unsupported" else ""


def scale_redis(cluster: Cluster, replicas: int) -> None:
    cluster.kubectl("scale", "-n", SYSTEM_NAMESPACE, f"deployment/{REDIS}", f"--replicas={replicas}")
    if replicas:
        cluster.kubectl("rollout", "status", "-n", SYSTEM_NAMESPACE, f"deployment/{REDIS}", "--timeout=60s")


@pytest.mark.parametrize("accepted", ["zstd", "gzip", "identity"])
def test_streams_are_compressed_as_the_client_likes(gateway: str, accepted: str) -> None:
    headers = HEADERS | {"Accept-Encoding": accepted}
    with httpx.stream("POST", f"{gateway}/v1/chat/completions", json=chat(), headers=headers, timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line]
        assert answer.headers.get("content-encoding", "identity") == accepted
    assert lines[-1] == "data: [DONE]"


def test_streams_get_through_proxies_that_strip_encodings(gateway: str) -> None:
    with openai.OpenAI(
        base_url=f"{gateway}/v1",
        api_key=JOURNEY_KEY,
        http_client=httpx.Client(transport=SseZstdTransport(httpx.HTTPTransport())),
    ) as client:
        pieces = list(client.chat.completions.create(**chat()))
    assert "".join(choice.delta.content or "" for event in pieces for choice in event.choices)


def chat() -> dict[str, object]:
    return {
        "model": "assistant",
        "messages": [{"role": "user", "content": "What news from the court?"}],
        "max_tokens": 48,
        "stream": True,
    }


def test_priority_is_for_those_who_may(gateway: str) -> None:
    body = {"model": "assistant", "input": "A fine film."}
    answers = [
        httpx.post(f"{gateway}/v1/classify", json=body, headers=HEADERS | {"X-Priority": value}, timeout=60)
        for value in ("low", "high", "urgent")
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 400]
    assert "low, normal, high" in answers[2].json()["error"]["message"]


async def test_many_texts_travel_in_batches(cluster: Cluster, namespace: str, gateway: str) -> None:
    texts = ["A fine film.", "Dull. " * 40, "It has its moments, though not many of them. " * 8] * 20
    async with httpx.AsyncClient(base_url=gateway, headers=HEADERS, timeout=60) as http:
        answers = await asyncio.gather(
            *(http.post("/v1/classify", json={"model": "assistant", "input": text}) for text in texts)
        )
    assert {answer.status_code for answer in answers} == {200}
    batched = sum(
        float(line.rsplit(" ", 1)[1])
        for pod in pods(cluster, namespace, "gateway")
        for line in cluster.kubectl(
            "get", "--raw", f"/api/v1/namespaces/{namespace}/pods/{pod}:8000/proxy/metrics"
        ).splitlines()
        if line.startswith("sixfold_gateway_batch_requests_sum{")
    )
    assert batched >= len(texts)


def test_the_demo_page_is_there(gateway: str) -> None:
    page = httpx.get(gateway + "/")
    assert page.status_code == 200
    assert "text/html" in page.headers["content-type"]
    module = httpx.get(gateway + "/demo/stream-client/zstd.wasm")
    assert module.content.startswith(b"\0asm")
