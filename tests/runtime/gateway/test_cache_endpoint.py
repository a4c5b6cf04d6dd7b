"""Keys and values that are kept: counted in the usage, kept apart by tenant, and erased on request."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.gateway import core

PATH = "/v1/kv-cache"
BLOCK_TOKENS = 16
REUSE = {
    "store": "Memory",
    "ttlSeconds": 600,
    "maxBytes": 0,
    "memoryBytes": 2**26,
    "blockTokens": BLOCK_TOKENS,
    "minPromptTokens": 1,
}
ON = {"modes": ["KVCacheReuse"], "kvReuse": REUSE}
PROMPT = [5 + index % 200 for index in range(100)]
REQUEST: dict[str, Any] = {"model": "chat", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}


@pytest.fixture
def reusing(
    models: Path, new_engine: Any, new_gateway: Any, tmp_path: Path, until: Callable[..., Any]
) -> Callable[..., Any]:
    """A gateway with the tenants alice and bob, whose key is their name, and its own engine; both at level 3."""
    keys = tmp_path / "keys"
    keys.mkdir()
    for tenant in ("alice", "bob"):
        (keys / tenant).write_text(tenant)
    engine = new_engine(ServedModel(name="chat", task=Task.GENERATION, path=str(models / "chat")))
    until(lambda: engine.client.get("/readyz").status_code == 200, "the engine to load its model")
    engine.apply(**ON)
    gateway = new_gateway(engine.port, keys=keys)
    gateway.apply(**ON)
    pool = gateway.app.state.gateway.pool
    until(lambda: all(model.kv_block_tokens == BLOCK_TOKENS for model in pool.models), "reuse to be possible")
    return gateway


def cached(gateway: Any, tenant: str, **changes: Any) -> int:
    usage = gateway.openai(tenant).completions.create(**{**REQUEST, **changes}).usage
    return int(usage.prompt_tokens_details.cached_tokens)


def erase(gateway: Any, tenant: str, **headers: str) -> Any:
    return gateway.client.delete(PATH, headers={"Authorization": f"Bearer {tenant}", **headers})


def test_what_is_kept_is_found_counted_and_erased(reusing: Any, until: Callable[..., Any]) -> None:
    assert cached(reusing, "alice", extra_body={"kv_cache_reuse": False}) == 0
    assert cached(reusing, "alice") == 0, "a request that is kept out leaves nothing either"
    found = until(lambda: cached(reusing, "alice"), "its blocks to be found")
    assert found % BLOCK_TOKENS == 0
    assert found < len(PROMPT)
    assert cached(reusing, "alice", extra_body={"kv_cache_reuse": False}) == 0
    assert cached(reusing, "bob") == 0, "tenants never share"

    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = reusing.openai("alice").completions.create(**REQUEST, **options)
    assert last.usage.prompt_tokens_details.cached_tokens == found

    answer = erase(reusing, "alice")
    assert answer.status_code == 200
    assert answer.json()["object"] == "kv_cache.deleted"
    assert answer.json()["blocks"] >= found // BLOCK_TOKENS
    assert cached(reusing, "alice") == 0
    until(lambda: cached(reusing, "bob"), "what is kept of another tenant to be there still")


def test_a_conversation_goes_with_the_request_and_nowhere_else(
    reusing: Any, until: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    turn = {"extra_headers": {"X-Conversation-Id": "a-private-name"}}
    assert cached(reusing, "alice", **turn) == 0
    assert until(lambda: cached(reusing, "alice", **turn), "the next turn to find the first")
    assert cached(reusing, "bob", **turn) == 0
    until(lambda: any(record.name == "sixfold.requests" for record in caplog.records), "a line in the log")
    said = json.dumps([str(record.__dict__) for record in caplog.records]) + reusing.client.get("/metrics").text
    assert "a-private-name" not in said


def test_an_erasure_without_a_key_or_over_the_rate_is_refused(reusing: Any) -> None:
    answer = reusing.client.delete(PATH)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    reusing.apply(**ON, rate_limit={"requestsPerSecond": 0.01, "burst": 1})
    assert erase(reusing, "alice").status_code == 200
    assert erase(reusing, "alice").status_code == 429
    assert reusing.client.get(PATH).status_code == 405


def test_an_erasure_is_no_success_while_an_engine_is_away(
    wire: Any, new_gateway: Any, until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "RESTART_SECONDS", 0.1)
    gateway = new_gateway(wire.port)
    answer = gateway.client.delete(PATH)
    assert (answer.status_code, answer.json()) == (200, {"object": "kv_cache.deleted", "blocks": 0}), "nothing is kept"
    wire.cut(for_good=True)
    until(lambda: gateway.client.get("/readyz").status_code == 503, "the gateway to notice")
    answer = gateway.client.delete(PATH)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_erased")
    assert "Retry-After" in answer.headers
    with pytest.raises(openai.InternalServerError):
        gateway.openai().delete("/kv-cache", cast_to=object)
