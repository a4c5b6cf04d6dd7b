"""Engines that share keys and values through a real Redis, and what becomes of their requests when it fails."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import generate_latest

REPOSITORY = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(REPOSITORY / "e2e"))

from redis_server import RedisServer, write_directory

from sixfold_api.kv_reuse import KVStore
from sixfold_api.modes import Mode
from sixfold_api.runtime_config import KVReuseConfig, RuntimeConfig, ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.config import default_config
from sixfold_runtime.engine.engine import Engine
from sixfold_runtime.engine.kv_messages import erase, prefetch
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import Chunk, Done, Erase, Erased, Generate, Prefetch, Sampling
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.settings import RuntimeSettings

SECONDS = 30.0
BLOCK = 16
CHAT = ServedModel(name="chat", task=Task.GENERATION, path=str(REPOSITORY / "examples" / "models" / "chat"))


def configured(**changes: Any) -> RuntimeConfig:
    kv = KVReuseConfig(
        store=KVStore.REDIS, ttl_seconds=600, max_bytes=2**26, memory_bytes=2**26, block_tokens=BLOCK,
        min_prompt_tokens=BLOCK + 1,
    ).model_copy(update=changes)  # fmt: skip
    config = default_config(3)
    active = (*config.stable.active_modes, Mode.KV_CACHE_REUSE)
    return config.model_copy(
        update={"stable": config.stable.model_copy(update={"kv_reuse": kv, "active_modes": active})}
    )


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 1000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Pod:
    """An engine, and the sink of all that it is asked."""

    def __init__(self, redis_directory: Path, config: RuntimeConfig | None = None) -> None:
        self.config = config or configured()
        self.metrics = EngineMetrics(RuntimeSettings())
        self.dones: dict[str, Done] = {}
        self.texts: dict[str, str] = {}
        self._changed = threading.Condition()
        loaded = threading.Event()
        self.engine = Engine(
            [CHAT], lambda: self.config, self.metrics, device="cpu", limits=Limits(), redis_directory=redis_directory,
            on_models=lambda: (loaded.set(), self._notify()),  # type: ignore[func-returns-value, arg-type, return-value]
        )  # fmt: skip
        self.engine.start()
        assert loaded.wait(SECONDS)
        self.engine.config_changed()
        self.wait(lambda: self.model.kv_block_tokens == BLOCK)

    @property
    def model(self) -> Any:
        return self.engine.models["chat"]

    def deliver(self, chunks: Sequence[Chunk], dones: Sequence[Done]) -> None:
        with self._changed:
            for chunk in chunks:
                self.texts[chunk.id] = self.texts.get(chunk.id, "") + chunk.text
            self.dones.update((done.id, done) for done in dones)
            self._changed.notify_all()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait(self, until: Callable[[], bool]) -> None:
        with self._changed:
            # Some of what is waited for is in threads that tell nobody.
            for _ in range(int(SECONDS / 0.05)):
                if self._changed.wait_for(until, 0.05):
                    return
            raise AssertionError((self.dones, self.model.unsupported))

    def submit(self, request_id: str, prompt: list[int], max_tokens: int = 8, **fields: Any) -> None:
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0)
        self.engine.submit(self, [Generate(request_id, "chat", prompt, sampling, **fields)])

    def ask(self, request_id: str, prompt: list[int], **fields: Any) -> Done:
        """An answer without fault, after which all is kept."""
        self.submit(request_id, prompt, **fields)
        self.wait(lambda: request_id in self.dones)
        done = self.dones[request_id]
        assert done.failure is None, done.failure
        assert self.engine.shelf is not None and self.engine.shelf.store.settle(SECONDS)
        return done

    def metric(self, line: str) -> float:
        for found in generate_latest(self.metrics.registry).decode().splitlines():
            if found.startswith(line):
                return float(found.rsplit(" ", 1)[1])
        return 0.0

    @property
    def problem(self) -> str:
        return str(self.model.unsupported.get(Mode.KV_CACHE_REUSE, ""))


NewPod = Callable[..., Pod]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def new_pod(redis: RedisServer, tmp_path: Path) -> Iterator[NewPod]:
    pods: list[Pod] = []

    def start(**options: Any) -> Pod:
        pods.append(Pod(write_directory(tmp_path / "address", redis.url), **options))
        return pods[-1]

    yield start
    for pod in pods:
        pod.engine.stop()


def test_what_one_engine_computed_another_finds(new_pod: NewPod) -> None:
    first, second = new_pod(), new_pod()
    prompt = tokens(100)
    assert first.ask("a", prompt).cached_tokens == 0
    assert second.ask("a", prompt).cached_tokens == 96
    assert second.metric('sixfold_kv_blocks_total{namespace="default",policy="local",result="hit_redis"}') == 6
    assert second.metric('sixfold_reused_tokens_total{level="3",namespace="default",policy="local"') == 96
    assert first.ask("b", prompt).cached_tokens == 96
    assert first.texts["b"] == second.texts["a"], "from memory or from Redis: the same keys and values"
    assert second.ask("b", prompt, tenant="bob").cached_tokens == 0
    assert first.problem == second.problem == ""


def test_a_conversation_is_brought_near_before_its_request(new_pod: NewPod) -> None:
    first, second = new_pod(), new_pod()
    first.ask("a", tokens(100), tenant="alice", conversation="7")
    for tenant, conversation in (("alice", "8"), ("bob", "7"), ("alice", "7")):
        prefetch(second.engine, Prefetch("chat", tenant, conversation))
    prefetch(second.engine, Prefetch("unknown", "alice", "7"))
    second.wait(lambda: second.metric("sixfold_kv_memory_bytes") > 0)
    assert second.ask("a", tokens(100), tenant="alice").cached_tokens == 96
    found = 'sixfold_kv_blocks_total{namespace="default",policy="local",result="hit_memory"}'
    assert second.metric(found) == 6


def test_a_tenant_is_erased_everywhere(new_pod: NewPod) -> None:
    pods = new_pod(), new_pod()
    for index, pod in enumerate(pods):
        for tenant in ("alice", "bob"):
            pod.ask(f"{tenant}{index}", tokens(100), tenant=tenant)
    erased: list[Erased] = []
    for pod in pods:
        count = len(erased)
        erase(pod.engine, Erase("e", "alice"), erased.append)
        pod.wait(lambda count=count: len(erased) > count)  # type: ignore[misc]
    assert all(answer.error == "" and answer.id == "e" for answer in erased) and erased[0].blocks > 0
    # The answer of the second kept nothing: the first had kept it all.
    for pod in pods:
        assert pod.ask("bob", tokens(100), tenant="bob").cached_tokens == 96
    assert pods[1].ask("alice", tokens(100), tenant="alice").cached_tokens == 0


@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_requests_go_on_while_redis_is_away(fault: str, new_pod: NewPod, redis: RedisServer) -> None:
    pod, other = new_pod(), new_pod()
    pod.ask("before", tokens(60))
    getattr(redis, fault)()
    for index in range(8):
        pod.submit(f"during{index}", tokens(60, index % 4))
        other.submit(f"during{index}", tokens(60, index % 4))
    for each in (pod, other):
        each.wait(lambda each=each: len([name for name in each.dones if name.startswith("during")]) == 8)  # type: ignore[misc]
        assert not [done for done in each.dones.values() if done.failure]
    assert pod.ask("memory", tokens(60)).cached_tokens == 48, "this pod's memory is still there"
    pod.ask("new", tokens(80, 9))
    pod.wait(lambda: "isn't read" in pod.problem and "this pod's memory" in pod.problem)
    if fault == "kill":
        redis.start()
    else:
        redis.resume()
    pod.wait(lambda: pod.problem == "")
    other.wait(lambda: other.problem == "")
    pod.ask("after", tokens(70, 11))
    assert other.ask("after", tokens(70, 11)).cached_tokens == 64


def test_leaving_while_prompts_are_looked_up(new_pod: NewPod, redis: RedisServer) -> None:
    """Redis answers nothing, so that they wait; a sink that goes takes its requests along."""
    pod = new_pod()
    redis.pause()
    for index in range(4):
        pod.submit(f"gone{index}", tokens(60, index))
    pod.engine.cancel(pod, ["gone0", "gone1"])
    pod.engine.drop(pod)
    pod.wait(lambda: pod.engine.is_idle)
    assert not pod.dones and pod.engine.waiting == 0
    redis.resume()
    assert pod.ask("next", tokens(60)).completion_tokens == 8


def test_draining_keeps_what_was_computed(new_pod: NewPod) -> None:
    pod, other = new_pod(), new_pod()
    pod.submit("last", tokens(100), max_tokens=20)
    pod.engine.drain()
    pod.wait(lambda: pod.engine.is_idle)
    pod.engine.stop()
    assert other.ask("first", tokens(100)).cached_tokens == 96
