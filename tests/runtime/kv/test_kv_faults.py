"""Whatever Redis does, a request only misses; and soon after Redis is well again, everything is as before."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3] / "e2e")]

from kv_pods import PROMPT, SCOPE, TOKENS, Pod, random_planes
from redis_server import RedisCluster, RedisServer, SentinelSet, wait_until, write_directory

from sixfold_runtime.engine import kv_far

OpenPod = Callable[..., Pod]
RECOVERY_SECONDS = 10.0
"""Far more than the trials' longest wait of a second: the machine may be busy."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with other tests is no fault of Redis."""
    monkeypatch.setattr(kv_far, "LOOKUP_SECONDS", 0.3)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "own", "--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as server:
        yield server


@pytest.fixture
def pod(server: RedisServer, open_pod: OpenPod, tmp_path: Path) -> Pod:
    """Without memory of its own, so that all depends on Redis; holds TOKENS."""
    pod = open_pod(write_directory(tmp_path / "address", server.url), memory_bytes=0).up()
    pod.keep()
    assert pod.found() == len(TOKENS)
    return pod


def recovers(pod: Pod) -> None:
    """It finds again what it keeps, by itself."""

    def finds() -> bool:
        if pod.found() < len(TOKENS):
            pod.store.keep(SCOPE, TOKENS, 0, *random_planes(len(TOKENS)))
            time.sleep(0.02)
            return False
        return True

    wait_until("blocks are found again", finds, RECOVERY_SECONDS)
    wait_until("nothing is said to be wrong", lambda: pod.store.problem == "", RECOVERY_SECONDS)


def misses_without_waiting(pod: Pod) -> None:
    """Once Redis isn't used, a lookup takes no time at all."""
    pod.down()
    faults = pod.blocks("fault")
    lookup = pod.store.find(SCOPE, PROMPT, lambda: None)
    assert lookup.is_done and lookup.prefix is None
    assert pod.blocks("fault") == faults + 10


def test_killed_and_started_again(pod: Pod, server: RedisServer) -> None:
    server.kill()
    for _ in range(5):
        assert pod.found() == 0
    misses_without_waiting(pod)
    pod.keep()
    assert pod.faults("connection") > 0
    server.start()
    recovers(pod)


def test_stopped_and_resumed(pod: Pod, server: RedisServer) -> None:
    server.pause()
    for _ in range(10):
        assert pod.found() == 0
    misses_without_waiting(pod)
    assert pod.number("seconds_count", operation="lookup") <= 5, "only a few lookups wait"
    assert "blocks may be left" in pod.erase()[1]
    assert "doesn't answer" in pod.store.problem and pod.faults("timeout") > 0
    server.resume()
    recovers(pod)


def test_stopped_during_load(pod: Pod, server: RedisServer) -> None:
    answers: list[int] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            answers.append(pod.found())
            pod.store.keep(SCOPE, TOKENS, 0, *random_planes(len(TOKENS)))
            time.sleep(0.01)

    askers = [threading.Thread(target=ask) for _ in range(4)]
    for asker in askers:
        asker.start()
    wait_until("blocks are found", lambda: len(TOKENS) in answers)
    server.pause()
    pod.down()
    answers.clear()
    server.resume()
    pod.up()
    recovers(pod)
    is_over.set()
    for asker in askers:
        asker.join()
    assert answers and set(answers) <= {0, len(TOKENS)}


def test_slow(pod: Pod, server: RedisServer) -> None:
    slow = threading.Thread(target=server.cli, args=("DEBUG", "SLEEP", "1"))
    slow.start()
    wait_until("a lookup isn't answered in time", lambda: pod.found() == 0, 3)
    slow.join()
    recovers(pod)
    server.cli("CLIENT", "PAUSE", "1000", "ALL")
    assert pod.found() == 0
    time.sleep(1.0)
    recovers(pod)


def test_full(pod: Pod, server: RedisServer) -> None:
    server.cli("SETRANGE", "ballast", "9000000", "x")

    def keeps() -> bool:
        pod.keep([5, *TOKENS])
        return "written" in pod.store.problem

    wait_until("it is said what is wrong", keeps)
    assert pod.faults("full") > 0 and pod.found([5, *PROMPT]) == 0
    assert pod.found() == len(TOKENS), "what is there is still read"
    server.cli("DEL", "ballast")
    wait_until("it is written to again", lambda: pod.store.problem == "", RECOVERY_SECONDS)
    pod.keep([5, *TOKENS])
    assert pod.found([5, *PROMPT]) == len(TOKENS)


