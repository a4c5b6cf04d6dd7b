"""What clients see through the cluster's gateway: the official OpenAI client, classification, refusals, metrics."""

from __future__ import annotations

import httpx
import openai
import pytest
from stack import JOURNEY_KEY, Cluster, pod_metrics


@pytest.fixture
def client(gateway: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway}/v1", api_key=JOURNEY_KEY, max_retries=0)


def test_chat_and_stream_give_the_same_answer(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "What news from the court?"}]
    # Plain decoding: quantised weights compute in bf16, where a verification of several tokens rounds otherwise than a
    # step of one, and how many are drafted depends on how far it paid just then.
    options = {"model": "assistant", "messages": question, "max_tokens": 40, "temperature": 0}
    options["extra_body"] = {"speculative": False}
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.content
    assert whole.usage.completion_tokens <= 40
    pieces, usage = [], None
    for event in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        pieces += [choice.delta.content or "" for choice in event.choices]
        usage = event.usage or usage
    assert "".join(pieces) == whole.choices[0].message.content
    assert usage == whole.usage


def test_both_names_of_the_model_are_listed(client: openai.OpenAI) -> None:
    assert {"assistant", "chat", "film-sentiment"} <= {model.id for model in client.models.list()}


def test_classification_goes_to_the_classifier(cluster: Cluster, namespace: str, gateway: str) -> None:
    texts = ["A moving and beautifully acted film.", "Two hours that I will never get back, awful."]
    answer = httpx.post(
        f"{gateway}/v1/classify",
        json={"model": "assistant", "input": texts},
        headers={"Authorization": f"Bearer {JOURNEY_KEY}"},
    )
    assert answer.status_code == 200
    labels = [result["label"] for result in answer.json()["data"]]
    assert labels == ["positive", "negative"]
    metrics = {name: pod_metrics(cluster, namespace, name) for name in ("engine", "classifier")}
    assert 'variant="film-sentiment"' in metrics["classifier"]
    assert 'variant="film-sentiment"' not in metrics["engine"]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"messages": []}, openai.BadRequestError),
        ({"max_tokens": 0}, openai.BadRequestError),
        ({"max_tokens": -1}, openai.BadRequestError),
        ({"max_tokens": 10**9}, openai.BadRequestError),
        ({"messages": [{"role": "user", "content": "word " * 20_000}]}, openai.BadRequestError),
        ({"model": "nobody"}, openai.NotFoundError),
    ],
    ids=lambda value: str(value)[:40],
)
def test_mistakes_are_refused_and_the_next_request_works(
    client: openai.OpenAI, change: dict[str, object], error: type[openai.APIStatusError]
) -> None:
    good = {"model": "assistant", "messages": [{"role": "user", "content": "Who is there?"}], "max_tokens": 4}
    with pytest.raises(error) as refused:
        client.chat.completions.create(**{**good, **change})
    assert refused.value.body["message"]  # type: ignore[index]
    assert client.chat.completions.create(**good).choices


def test_a_wrong_key_is_refused(gateway: str) -> None:
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{gateway}/v1", api_key="wrong", max_retries=0).models.list()
