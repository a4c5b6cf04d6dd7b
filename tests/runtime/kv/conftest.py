"""Stores of keys and values over real Redis servers."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3] / "e2e")]

from kv_pods import CONFIG, Pod
from redis_server import RedisServer, write_directory


@pytest.fixture
def open_pod() -> Iterator[Callable[..., Pod]]:
    """open_pod(directory, **changes of the config): a pod that is closed at the end."""
    pods: list[Pod] = []

    def opened(directory: Path | None, identity: str = "shop/chat", pin_memory: bool = False, **changes: object) -> Pod:
        pods.append(Pod(directory, CONFIG.model_copy(update=changes), identity, pin_memory))
        return pods[-1]

    yield opened
    for pod in pods:
        pod.store.close()


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis(shared_server: RedisServer) -> RedisServer:
    """An empty server that is left as it was found."""
    shared_server.cli("FLUSHALL")
    return shared_server


@pytest.fixture
def directory(redis: RedisServer, tmp_path: Path) -> Path:
    return write_directory(tmp_path / "address", redis.url)