@pytest.mark.parametrize("value", ["", "6F", "foreign", "another block's", "truncated", "long", "list", "hash"])
def test_values_that_are_no_blocks(pod: Pod, server: RedisServer, value: str) -> None:
    keys = sorted(key for key in server.cli("--raw", "KEYS", "*").split() if len(key.rpartition(":")[2]) == 64)
    for key, other in zip(keys, keys[1:] + keys[:1], strict=True):
        if value in ("list", "hash"):
            server.cli("DEL", key)
            server.cli(*(("RPUSH", key, "1") if value == "list" else ("HSET", key, "a", "1")))
        elif value == "another block's":
            server.cli("COPY", other, key, "REPLACE")
        elif value == "truncated":
            script = "redis.call('SET', KEYS[1], string.sub(redis.call('GET', KEYS[1]), 1, -2))"
            server.cli("EVAL", script, "1", key)
        elif value == "long":
            server.cli("APPEND", key, "x")
        else:
            server.cli("SET", key, value)
    assert pod.found() == 0 and pod.store.problem == ""
    if value not in ("", "list", "hash"):
        assert pod.blocks("corrupt") == 1
    pod.keep()
    assert pod.found() == len(TOKENS), "what was computed again is kept in its place"


@pytest.mark.parametrize("value", ["text", "list"])
def test_books_that_are_something_else_are_begun_anew(pod: Pod, server: RedisServer, value: str) -> None:
    pod.keep(conversation="talk")
    books = [key for key in server.cli("--raw", "KEYS", "*").split() if "{" in key or ":c:" in key]
    assert len(books) == 3
    for key in books:
        server.cli("DEL", key)
        server.cli(*(("SET", key, "some text") if value == "text" else ("RPUSH", key, "1")))
    for start in range(4):
        pod.store.prefetch(SCOPE, "talk")
        pod.keep([start, *TOKENS], conversation="talk")
        assert pod.found([start, *PROMPT]) == len(TOKENS)
    pod.up()
    assert not pod.faults("other") and pod.erase() == (50, "")


def test_a_replica_that_refuses_writes_and_a_server_that_loads(
    server: RedisServer, open_pod: OpenPod, tmp_path: Path
) -> None:
    with RedisServer(tmp_path / "replica", "--replicaof", "127.0.0.1", str(server.port)) as replica:
        pod = open_pod(write_directory(tmp_path / "address", replica.url), memory_bytes=0)
        wait_until("it can't be used", lambda: bool(pod.store.problem))
        pod.keep()
        assert pod.found() == 0
        wait_until("the reason is counted", lambda: pod.faults("readonly") > 0)


def test_a_user_who_may_not(open_pod: OpenPod, server: RedisServer, tmp_path: Path) -> None:
    server.cli("ACL", "SETUSER", "reader", "on", ">secret", "~other:*", "+@all")
    url = server.url.replace("//", "//reader:secret@")
    pod = open_pod(write_directory(tmp_path / "address", url)).down()
    assert pod.faults("permission") > 0 and "secret" not in pod.store.problem
    pod.keep()
    assert pod.found() == len(TOKENS), "from memory"
    assert "blocks may be left" in pod.erase()[1]


def test_sentinel_fails_over(open_pod: OpenPod, tmp_path: Path) -> None:
    with SentinelSet(tmp_path / "set") as servers:
        pod = open_pod(write_directory(tmp_path / "address", servers.url), memory_bytes=0).up()
        pod.keep()
        old = servers.master()
        old.kill()
        wait_until("another server is the master", lambda: servers.master() is not old, 10)
        recovers(pod)


def test_a_node_of_a_cluster_stops(open_pod: OpenPod, tmp_path: Path) -> None:
    with RedisCluster(tmp_path / "cluster") as cluster:
        pod = open_pod(write_directory(tmp_path / "address", cluster.url), memory_bytes=0).up()
        pod.keep()
        assert pod.found() == len(TOKENS)
        cluster.servers[1].pause()
        for _ in range(5):
            assert pod.found() < len(TOKENS)
        misses_without_waiting(pod)
        cluster.servers[1].resume()
        wait_until("the cluster is whole", lambda: "ok" in cluster.servers[0].cli("CLUSTER", "INFO").split()[0])
        recovers(pod)
