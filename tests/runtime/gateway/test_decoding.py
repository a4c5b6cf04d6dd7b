"""What changes how tokens are drawn and what is told of them, through the official OpenAI client."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from sixfold_api.runtime_config import Draft, ServedModel, WeightSet
from sixfold_api.scalars import FullWeights, Task

COMPLETION = {"model": "chat", "prompt": "hello", "max_tokens": 24, "temperature": 0}
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 16, "temperature": 0}


@pytest.fixture(scope="module")
def client(gateway: Any) -> openai.OpenAI:
    return gateway.openai()


def test_chat_logprobs(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3).choices[0]
    content = choice.logprobs.content
    assert len(content) == 16
    assert b"".join(bytes(token.bytes) for token in content).decode(errors="replace") == choice.message.content
    for token in content:
        assert token.logprob <= 0
        assert [other.logprob for other in token.top_logprobs] == sorted(
            (other.logprob for other in token.top_logprobs), reverse=True
        )
        assert (token.bytes, token.logprob) == (token.top_logprobs[0].bytes, token.top_logprobs[0].logprob)
        assert sum(math.exp(other.logprob) for other in token.top_logprobs) <= 1.0001
    alone = client.chat.completions.create(**CHAT, logprobs=True).choices[0]
    assert [token.logprob for token in alone.logprobs.content] == pytest.approx([token.logprob for token in content])
    assert all(token.top_logprobs == [] for token in alone.logprobs.content)
    assert client.chat.completions.create(**CHAT).choices[0].logprobs is None


def test_streamed_logprobs_are_those_of_the_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    events = list(client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2, stream=True))
    streamed = [token for event in events if event.choices[0].logprobs for token in event.choices[0].logprobs.content]
    assert [token.bytes for token in streamed] == [token.bytes for token in whole]
    assert [token.logprob for token in streamed] == pytest.approx([token.logprob for token in whole])


def test_completion_logprobs(client: openai.OpenAI) -> None:
    choice = client.completions.create(**COMPLETION, logprobs=2).choices[0]
    logprobs = choice.logprobs
    sizes = {len(entries) for entries in (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs)}
    assert sizes == {24}
    for token, offset, logprob, top in zip(
        logprobs.tokens, logprobs.text_offset, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert token.startswith("bytes:") or choice.text[offset:].startswith(token)
        assert top[token] == logprob
        assert len(top) == 2
    only_drawn = client.completions.create(**COMPLETION, logprobs=0).choices[0].logprobs
    assert all(set(top) == {token} for token, top in zip(only_drawn.tokens, only_drawn.top_logprobs, strict=True))
    parts = [event.choices[0].logprobs for event in client.completions.create(**COMPLETION, logprobs=2, stream=True)]
    assert [offset for part in parts if part for offset in part.text_offset] == logprobs.text_offset
    two = client.completions.create(**{**COMPLETION, "prompt": ["hello", "hello"]}, logprobs=2)
    assert two.choices[0].logprobs.text_offset == two.choices[1].logprobs.text_offset == logprobs.text_offset


def tokens_of(client: openai.OpenAI, **options: Any) -> list[str]:
    choice = client.completions.create(**{**COMPLETION, "logprobs": 0, "max_tokens": 64, **options}).choices[0]
    return choice.logprobs.tokens


def test_penalties_keep_tokens_from_coming_again(client: openai.OpenAI) -> None:
    plain = tokens_of(client)
    assert len(set(plain)) < len(plain), "plain greedy repeats itself"
    harmless = {"frequency_penalty": 0, "presence_penalty": 0, "extra_body": {"repetition_penalty": 1.0, "top_k": 0}}
    assert tokens_of(client, **harmless) == plain
    for options in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"extra_body": {"repetition_penalty": 3.0}}):
        penalised = tokens_of(client, **options)
        assert penalised != plain
        assert len(set(penalised)) > len(set(plain)), options


def test_top_k_of_one_is_greedy(client: openai.OpenAI) -> None:
    assert tokens_of(client, temperature=1.5, extra_body={"top_k": 1}) == tokens_of(client)


@pytest.fixture
def speculating(new_engine: Callable[..., Any], new_gateway: Any, models: Path, until: Callable[..., Any]) -> Any:
    """A gateway and its engine, whose draft is the model itself: it drafts what the target would say."""
    folder = str(models / "chat")
    draft = Draft(name="chat-draft", path=folder)
    engine = new_engine(ServedModel(name="chat", task=Task.GENERATION, path=folder, draft=draft))
    engine.apply(level=2, modes=["Speculative"], speculative={"numTokens": 3, "length": "Fixed"})
    return new_gateway(engine.port), engine


def test_drafted_tokens_are_in_the_usage(speculating: Any, client: openai.OpenAI) -> None:
    gateway, engine = speculating
    answer = gateway.openai().completions.create(**COMPLETION)
    assert answer.choices[0].text == client.completions.create(**COMPLETION).choices[0].text
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 12
    assert engine.metric("sixfold_accepted_tokens_total", variant="chat", position="1") > 0
    assert engine.metric("sixfold_generated_tokens_total", variant="chat", cause="draft") > 0
    assert engine.client.get("/state").json()["unsupported"] == {}

    events = list(
        gateway.openai().completions.create(**COMPLETION, stream=True, stream_options={"include_usage": True})
    )
    assert events[-1].usage.completion_tokens_details.accepted_prediction_tokens > 0


def test_a_request_can_opt_out_of_speculation(speculating: Any) -> None:
    gateway, _ = speculating
    usage = gateway.openai().completions.create(**COMPLETION, extra_body={"speculative": False}).usage
    assert usage.completion_tokens == 24
    assert usage.completion_tokens_details.accepted_prediction_tokens == 0
    assert usage.completion_tokens_details.rejected_prediction_tokens == 0


def test_speculation_without_a_draft_stands_in_the_state(engine: Any, restored: None) -> None:
    engine.apply(level=2, modes=["Speculative"], speculative={"numTokens": 3})
    assert "without a draft" in engine.client.get("/state").json()["unsupported"]["Speculative"]


@pytest.fixture
def restored(engine: Any) -> Iterator[None]:
    yield
    engine.apply()


def test_weights_change_under_load_without_an_error(
    new_engine: Callable[..., Any], new_gateway: Any, models: Path, until: Callable[..., Any]
) -> None:
    """Swap, up and down, while a client asks: every request is answered, and the state tells what happened."""
    folder = str(models / "chat")
    quantized = WeightSet(name="chat-int4", path=folder)
    served = ServedModel(
        name="chat", task=Task.GENERATION, path=folder, quantized=quantized, full_weights=FullWeights.SWAP
    )
    engine = new_engine(served)
    engine.apply(level=0)
    client = new_gateway(engine.port).openai()

    def state() -> dict[str, Any]:
        return engine.client.get("/state").json()["models"][0]

    assert (state()["weights"], state()["fullWeights"]) == ("chat", "Swap")
    for level, modes, weights in ((1, ["Quantized"], "chat-int4"), (0, [], "chat")):
        engine.apply(level=level, modes=modes)

        def swapped(weights: str = weights) -> bool:
            assert client.completions.create(**COMPLETION).usage.completion_tokens == 24
            return bool(state()["weights"] == weights)

        until(swapped, f"the weights {weights}")
    assert state()["swapSeconds"] > 0
    assert engine.metric("sixfold_weight_swaps_total", variant="chat", result="ok") == 2
    assert engine.metric("sixfold_memory_bytes", variant="chat-int4", kind="weights") == 0
