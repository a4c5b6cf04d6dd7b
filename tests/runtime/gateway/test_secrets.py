"""No secret that gateway and engine are given is in anything that they say, at any level of detail."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "e2e"))

from redis_server import RedisServer, free_port, write_directory

KEYS = {"alice": "alice-key-7f3d9c", "bob": "bob-key-55aa10"}
REDIS_PASSWORD, WRONG_PASSWORD = "redis-password-9b1e44", "redis-password-wrong-0c"
PROMPT = "the secret plan of the user is a very private matter " * 4
BODY = {"model": "chat", "prompt": PROMPT, "max_tokens": 4}
CONVERSATION = "conversation-of-alice-4411"
SECRETS = [*KEYS.values(), REDIS_PASSWORD, WRONG_PASSWORD, "private matter", CONVERSATION]
REUSE = {"store": "Redis", "ttlSeconds": 600, "maxBytes": 0, "memoryBytes": 2**26, "blockTokens": 16}
CONFIG = {
    "sequence": 1,
    "stable": {
        "level": 3,
        "activeModes": ["KVCacheReuse", "CompressedStreaming", "DynamicBatching"],
        "streaming": {"compression": "Auto", "level": 3},
        "kvReuse": {**REUSE, "minPromptTokens": 1},
    },
}


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        server.cli("CONFIG", "SET", "requirepass", REDIS_PASSWORD)
        yield server


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir()
    for tenant, key in KEYS.items():
        (folder / tenant).write_text(key)
    return folder


def test_what_gateway_and_engine_say(
    sixfold: Callable[..., Any], models: Path, redis: RedisServer, keys: Path, tmp_path: Path, until: Callable[..., Any]
) -> None:
    config, said = tmp_path / "config", []
    config.mkdir()
    (config / "config.json").write_text(json.dumps(CONFIG))
    right = redis.url.replace("redis://", f"redis://:{REDIS_PASSWORD}@")
    address = write_directory(tmp_path / "address", right)
    common = {"SIXFOLD_HOST": "127.0.0.1", "SIXFOLD_CONFIG_DIRECTORY": str(config), "SIXFOLD_LOG_LEVEL": "DEBUG"}
    common |= {"SIXFOLD_POLICY": "assistant", "SIXFOLD_DRAIN_SECONDS": "3"}
    served = [{"name": "chat", "task": "Generation", "path": str(models / "chat")}]
    ports = {role: free_port() for role in ("engine", "gateway")}
    urls = {role: f"http://127.0.0.1:{port}" for role, port in ports.items()}
    engine = sixfold(
        "serve", "--role", "engine", "--port", str(ports["engine"]), "--redis", str(address),
        SIXFOLD_MODELS=json.dumps(served), SIXFOLD_DEVICE="cpu", **common,
    )  # fmt: skip
    gateway = sixfold(
        "serve", "--role", "gateway", "--port", str(ports["gateway"]), "--api-keys", str(keys),
        SIXFOLD_ENGINES=json.dumps([f"127.0.0.1:{ports['engine']}"]), **common,
    )  # fmt: skip
    engine.wait_ready(urls["engine"])
    gateway.wait_ready(urls["gateway"])
    client = httpx.Client(base_url=urls["gateway"], timeout=60, trust_env=False)

    def ask(key: str, path: str = "/v1/completions", **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}", "X-Conversation-Id": CONVERSATION}
        answer = client.post(path, json={**BODY, **more}, headers=headers)
        said.append(f"{answer.headers} {'' if answer.is_success else answer.text}")
        return answer

    def metric(name: str) -> float:
        lines = httpx.get(f"{urls['engine']}/metrics", trust_env=False).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    until(lambda: metric("sixfold_kv_redis_up") == 1, "Redis to be used", 60, 0.2)
    assert ask(KEYS["alice"]).status_code == 200
    assert ask(KEYS["bob"], stream=True).status_code == 200
    assert ask(KEYS["alice"] + "x").status_code == 401
    assert ask(KEYS["alice"], max_tokens=0).status_code == 400
    assert ask(KEYS["alice"], "/v1/chat/completions").status_code == 400
    assert ask(KEYS["alice"], stop=KEYS["bob"] * 50).status_code == 400
    assert ask(KEYS["alice"], "/v1/nowhere").status_code == 404
    assert client.delete("/v1/kv-cache", headers={"Authorization": f"Bearer {KEYS['bob']}"}).status_code == 200
    # Faults say most: a password that is wrong, and a server that is gone.
    (address / "url").write_text(right.replace(REDIS_PASSWORD, WRONG_PASSWORD))

    def is_refused() -> bool:
        assert ask(KEYS["alice"], prompt=f"{len(said)} {PROMPT}").status_code == 200, "without Redis it works too"
        return metric("sixfold_kv_redis_up") == 0

    until(is_refused, "Redis to refuse", 60, 0.2)
    (address / "url").write_text(f"redis://:{REDIS_PASSWORD}@127.0.0.1:{free_port()}/not-a-number")
    (keys / "alice").write_text(KEYS["alice"] + "\n" + KEYS["bob"] + "-2\n")
    (config / "config.json").write_text(json.dumps({**CONFIG, "sequence": 2, "stable": {"level": 9}}))
    for url in urls.values():
        until(lambda url=url: httpx.get(f"{url}/state", trust_env=False).json()["configError"], "the fault's report")
        said += [httpx.get(url + path, trust_env=False).text for path in ("/metrics", "/state", "/readyz", "/healthz")]
    said += [client.get(path).text for path in ("/openapi.json", "/v1/models", "/demo")]
    logs = [command.log.read_text() for command in (engine, gateway)]
    assert all('"severity": "debug"' in log for log in logs), "at DEBUG there is more to look through"
    assert '"input_length"' in logs[1], "the request log is in it"
    everything = "\n".join([*said, *logs])
    assert {secret for secret in SECRETS if secret in everything} == set()
