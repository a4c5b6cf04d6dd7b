"""The official OpenAI client against a gateway: chat, completions, streams, usage, models."""

from __future__ import annotations

from typing import Any

import openai
import pytest

CHAT = {"model": "assistant", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12}


@pytest.fixture(scope="module")
def client(gateway: Any) -> openai.OpenAI:
    return gateway.openai()


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**CHAT, temperature=0)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert answer.model == "chat"
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.message.content
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_stream_gives_the_same_text_and_usage_only_when_asked(client: openai.OpenAI) -> None:
    options = {**CHAT, "temperature": 0.8, "seed": 5}
    whole = client.chat.completions.create(**options)
    events = list(client.chat.completions.create(**options, stream=True))
    assert "".join(event.choices[0].delta.content or "" for event in events) == whole.choices[0].message.content
    assert events[0].choices[0].delta.role == "assistant"
    assert events[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(event.usage is None for event in events)
    assert len({event.id for event in events}) == 1

    events = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert events[-1].choices == []
    assert events[-1].usage == whole.usage
    assert all(event.usage is None for event in events[:-1])


def test_a_stream_ends_with_done(gateway: Any) -> None:
    body = gateway.client.post("/v1/chat/completions", json={**CHAT, "stream": True}).text
    assert body.startswith("data: {")
    assert body.endswith("data: [DONE]\n\n")


def test_the_prompt_is_tokenised_as_the_template_says(gateway: Any, models: Any) -> None:
    """The template writes <s> itself, so the tokenizer adds none; a completion gets it from the tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(models / "chat" / "tokenizer.json"))
    rendered = "<s>user: hello\n\nassistant: "
    client = gateway.openai()
    usage = client.chat.completions.create(**CHAT).usage
    assert usage.prompt_tokens == len(tokenizer.encode(rendered, add_special_tokens=False).ids)
    usage = client.completions.create(model="chat", prompt="hello").usage
    assert usage.prompt_tokens == len(tokenizer.encode("hello").ids)
    assert usage.completion_tokens == 16  # OpenAI's default


def test_completions_of_several_prompts(client: openai.OpenAI) -> None:
    options = {"model": "chat", "max_tokens": 5, "temperature": 0}
    alone = [client.completions.create(prompt=prompt, **options).choices[0].text for prompt in ("one", "two")]
    together = client.completions.create(prompt=["one", "two"], **options)
    assert [choice.index for choice in together.choices] == [0, 1]
    assert [choice.text for choice in together.choices] == alone
    texts = ["", ""]
    for event in client.completions.create(prompt=["one", "two"], stream=True, **options):
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert texts == alone


def test_token_ids_as_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="chat", prompt=[0, 65, 66], max_tokens=3)
    assert answer.usage.prompt_tokens == 3
    assert len(client.completions.create(model="chat", prompt=[[0, 65], [0, 66]], max_tokens=3).choices) == 2


def test_stop_strings_never_reach_the_client(client: openai.OpenAI) -> None:
    options = {"model": "chat", "prompt": "hello", "max_tokens": 60, "temperature": 0}
    text = client.completions.create(**options).choices[0].text
    stop = text[20:22]
    cut = client.completions.create(**options, stop=[stop, "never seen"])
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    pieces = [event.choices[0].text for event in client.completions.create(**options, stop=stop, stream=True)]
    assert "".join(pieces) == cut.choices[0].text


def test_text_of_all_scripts_passes(client: openai.OpenAI) -> None:
    for text in ("你好。世界 🎉", "e\u0301", "\x00\x07", "\ufeff", "a" * 2000, "<s></s>", "{{ 7 * 7 }}"):
        messages = [{"role": "user", "content": text}]
        options = {"model": "assistant", "messages": messages, "max_tokens": 8, "temperature": 0}
        whole = client.chat.completions.create(**options).choices[0].message.content
        stream = client.chat.completions.create(**options, stream=True)
        assert "".join(event.choices[0].delta.content or "" for event in stream) == whole


def test_content_parts_and_the_developer_role(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    asked = {"model": "assistant", "max_tokens": 4, "temperature": 0}
    split = client.chat.completions.create(messages=[{"role": "user", "content": parts}], **asked)
    plain = client.chat.completions.create(messages=[{"role": "user", "content": "hello"}], **asked)
    assert split.choices == plain.choices
    developer = client.chat.completions.create(messages=[{"role": "developer", "content": "be brief"}], **asked)
    system = client.chat.completions.create(messages=[{"role": "system", "content": "be brief"}], **asked)
    assert developer.choices == system.choices


def test_max_completion_tokens_is_the_same_limit(client: openai.OpenAI) -> None:
    messages = CHAT["messages"]
    answer = client.chat.completions.create(model="assistant", messages=messages, max_completion_tokens=3)
    assert answer.usage.completion_tokens == 3


def test_harmless_fields_are_accepted(client: openai.OpenAI) -> None:
    client.chat.completions.create(
        **CHAT,
        n=1,
        presence_penalty=0.0,
        frequency_penalty=0,
        logprobs=False,
        response_format={"type": "text"},
        user="someone",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
    )


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["assistant", "chat", "sentiment"]
    assert client.models.retrieve("chat").owned_by == "sixfold"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


def test_classify(gateway: Any) -> None:
    answer = gateway.client.post("/v1/classify", json={"input": ["hello", "the other user"]}).json()
    assert answer["model"] == "sentiment"
    assert [result["index"] for result in answer["data"]] == [0, 1]
    for result in answer["data"]:
        scores = [score["score"] for score in result["scores"]]
        assert scores == sorted(scores, reverse=True)
        assert sum(scores) == pytest.approx(1)
        assert (result["label"], result["score"]) == (result["scores"][0]["label"], scores[0])
    one = gateway.client.post("/v1/classify", json={"model": "sentiment", "input": "hello", "top_k": 1}).json()
    (best,) = one["data"][0]["scores"]
    assert best["label"] == answer["data"][0]["label"]
    assert best["score"] == pytest.approx(answer["data"][0]["score"])  # a batch of one pads nothing
    assert one["usage"]["prompt_tokens"] > 0


async def test_the_async_client_too(gateway: Any) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(**CHAT, stream=True)
        events = [event async for event in stream]
    assert events[-1].choices[0].finish_reason == "length"
