"""Bodies: whatever comes is a request or an ApiError with a 400."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold_runtime.engine.protocol import Sampling
from sixfold_runtime.gateway.addresses import parse_target
from sixfold_runtime.gateway.errors import ApiError
from sixfold_runtime.gateway.exchange import request_id
from sixfold_runtime.gateway.generation import allowed_tokens
from sixfold_runtime.gateway.openapi import schemas
from sixfold_runtime.gateway.schema import ChatBody, ClassifyBody, CompletionBody

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
FIELDS = [
    *("model", "messages", "prompt", "input", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed"),
    *("stop", "stream", "stream_options", "n", "tools", "logprobs", "response_format", "top_k", "user", "unknown"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "top_logprobs", "speculative"),
    *("task", "early_exit", "kv_cache_reuse"),
]
BODIES = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6)
MESSAGES = st.lists(st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls"]), JSON), max_size=3)


def refused_politely(error: ApiError) -> bool:
    return error.status == 400 and bool(error.message)


@given(BODIES, st.one_of(st.none(), MESSAGES))
def test_any_json_is_a_request_or_a_400(fields: dict[str, Any], messages: list[Any] | None) -> None:
    body = json.dumps({"model": "m", **fields} | ({"messages": messages} if messages is not None else {})).encode()
    try:
        chat = ChatBody.parse(body)
        rendered = [message.for_template(index) for index, message in enumerate(chat.messages)]
        assert rendered
        assert chat.sampling(5, ("x",)).max_tokens == 5
        assert chat.alternatives in (None, *range(21))
        assert chat.asked_tokens is None or chat.asked_tokens >= 1
    except ApiError as error:
        assert refused_politely(error)
    try:
        completion = CompletionBody.parse(body)
        assert all(completion.prompts())
        assert completion.alternatives in (None, *range(6))
    except ApiError as error:
        assert refused_politely(error)
    try:
        classify = ClassifyBody.parse(body)
        assert all(classify.inputs())
        assert classify.task != ""
    except ApiError as error:
        assert refused_politely(error)


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_politely(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        ChatBody.parse(body)
    assert refused_politely(refused.value)


def test_stop_strings_of_request_and_model_are_joined() -> None:
    body = CompletionBody.parse(b'{"model": "m", "prompt": "x", "stop": ["a", "\\n\\n"]}')
    assert body.sampling(1, ("\n\n", "b")).stop == ("a", "\n\n", "b")
    assert CompletionBody.parse(b'{"model": "m", "prompt": "x", "stop": null}').sampling(1).stop == ()


def completion(**fields: Any) -> CompletionBody:
    return CompletionBody.parse(json.dumps({"model": "m", "prompt": "x", **fields}).encode())


def chat(**fields: Any) -> ChatBody:
    return ChatBody.parse(json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}).encode())


def test_what_changes_the_draw_reaches_the_engine() -> None:
    fields = {"frequency_penalty": 0.5, "presence_penalty": -2, "repetition_penalty": 1.2, "top_k": 40}
    sampling = completion(**fields).sampling(1)
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert completion(**dict.fromkeys(fields)).sampling(1) == Sampling(max_tokens=1)
    assert completion(top_k=-1).sampling(1).top_k == 0, "vLLM's other word for all"


def test_log_probabilities_are_asked_for_in_each_endpoints_words() -> None:
    assert chat().sampling(1).logprobs is None
    assert chat(logprobs=False, top_logprobs=0).sampling(1).logprobs is None
    assert chat(logprobs=True).sampling(1).logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).sampling(1).logprobs == 20
    assert completion().sampling(1).logprobs is None
    assert completion(logprobs=0).sampling(1).logprobs == 0
    assert completion(logprobs=5).sampling(1).logprobs == 5


@pytest.mark.parametrize(
    ("parse", "fields", "param"),
    [
        (chat, {"top_logprobs": 3}, "top_logprobs"),
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (chat, {"logprobs": 2}, "logprobs"),
        (completion, {"logprobs": True}, "logprobs"),
        (completion, {"logprobs": 6}, "logprobs"),
        (completion, {"frequency_penalty": 2.1}, "frequency_penalty"),
        (completion, {"presence_penalty": -2.1}, "presence_penalty"),
        (completion, {"repetition_penalty": 0}, "repetition_penalty"),
        (completion, {"top_k": -2}, "top_k"),
        (completion, {"top_k": 1.5}, "top_k"),
        (chat, {"speculative": "no"}, "speculative"),
        (chat, {"kv_cache_reuse": 1}, "kv_cache_reuse"),
        (chat, {"task": ""}, "task"),
        (completion, {"task": 1}, "task"),
        (completion, {"task": "x" * 257}, "task"),
    ],
)
def test_settings_out_of_range(parse: Callable[..., Any], fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse(**fields)
    assert refused.value.status == 400
    assert refused.value.param == param


def test_the_document_has_every_setting() -> None:
    documented = schemas()
    for body, logprobs in (("ChatBody", "boolean"), ("CompletionBody", "integer")):
        properties = documented[body]["properties"]
        names = {"frequency_penalty", "presence_penalty", "repetition_penalty", "top_k", "logprobs", "speculative"}
        names |= {"kv_cache_reuse"}
        assert names <= properties.keys()
        assert all(properties[name]["description"] for name in names)
        assert logprobs in {option["type"] for option in properties["logprobs"]["anyOf"]}
        assert "X-Task" in properties["task"]["description"]
    answer = documented["ClassifyAnswer"]["properties"]["data"]["items"]
    assert documented[answer["$ref"].rpartition("/")[2]]["properties"]["exited"]["description"]


@given(st.integers(0, 200), st.integers(1, 150), st.none() | st.integers(1, 10**9), st.none() | st.just(16))
def test_prompt_and_answer_always_fit(prompt: int, context: int, asked: int | None, default: int | None) -> None:
    try:
        most = allowed_tokens(prompt, context, asked, default)
    except ApiError as error:
        assert error.status == 400
        assert prompt == 0 or prompt >= context or (asked is not None and prompt + asked > context)
    else:
        assert most >= 1
        assert prompt + most <= context
        assert asked is None or most == asked


@given(st.text(max_size=600))
def test_request_ids(header: str) -> None:
    made = request_id(header)
    assert 1 <= len(made) <= 128
    assert made.isascii()
    assert made.isprintable()


@pytest.mark.parametrize(
    ("target", "address"),
    [
        ("a-engine:8001", ("a-engine", 8001)),
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("[fd00::1]:8001", ("fd00::1", 8001)),
    ],
)
def test_targets(target: str, address: tuple[str, int]) -> None:
    assert parse_target(target) == address


@pytest.mark.parametrize("target", ["", "host", "host:", ":80", "host:x"])
def test_targets_that_are_none(target: str) -> None:
    with pytest.raises(ValueError, match="expected host:port"):
        parse_target(target)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "content of type 'image_url' is not supported"),
        ({"type": "text", "text": "x", "colour": "red"}, "unknown field: messages.0.content.colour"),
    ],
)
def test_content_that_is_no_text(part: dict[str, Any], words: str) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": [part]}]}).encode()
    with pytest.raises(ApiError, match=words):
        ChatBody.parse(body).messages[0].for_template(0)
