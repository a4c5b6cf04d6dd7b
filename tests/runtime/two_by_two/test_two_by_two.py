"""Two gateways, two engines and a Redis, each a process: what is computed once serves all, and Redis may go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(REPOSITORY / "e2e"))

from redis_server import RedisServer, free_port, wait_until, write_directory

CHAT = REPOSITORY / "examples" / "models" / "chat"
KEYS = {"alice": "key-of-alice", "bob": "key-of-bob"}
PROMPT = "ROMEO:\nI come with letters from the king, and with much news of the war.\n" * 12
MAX_SECONDS = 180.0


def config(level: int = 3) -> dict[str, Any]:
    kv = {"store": "Redis", "ttlSeconds": 600, "maxBytes": 2**28, "memoryBytes": 2**26, "blockTokens": 32}
    batching = {"maxBatchTokens": 1024, "shortWaitSeconds": 0.01, "longWaitSeconds": 0.005, "maxWaitSeconds": 0.015}
    stable: dict[str, Any] = {
        "level": level,
        "activeModes": ["KVCacheReuse", "DynamicBatching", "CompressedStreaming"] if level == 3 else [],
        "streaming": {"compression": "Auto" if level == 3 else "Off", "level": 3},
    }
    if level == 3:
        stable["kvReuse"] = {**kv, "minPromptTokens": 32}
        stable["batching"] = {**batching, "maxQueuedRequests": 1000}
    return {"sequence": time.time_ns() // 1_000_000, "stable": stable}


@dataclass
class Process:
    """`sixfold serve` of one role."""

    role: str
    folder: Path
    environment: dict[str, str]
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps(config()))
        name = {"gateway": "SIXFOLD_GATEWAY_PORT", "engine": "SIXFOLD_ENGINE_PORT"}[self.role]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "SIXFOLD_HOST": "127.0.0.1",
            "SIXFOLD_POLICY": "assistant",
            "SIXFOLD_POD": self.folder.name,
            "SIXFOLD_CONFIG_DIRECTORY": str(self.folder),
            "SIXFOLD_DRAIN_SECONDS": "10",
            name: str(self.port),
            **self.environment,
        }
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sixfold_runtime.cli", "serve", "--role", self.role],
                env=environment, stdout=log, stderr=log,
            )  # fmt: skip
        wait_until(f"{self.folder.name} is ready", self._is_ready, MAX_SECONDS)

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)
            self.process = None

    def metric(self, name: str, text: str) -> float:
        """Sum of the series of a metric whose labels hold `text`."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(f"{name}{{") and text in line]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def _is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "log").read_text()[-3000:]
        try:
            return httpx.get(f"{self.url}/readyz").status_code == 200
        except httpx.TransportError:
            return False


@dataclass
class System:
    redis: RedisServer
    engines: list[Process]
    gateways: list[Process]

    def chat(self, gateway: int, tenant: str, prompt: str, **more: Any) -> dict[str, Any]:
        """The usage of an answer."""
        body = {"model": "chat", "prompt": prompt, "max_tokens": 24, "temperature": 0, **more}
        headers = {"Authorization": f"Bearer {KEYS[tenant]}"}
        answer = httpx.post(f"{self.gateways[gateway].url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        usage: dict[str, Any] = answer.json()["usage"]
        return usage

    def hits(self, *kinds: str) -> float:
        return sum(
            engine.metric("sixfold_kv_blocks_total", f'result="{kind}"')
            for engine in self.engines
            if engine.process is not None
            for kind in kinds
        )

    def kept(self) -> int:
        return int(self.redis.cli("DBSIZE").split()[-1])


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    root = tmp_path_factory.mktemp("two-by-two")
    keys = root / "keys"
    keys.mkdir()
    for tenant, key in KEYS.items():
        (keys / tenant).write_text(key)
    with (
        RedisServer(root / "redis", "--maxmemory", "64mb", "--maxmemory-policy", "noeviction") as redis,
        ExitStack() as stack,
    ):
        served = [{"name": "chat", "task": "Generation", "path": str(CHAT)}]
        of_engines = {
            "SIXFOLD_MODELS": json.dumps(served),
            "SIXFOLD_DEVICE": "cpu",
            "SIXFOLD_REDIS_DIRECTORY": str(write_directory(root / "redis-url", redis.url)),
        }
        engines = [Process("engine", root / f"engine-{index}", of_engines) for index in range(2)]
        of_gateways = {
            "SIXFOLD_ENGINES": json.dumps([f"127.0.0.1:{engine.port}" for engine in engines]),
            "SIXFOLD_API_KEYS_DIRECTORY": str(keys),
        }
        gateways = [Process("gateway", root / f"gateway-{index}", of_gateways) for index in range(2)]
        for process in (*engines, *gateways):
            stack.callback(process.stop)
            process.start()
        yield System(redis, engines, gateways)


def cached(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_what_one_engine_computed_serves_the_other(system: System) -> None:
    """The engine that answered goes away; the next turn, through the other gateway, finds its work in Redis."""
    first = system.chat(0, "alice", PROMPT)
    assert cached(first) == 0
    wait_until("the prompt is kept", lambda: system.kept() > first["prompt_tokens"] // 32)
    answered = max(system.engines, key=lambda engine: engine.metric("sixfold_engine_requests_total", "length"))
    answered.stop()
    second = system.chat(1, "alice", PROMPT + "JULIET:")
    answered.start()
    assert first["prompt_tokens"] - 32 <= cached(second) < second["prompt_tokens"]
    assert system.hits("hit_redis") > 0


def test_tenants_with_the_same_prompt_never_share(system: System) -> None:
    prompt = "BOB:\n" + PROMPT
    assert cached(system.chat(0, "bob", prompt)) == 0
    wait_until("it is kept", lambda: cached(system.chat(0, "bob", prompt)) > 0)
    assert cached(system.chat(0, "alice", prompt)) == 0
    assert cached(system.chat(1, "alice", prompt)) <= cached(system.chat(1, "bob", prompt))


def test_a_tenant_is_erased_everywhere_and_nobody_else(system: System) -> None:
    for tenant in KEYS:
        wait_until("it is kept", lambda tenant=tenant: cached(system.chat(0, tenant, "ERASE:\n" + PROMPT)) > 0)  # type: ignore[misc]
    headers = {"Authorization": f"Bearer {KEYS['bob']}"}
    answer = httpx.delete(f"{system.gateways[1].url}/v1/kv-cache", headers=headers, timeout=30)
    assert answer.status_code == 200, answer.text
    assert answer.json()["blocks"] > 0
    assert cached(system.chat(0, "bob", "ERASE:\n" + PROMPT)) == 0
    assert cached(system.chat(0, "alice", "ERASE:\n" + PROMPT)) > 0


class Load:
    """Conversations that grow, over both gateways, until it is stopped."""

    def __init__(self, system: System, clients: int = 3) -> None:
        self.seconds: list[float] = []
        self.errors: list[str] = []
        self._system, self._stop = system, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, index: int) -> None:
        turn = 0
        while not self._stop.is_set():
            prompt = f"CLIENT {index}, {turn // 4}:\n" + PROMPT + "And then? " * (turn % 4)
            started = time.monotonic()
            try:
                self._system.chat(turn % 2, "alice", prompt, max_tokens=8)
            except (AssertionError, httpx.HTTPError) as error:
                self.errors.append(repr(error))
            self.seconds.append(time.monotonic() - started)
            turn += 1


@pytest.mark.parametrize("fault", ["killed", "stopped", "slow", "full", "foreign"])
def test_no_fault_of_redis_fails_a_request(system: System, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    redis = system.redis
    with Load(system) as load:
        wait_until("the load runs", lambda: len(load.seconds) > 6, MAX_SECONDS)
        before = len(load.seconds)
        if fault == "killed":
            redis.kill()
        elif fault == "stopped":
            redis.pause()
        elif fault == "slow":
            redis.cli("CLIENT", "PAUSE", "3000", "ALL")
        elif fault == "full":
            redis.cli("CONFIG", "SET", "maxmemory", "1")
        else:
            for key in redis.cli("--scan").split():
                redis.cli("SET", key, "not what was written")
        wait_until("requests go on", lambda: len(load.seconds) > before + 9, MAX_SECONDS)
        during = load.seconds[before:]
        if fault == "killed":
            redis.start()
        elif fault == "stopped":
            redis.resume()
        redis.cli("CONFIG", "SET", "maxmemory", "64mb")
        redis.cli("FLUSHALL")
        restored = time.monotonic()
        wait_until("blocks are written again", lambda: system.kept() > 0, MAX_SECONDS)
        again = time.monotonic() - restored
        after = len(load.seconds)
        wait_until("requests go on", lambda: len(load.seconds) > after + 6, MAX_SECONDS)
    with capsys.disabled():
        print(
            f"\nRedis {fault}: {len(load.seconds)} requests, longest {max(load.seconds[:before]):.2f} s before,"
            f" {max(during):.2f} s during, {max(load.seconds[after:]):.2f} s after; kept again after {again:.2f} s"
        )
    assert not load.errors, load.errors[:3]
