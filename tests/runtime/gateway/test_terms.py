"""Priorities, time limits, conversations and sizes of requests, over HTTP."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

LONG = {"model": "chat", "prompt": "hello", "temperature": 0, "max_tokens": 4000}
SHORT = {**LONG, "max_tokens": 2}
PATH = "/v1/completions"
CLASSIFY = "/v1/classify"


def cancelled(engine: Any) -> float:
    return float(engine.metric("sixfold_engine_requests_total", outcome="cancelled"))


@pytest.fixture
def keyed(engine: Any, new_gateway: Any, tmp_path: Path) -> Any:
    """A gateway with the tenants `urgent` (High), `batch` (Low) and `usual`; a tenant's key is its name."""
    folder = tmp_path / "keys"
    folder.mkdir()
    for tenant in ("urgent", "batch", "usual"):
        (folder / tenant).write_text(tenant)
    gateway = new_gateway(engine.port, keys=folder)
    gateway.apply(
        tenants=[
            {"name": "urgent", "priority": "Normal", "maxPriority": "High"},
            {"name": "batch", "priority": "Low", "maxPriority": "Low"},
        ]
    )
    return gateway


def test_a_key_asks_for_what_it_may(keyed: Any, caplog: pytest.LogCaptureFixture, until: Callable[..., Any]) -> None:
    caplog.set_level(logging.INFO, "sixfold.requests")

    def ask(tenant: str, priority: str | None, path: str = PATH) -> Any:
        headers = {"Authorization": f"Bearer {tenant}", "X-Conversation-Id": "my-secret-conversation"}
        body = SHORT if path == PATH else {"input": "hello"}
        return keyed.client.post(path, json=body, headers=headers | ({"X-Priority": priority} if priority else {}))

    for tenant, priority in (("urgent", "high"), ("urgent", "low"), ("batch", None), ("usual", "normal")):
        assert ask(tenant, priority).status_code == 200
    for tenant, priority in (("usual", "high"), ("batch", "normal")):
        for path in (PATH, CLASSIFY):
            answer = ask(tenant, priority, path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "priority_not_allowed")
    assert ask("usual", "urgent").status_code == 400
    with pytest.raises(openai.PermissionDeniedError):
        keyed.openai("usual").completions.create(**SHORT, extra_headers={"X-Priority": "high"})

    until(lambda: len(caplog.records) == 10, "a line for each")
    lines = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert [line["priority"] for line in lines[:4]] == ["High", "Low", "Low", "Normal"]
    assert lines[0]["cached_length"] == 0
    assert "secret-conversation" not in json.dumps(lines) + keyed.client.get("/metrics").text


def test_nobody_raises_the_priority_where_there_are_no_keys(gateway: Any) -> None:
    for priority, status in (("high", 403), ("normal", 200), ("low", 200), ("", 400)):
        assert gateway.client.post(PATH, json=SHORT, headers={"X-Priority": priority}).status_code == status


def test_a_call_that_takes_too_long_is_a_504_and_stops_the_work(
    engine: Any, new_gateway: Any, until: Callable[..., Any]
) -> None:
    gateway = new_gateway(engine.port)
    before = cancelled(engine)
    answer = gateway.client.post(PATH, json=LONG, headers={"X-Request-Timeout": "0.3"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    until(lambda: cancelled(engine) == before + 1, "the engine to cancel")
    assert gateway.metric("sixfold_requests_total", outcome="cancelled") == 1, "the client gave up, nothing failed"

    gateway.apply(requestLimits={"timeoutSeconds": 0.3})
    answer = gateway.client.post(PATH, json=LONG, headers={"X-Request-Timeout": "500"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    until(lambda: cancelled(engine) == before + 2, "the engine to cancel")
    assert gateway.metric("sixfold_requests_total", outcome="error") == 1


def test_a_stream_that_takes_too_long_ends_with_an_error(gateway: Any, engine: Any, until: Callable[..., Any]) -> None:
    before = cancelled(engine)
    pieces = []
    with pytest.raises(openai.APIError, match="longer than it may"):
        for event in gateway.openai().completions.create(
            **LONG, stream=True, extra_headers={"X-Request-Timeout": "0.5"}
        ):
            pieces.append(event.choices[0].text)
    assert pieces
    until(lambda: cancelled(engine) == before + 1, "the engine to cancel")
    body = gateway.client.post(PATH, json={**LONG, "stream": True}, headers={"X-Request-Timeout": "0.5"}).text
    last = json.loads(body.removesuffix("\n\n").rpartition("data: ")[2])
    assert last["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in body


def test_texts_of_one_request_share_its_time(gateway: Any) -> None:
    body = {"input": ["hello " * 60] * 256}
    answer = gateway.client.post(CLASSIFY, json=body, headers={"X-Request-Timeout": "0.01"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert gateway.client.post(CLASSIFY, json=body, headers={"X-Request-Timeout": "60"}).status_code == 200


@contextlib.contextmanager
def half_sent(gateway: Any, *headers: str) -> Iterator[socket.socket]:
    """A request of whose 100 bytes of body the first one came."""
    lines = [f"POST {PATH} HTTP/1.1", "Host: x", "Content-Length: 100", *headers]
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as connection:
        connection.sendall("\r\n".join([*lines, "", "{"]).encode())
        yield connection


def test_a_body_that_doesnt_come_is_waited_for_no_longer_than_the_request_may_take(gateway: Any) -> None:
    with half_sent(gateway, "X-Request-Timeout: 0.2") as connection:
        answer = b""
        while part := connection.recv(65536):  # up to the end of the connection
            answer += part
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"request_timeout"' in answer


def test_a_client_that_leaves_within_its_body_is_no_error(
    engine: Any, new_gateway: Any, caplog: pytest.LogCaptureFixture, until: Callable[..., Any]
) -> None:
    gateway = new_gateway(engine.port)
    with half_sent(gateway):
        pass
    until(lambda: gateway.metric("sixfold_requests_total", outcome="cancelled") == 1, "the request to be counted")
    assert gateway.metric("sixfold_requests_total") == 1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_the_largest_body_is_configured_and_changes_while_running(engine: Any, new_gateway: Any) -> None:
    gateway = new_gateway(engine.port)
    body = json.dumps({**SHORT, "user": "u" * 2000})
    assert gateway.client.post(PATH, content=body).status_code == 200
    gateway.apply(requestLimits={"maxBytes": 1024})
    answer = gateway.client.post(PATH, content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert "1024 bytes" in answer.json()["error"]["message"]
    assert gateway.client.post(PATH, content=iter([body.encode()])).status_code == 413
    assert gateway.client.post(PATH, json=SHORT).status_code == 200


def test_usage_counts_cached_tokens_always(gateway: Any) -> None:
    client = gateway.openai()
    usage = client.completions.create(**SHORT).usage
    assert usage.prompt_tokens_details.cached_tokens == 0
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *events, last = client.completions.create(**SHORT, **options, extra_body={"kv_cache_reuse": False})
    assert last.usage.prompt_tokens_details.cached_tokens == 0
    assert all(event.usage is None for event in events)
    answer = gateway.client.post(PATH, json={**SHORT, "kv_cache_reuse": "no"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "kv_cache_reuse")
