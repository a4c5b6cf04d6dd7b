"""What is wrong gets a 4xx in OpenAI's shape that says so, never a 500, and the next request works."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
CLASSIFY = "/v1/classify"
HELLO = [{"role": "user", "content": "hello"}]


def chat(**changes: Any) -> dict[str, Any]:
    return {"model": "assistant", "messages": HELLO, "max_tokens": 2, **changes}


def completion(**changes: Any) -> dict[str, Any]:
    return {"model": "chat", "prompt": "hello", "max_tokens": 2, **changes}


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text[:300]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert response.headers["x-sixfold-level"] == "3"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


CASES = [
    (CHAT, chat(messages=[]), 400, "messages"),
    (CHAT, chat(messages=None), 400, "messages"),
    (CHAT, chat(messages="hello"), 400, "messages"),
    (CHAT, chat(messages=[{"role": "user"}]), 400, "messages.0.content"),
    (CHAT, chat(messages=[{"role": "wizard", "content": "x"}]), 400, "messages.0.role"),
    (CHAT, chat(messages=[{"role": "tool", "content": "x"}]), 400, "messages.0.role"),
    (CHAT, chat(messages=[{"role": "user", "content": 5}]), 400, "messages.0.content"),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, "messages.0.content"),
    (CHAT, chat(messages=[{"role": "user", "content": "refuse"}]), 400, "messages"),
    (CHAT, chat(messages=[{"role": "assistant", "content": None, "tool_calls": [{}]}]), 400, "messages.0.tool_calls"),
    (CHAT, chat(max_tokens=0), 400, "max_tokens"),
    (CHAT, chat(max_tokens=-1), 400, "max_tokens"),
    (CHAT, chat(max_tokens=10**9), 400, "max_tokens"),
    (CHAT, chat(max_tokens=10**30), 400, "max_tokens"),
    (CHAT, chat(max_tokens="5"), 400, "max_tokens"),
    (CHAT, chat(max_tokens=1.5), 400, "max_tokens"),
    (CHAT, chat(max_tokens=True), 400, "max_tokens"),
    (CHAT, chat(max_completion_tokens=3), 400, "max_tokens"),
    (CHAT, chat(temperature=-1), 400, "temperature"),
    (CHAT, chat(temperature=2.5), 400, "temperature"),
    (CHAT, chat(top_p=0), 400, "top_p"),
    (CHAT, chat(top_p=1.1), 400, "top_p"),
    (CHAT, chat(seed=2**70), 400, "seed"),
    (CHAT, chat(stop=["a", "b", "c", "d", "e"]), 400, "stop"),
    (CHAT, chat(stop=""), 400, "stop"),
    (CHAT, chat(stop=5), 400, "stop"),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options"),
    (CHAT, chat(n=2), 400, "n"),
    (CHAT, chat(tools=[{"type": "function"}]), 400, "tools"),
    (CHAT, chat(tool_choice="required"), 400, "tool_choice"),
    (CHAT, chat(response_format={"type": "json_object"}), 400, "response_format"),
    (CHAT, chat(logprobs=5), 400, "logprobs"),
    (CHAT, chat(top_logprobs=5), 400, "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    (CHAT, chat(presence_penalty=2.5), 400, "presence_penalty"),
    (CHAT, chat(frequency_penalty=-3), 400, "frequency_penalty"),
    (CHAT, chat(repetition_penalty=0), 400, "repetition_penalty"),
    (CHAT, chat(top_k=-2), 400, "top_k"),
    (CHAT, chat(speculative="no"), 400, "speculative"),
    (CHAT, chat(logit_bias={"1": 5}), 400, "logit_bias"),
    (CHAT, chat(best_of=3), 400, "best_of"),
    (CHAT, chat(surprise=1), 400, "surprise"),
    (CHAT, chat(model=None), 400, "model"),
    (CHAT, chat(model=""), 400, "model"),
    (CHAT, chat(model="nobody"), 404, "model"),
    (CHAT, chat(model="sentiment"), 404, "model"),
    (CHAT, chat(messages=[{"role": "user", "content": "word " * 5000}]), 400, "messages"),
    (CHAT, chat(messages=[{"role": "user", "content": "x" * 3_000_000}]), 400, "messages"),
    (COMPLETIONS, completion(prompt=""), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[""]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=None), 400, "prompt"),
    (COMPLETIONS, completion(prompt={"a": 1}), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[-1]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[10**9]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[1, "a"]), 400, "prompt.0"),
    (COMPLETIONS, completion(prompt=["a"] * 17), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[5] * 4096), 400, "messages"),
    (COMPLETIONS, completion(prompt=[5] * 4090, max_tokens=7), 400, "max_tokens"),
    (COMPLETIONS, completion(echo=True), 400, "echo"),
    (COMPLETIONS, completion(logprobs=True), 400, "logprobs"),
    (COMPLETIONS, completion(logprobs=6), 400, "logprobs"),
    (CLASSIFY, {}, 400, "input"),
    (CLASSIFY, {"input": ""}, 400, "input"),
    (CLASSIFY, {"input": []}, 400, "input"),
    (CLASSIFY, {"input": ["a", 5]}, 400, "input"),
    (CLASSIFY, {"input": ["a"] * 257}, 400, "input"),
    (CLASSIFY, {"input": "a", "top_k": 0}, 400, "top_k"),
    (CLASSIFY, {"input": "a", "model": "chat"}, 404, "model"),
    (CLASSIFY, {"input": ["fine", "word " * 500]}, 400, "input.1"),
    (CLASSIFY, {"input": "a", "labels": ["x"]}, 400, "labels"),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), CASES, ids=lambda value: json.dumps(value)[:60])
def test_wrong_fields(gateway: Any, path: str, body: dict[str, Any], status: int, param: str) -> None:
    error = refused(gateway.client.post(path, json=body), status)
    assert error["param"] == param
    if body.get("stream") is None and path != CLASSIFY:
        streamed = refused(gateway.client.post(path, json={**body, "stream": True}), status) if status == 404 else None
        assert streamed is None or streamed["code"] == error["code"]


@pytest.mark.parametrize("stream", [False, True])
def test_over_long_prompts_say_so_in_openais_words(gateway: Any, stream: bool) -> None:
    body = chat(messages=[{"role": "user", "content": "word " * 5000}], stream=stream)
    error = refused(gateway.client.post(CHAT, json=body), 400)
    assert error["code"] == "context_length_exceeded"
    assert "4096" in error["message"]
    error = refused(gateway.client.post(CHAT, json=chat(max_tokens=10**9, stream=stream)), 400)
    assert error["code"] == "context_length_exceeded"
    assert "at most 40" in error["message"]


BODIES = {
    "empty": b"",
    "not JSON": b"hello",
    "a number": b"5",
    "null": b"null",
    "a list": b"[]",
    "cut off": b'{"model": "assistant", "messages": [',
    "not UTF-8": b'{"model": "\xff\xfe"}',
    "NaN": b'{"model": "assistant", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    "infinity": b'{"model": "assistant", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    "a lone surrogate": b'{"model": "assistant", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "very deep": b"[" * 100_000,
    "a long number": b'{"model": "assistant", "max_tokens": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, CLASSIFY])
def test_bodies_that_are_no_request(gateway: Any, path: str, body: bytes) -> None:
    refused(gateway.client.post(path, content=body), 400)


def test_bodies_that_are_too_large(gateway: Any) -> None:
    refused(gateway.client.post(CHAT, content=b" " * (4 * 2**20 + 1)), 413)

    def endless() -> Any:
        for _ in range(80):
            yield b" " * 65536

    refused(gateway.client.post(CHAT, content=endless()), 413)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/chat", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/%F0%9F%A6%84", 404),
    ],
)
def test_wrong_paths_and_methods(gateway: Any, method: str, path: str, status: int) -> None:
    refused(gateway.client.request(method, path), status)


@pytest.mark.parametrize("sent", ["", "x" * 5000, "abc def\tghi", "../../etc", "ok-1.2_3:4"])
def test_request_ids_are_bounded_and_harmless(gateway: Any, sent: str) -> None:
    returned = gateway.client.get("/v1/models", headers={"X-Request-ID": sent}).headers["x-request-id"]
    assert 0 < len(returned) <= 128
    assert set(returned) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:-")
    if sent == "ok-1.2_3:4":
        assert returned == sent


def test_after_all_that_it_still_answers(gateway: Any) -> None:
    assert gateway.client.post(CHAT, json=chat()).status_code == 200
    assert gateway.client.post(CLASSIFY, json={"input": "fine"}).status_code == 200
