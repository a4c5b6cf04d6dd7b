"""API keys and rate limits, both changed while the gateway runs, and what logs and metrics say."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from sixfold_runtime.logs import JsonFormatter

CHAT = {"model": "assistant", "messages": [{"role": "user", "content": "a very private question"}], "max_tokens": 2}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / "alice").write_text("alice-key-1\n")
    (folder / "bob").write_text("bob-key-1")
    (folder / "nobody").write_text("\n")
    return folder


def works(gateway: Any, key: str) -> bool:
    try:
        gateway.openai(key).models.list()
    except openai.AuthenticationError:
        return False
    return True


def test_only_keys_of_the_secret_work(engine: Any, new_gateway: Any, keys: Path) -> None:
    gateway = new_gateway(engine.port, keys=keys)
    assert works(gateway, "alice-key-1")
    assert works(gateway, "bob-key-1")
    for wrong in ("alice-key-2", "alice", "alice-key-1x"):
        assert not works(gateway, wrong)
    for header in ("", "Bearer", "Basic alice-key-1", "alice-key-1", b"Bearer \xff"):
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("POST", "/v1/classify")):
            response = gateway.client.request(method, path, headers={"Authorization": header}, json=CHAT)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
    for path in ("/healthz", "/readyz", "/metrics", "/state"):
        assert gateway.client.get(path).status_code == 200


def test_keys_rotate_without_a_restart(engine: Any, new_gateway: Any, keys: Path, until: Callable[..., Any]) -> None:
    gateway = new_gateway(engine.port, keys=keys)
    (keys / "alice").write_text("alice-key-1\nalice-key-2\n")
    until(lambda: works(gateway, "alice-key-2"), "the new key to work")
    assert works(gateway, "alice-key-1"), "old and new work side by side"
    (keys / "alice").write_text("alice-key-2\n")
    until(lambda: not works(gateway, "alice-key-1"), "the old key to stop working")
    (keys / "bob").unlink()
    until(lambda: not works(gateway, "bob-key-1"), "a removed tenant to be refused")
    assert works(gateway, "alice-key-2")


def test_a_missing_secret_lets_nobody_in(engine: Any, new_gateway: Any, tmp_path: Path) -> None:
    gateway = new_gateway(engine.port, keys=tmp_path / "missing")
    assert not works(gateway, "anything")


def test_the_rate_is_limited_for_each_key_and_changes_while_running(engine: Any, new_gateway: Any, keys: Path) -> None:
    gateway = new_gateway(engine.port, keys=keys)
    alice = {"Authorization": "Bearer alice-key-1"}
    gateway.apply(rate_limit={"requestsPerSecond": 0.01, "burst": 2})
    statuses = [gateway.client.post("/v1/chat/completions", json=CHAT, headers=alice).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]
    response = gateway.client.post("/v1/classify", json={"input": "x"}, headers=alice)
    assert response.status_code == 429
    assert 1 <= int(response.headers["retry-after"]) <= 100
    assert response.json()["error"]["type"] == "rate_limit_error"
    with pytest.raises(openai.RateLimitError):
        gateway.openai("alice-key-1").chat.completions.create(**CHAT)
    assert gateway.openai("bob-key-1").chat.completions.create(**CHAT).choices, "another key has its own bucket"
    assert gateway.metric("sixfold_rate_limited_total") == 3
    assert gateway.metric("sixfold_requests_total", outcome="limited") == 3
    gateway.apply()
    assert gateway.openai("alice-key-1").chat.completions.create(**CHAT).choices


def test_the_log_has_the_sources_fields_and_no_secret(
    engine: Any, new_gateway: Any, keys: Path, caplog: pytest.LogCaptureFixture, until: Callable[..., Any]
) -> None:
    gateway = new_gateway(engine.port, keys=keys)
    caplog.set_level(logging.DEBUG)
    caplog.clear()
    headers = {"Authorization": "Bearer alice-key-1", "X-Request-ID": "id-7"}
    answer = gateway.client.post("/v1/chat/completions", json=CHAT, headers=headers).json()
    gateway.client.post("/v1/chat/completions", json={**CHAT, "messages": []}, headers=headers)
    until(lambda: sum(record.name == "sixfold.requests" for record in caplog.records) >= 2, "two lines")
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    good, bad = (line for line in lines if line["logger"] == "sixfold.requests")
    assert good["X-Request-ID"] == "id-7"
    assert good["input_length"] == answer["usage"]["prompt_tokens"]
    assert good["output_length"] == 2
    assert good["model_name"] == "chat"
    assert good["start_time"] < good["end_time"]
    assert (good["tenant"], good["level"], good["status"], good["finish_reason"]) == ("alice", 3, 200, "length")
    assert good["ttft_seconds"] > 0
    assert (bad["status"], bad["error_code"]) == (400, "invalid_value")
    everything = json.dumps(lines) + gateway.client.get("/metrics").text
    content = answer["choices"][0]["message"]["content"]
    for secret in ("alice-key-1", "private question", *([content] if len(content) > 3 else [])):
        assert secret not in everything


def test_metrics_name_what_is_configured_only(engine: Any, new_gateway: Any) -> None:
    gateway = new_gateway(engine.port)
    gateway.client.post("/v1/chat/completions", json={**CHAT, "model": "made-up-by-a-caller"})
    gateway.client.post("/v1/made-up", json={})
    gateway.client.post("/v1/chat/completions", json=CHAT, headers={"X-Request-ID": "made-up"})
    assert "made-up" not in gateway.client.get("/metrics").text
    labels = {"namespace": "default", "policy": "assistant", "variant": "chat", "task": "Generation", "level": "3"}
    assert gateway.metric("sixfold_requests_total", outcome="ok", **labels) == 1
    assert gateway.metric("sixfold_time_to_first_token_seconds_count", **labels) == 1
    assert gateway.metric("sixfold_inter_token_latency_seconds_count", **labels) == 1
    assert gateway.metric("sixfold_request_seconds_count", **labels) == 1
    assert gateway.metric("sixfold_config_sequence") == 1
    assert gateway.metric("sixfold_level") == 3


def test_state_tells_the_operator(engine: Any, new_gateway: Any, until: Callable[..., Any]) -> None:
    gateway = new_gateway(engine.port)
    gateway.apply(level=1)
    (gateway.config.path / "config.json").write_text('{"sequence": 99}')
    until(lambda: gateway.client.get("/state").json()["configError"], "the bad configuration to be reported")
    state = gateway.client.get("/state").json()
    assert (state["role"], state["ready"], state["level"], state["sequence"]) == ("gateway", True, 1, 2)
    assert "stable: Field required" in state["configError"]
    assert {(model["name"], model["task"], model["ready"]) for model in state["models"]} == {
        ("chat", "Generation", True),
        ("sentiment", "Classification", True),
    }
    assert gateway.metric("sixfold_config_refused") == 1
