"""What one pod keeps, another one finds; nobody else does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3] / "e2e")]

from kv_pods import BLOCK, CONFIG, PROMPT, SCOPE, TOKENS, Pod, random_planes
from redis_server import Certificates, RedisCluster, RedisServer, SentinelSet, wait_until, write_directory

from sixfold_runtime.engine import kv_far, kv_writer
from sixfold_runtime.modes.kv_reuse import tenant_salt

OpenPod = Callable[..., Pod]
BOB = replace(SCOPE, salt=tenant_salt("shop", "chat", "bob"))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with other tests isn't a fault of Redis here."""
    monkeypatch.setattr(kv_far, "LOOKUP_SECONDS", 2.0)


def test_keys_and_values_of_one_pod_are_found_by_another(directory: Path, open_pod: OpenPod) -> None:
    keys, values = open_pod(directory).up().keep()
    pod = open_pod(directory).up()
    lookup = pod.find()
    assert lookup.prefix is not None and lookup.seconds > 0
    assert (lookup.prefix.tokens, lookup.prefix.from_redis_blocks) == (len(TOKENS), 10)
    for found, kept in ((lookup.prefix.keys, keys), (lookup.prefix.values, values)):
        torch.testing.assert_close(found, kept, rtol=0, atol=float(kept.abs().max()) / 250)
    again = pod.find().prefix
    assert again is not None and (again.from_memory_blocks, again.from_redis_blocks) == (10, 0)
    assert torch.equal(again.keys, lookup.prefix.keys)
    assert (pod.blocks("hit_redis"), pod.blocks("hit_memory"), pod.blocks("miss")) == (10, 10, 0)
    assert pod.number("bytes_total", direction="read") == pod.number("memory_bytes") > 0


def test_at_least_one_token_is_left_and_only_whole_blocks_from_the_beginning_are_found(
    directory: Path, open_pod: OpenPod
) -> None:
    pod = open_pod(directory).up()
    pod.keep([*TOKENS, 1, 2, 3])
    assert pod.found(TOKENS) == len(TOKENS) - BLOCK
    assert pod.found(TOKENS[: BLOCK + 1]) == BLOCK
    assert pod.found(TOKENS[:BLOCK]) == pod.found([]) == pod.found([0]) == 0
    assert pod.found([*TOKENS[:20], 0, *TOKENS[21:]]) == 2 * BLOCK
    assert pod.found([0, *TOKENS[1:]]) == 0


def test_a_conversation_grows_and_only_what_is_new_is_kept(directory: Path, open_pod: OpenPod) -> None:
    pod, other = open_pod(directory).up(), open_pod(directory).up()
    pod.keep(TOKENS[:40])
    assert other.found(PROMPT) == 40
    assert other.store.known_tokens(SCOPE, TOKENS) == 40
    other.keep(TOKENS, first=40)
    assert other.store.known_tokens(SCOPE, TOKENS) == pod.found(PROMPT) == len(TOKENS)
    assert pod.blocks("hit_memory") == pod.blocks("hit_redis") == 5


def test_tenants_weights_tasks_and_precisions_never_share(directory: Path, open_pod: OpenPod) -> None:
    pod = open_pod(directory).up()
    pod.keep()
    others = (
        BOB,
        replace(SCOPE, weights_digest="sha256:2"),
        replace(SCOPE, task="triage", task_digest="1"),
        replace(SCOPE, dtype="bfloat16"),
        replace(SCOPE, variant="chat-gptq"),
    )
    for scope in others:
        assert pod.found(scope=scope) == pod.store.known_tokens(scope, TOKENS) == 0
        assert open_pod(directory).up().found(scope=scope) == 0
    assert pod.found() == len(TOKENS)
    assert open_pod(directory, "shop/other").up().found() == 0


def test_one_tenant_is_erased_everywhere_and_no_other(directory: Path, open_pod: OpenPod, redis: RedisServer) -> None:
    pod = open_pod(directory).up()
    pod.keep(conversation="talk")
    pod.keep(scope=BOB, conversation="talk")
    # Books that were evicted don't hide anything.
    redis.cli("DEL", *redis.cli("--raw", "KEYS", "*{*").split())
    assert pod.erase() == (10, "")
    assert pod.found() == open_pod(directory).up().found() == pod.store.known_tokens(SCOPE, TOKENS) == 0
    assert open_pod(directory).up().found(scope=BOB) == len(TOKENS)
    assert SCOPE.salt not in redis.cli("--raw", "KEYS", "*")
    pod.keep()
    assert pod.found() == len(TOKENS)


def test_what_waits_to_be_kept_when_its_tenant_is_erased_is_not_kept(directory: Path, open_pod: OpenPod) -> None:
    pod = open_pod(directory).up()
    for _ in range(20):
        pod.store.keep(SCOPE, TOKENS, 0, *random_planes(len(TOKENS)))
    pod.erase()
    assert pod.found() == 0


def test_the_budget_in_bytes_holds_and_the_oldest_go_first(
    directory: Path, open_pod: OpenPod, redis: RedisServer
) -> None:
    keep_one = open_pod(directory).up()
    keep_one.keep()
    block_bytes = keep_one.number("bytes_total", direction="written") / 10
    pod = open_pod(directory, max_bytes=int(25 * block_bytes), memory_bytes=0).up()
    for start in range(5):
        pod.keep([start, *TOKENS])
    keys = [key for key in redis.cli("--raw", "KEYS", "*").split() if len(key.rpartition(":")[2]) == 64]
    assert len(keys) == 25
    assert int(redis.cli("--raw", "ZCARD", *redis.cli("--raw", "KEYS", "*:index:*").split())) == len(keys)
    assert pod.number("bytes_total", direction="evicted") == (60 - len(keys)) * block_bytes
    assert [pod.found([start, *PROMPT]) for start in (0, 4)] == [0, len(TOKENS)]
    assert open_pod(directory).up().found() == 0


def test_blocks_of_other_sizes_count_too(directory: Path, open_pod: OpenPod, redis: RedisServer) -> None:
    large = replace(SCOPE, block_tokens=4 * BLOCK)
    pod = open_pod(directory, max_bytes=50_000, memory_bytes=0).up()
    pod.keep()
    for start in range(6):
        pod.keep([start, *TOKENS], large)
    assert pod.found() == 0 and pod.found([5, *PROMPT], large) == 2 * 4 * BLOCK
    keys = [key for key in redis.cli("--raw", "KEYS", "*").split() if len(key.rpartition(":")[2]) == 64]
    assert 40_000 < sum(int(redis.cli("--raw", "STRLEN", key)) for key in keys) <= 50_000


def test_blocks_expire_and_use_renews_them(directory: Path, open_pod: OpenPod, redis: RedisServer) -> None:
    pod = open_pod(directory, ttl_seconds=600.0).up()
    pod.keep()
    keys = [key for key in redis.cli("--raw", "KEYS", "*").split() if len(key.rpartition(":")[2]) == 64]
    assert 500 < int(redis.cli("--raw", "TTL", keys[0])) <= 600
    for key in keys:
        redis.cli("EXPIRE", key, "100")
    user = open_pod(directory, ttl_seconds=600.0).up()
    assert user.found() == len(TOKENS)
    wait_until("its use renews a block", lambda: int(redis.cli("--raw", "TTL", keys[0])) > 500)
    short = open_pod(directory, ttl_seconds=1.0).up()
    short.keep([9, *TOKENS])
    gone = [key for key in redis.cli("--raw", "KEYS", "*").split() if key not in keys and len(key) > 90]
    wait_until("an unused block expires", lambda: redis.cli("--raw", "EXISTS", gone[0]).strip() == "0", 3)
    assert short.found([9, *PROMPT]) == 0


def test_what_redis_has_lost_it_gets_again_from_memory(directory: Path, open_pod: OpenPod, redis: RedisServer) -> None:
    pod = open_pod(directory, ttl_seconds=1.0).up()  # so short that every use renews
    pod.keep()
    redis.cli("FLUSHALL")
    wait_until("its use writes a block again", lambda: pod.found() > 0 and int(redis.cli("--raw", "DBSIZE")) > 9, 3)


def test_the_next_turn_finds_what_is_just_being_kept(directory: Path, open_pod: OpenPod) -> None:
    pod = open_pod(directory).up()
    pod.store.keep(SCOPE, TOKENS, 0, *random_planes(len(TOKENS)))
    assert pod.found() == len(TOKENS)
    assert pod.blocks("hit_memory") == len(TOKENS) // BLOCK


def test_a_conversation_that_goes_on_is_brought_near(directory: Path, open_pod: OpenPod, redis: RedisServer) -> None:
    open_pod(directory).up().keep(conversation="talk")
    pod = open_pod(directory).up()
    pod.store.prefetch(SCOPE, "another")
    pod.store.prefetch(BOB, "talk")
    pod.store.prefetch(SCOPE, "talk")
    assert pod.found() == len(TOKENS)
    later = open_pod(directory).up()
    later.store.prefetch(SCOPE, "talk")
    wait_until("it is in memory", lambda: later.number("memory_bytes") > 0)
    assert later.found() == len(TOKENS) and later.blocks("hit_memory") > 0


def test_a_cancelled_lookup_ends_and_one_that_fails_is_a_miss(directory: Path, open_pod: OpenPod) -> None:
    pod = open_pod(directory).up()
    pod.keep()
    lookups = [pod.store.find(SCOPE, PROMPT, lambda: None) for _ in range(20)]
    for lookup in lookups:
        lookup.cancel()
    wait_until("all are done", lambda: all(lookup.is_done for lookup in lookups))
    assert pod.found() == len(TOKENS)


def test_the_configuration_is_followed_at_once(directory: Path, open_pod: OpenPod) -> None:
    pod = open_pod(directory).up()
    pod.keep()
    pod.store.follow(None)
    wait_until("the memory is free", lambda: pod.number("memory_bytes") == 0)
    pod.store.keep(SCOPE, TOKENS, 0, *random_planes(len(TOKENS)))
    assert pod.found() == pod.store.known_tokens(SCOPE, TOKENS) == 0 and pod.store.problem == ""
    pod.store.follow(CONFIG)
    assert pod.up().found() == len(TOKENS)
    pod.store.follow(CONFIG.model_copy(update={"store": "Memory"}))
    wait_until("Redis isn't used", lambda: pod.number("redis_up") == 0)
    assert pod.store.problem == "" and pod.found() == len(TOKENS) and pod.blocks("hit_memory") == 10


def test_without_redis_a_pod_finds_its_own(open_pod: OpenPod) -> None:
    pod = open_pod(None, store="Memory")
    pod.keep()
    assert pod.found() == len(TOKENS) and pod.store.problem == ""
    assert pod.erase() == (10, "")
    assert pod.found() == 0


def test_closing_writes_what_was_kept(directory: Path, open_pod: OpenPod) -> None:
    pod = open_pod(directory).up()
    pod.store.keep(SCOPE, TOKENS, 0, *random_planes(len(TOKENS)))
    pod.store.close()
    pod.store.close()
    assert open_pod(directory).up().found() == len(TOKENS)


def test_a_new_address_is_followed(directory: Path, open_pod: OpenPod, tmp_path: Path, redis: RedisServer) -> None:
    pod = open_pod(tmp_path / "later").down()
    assert "doesn't exist" in pod.store.problem
    write_directory(tmp_path / "later", redis.url)
    pod.up().keep()
    assert open_pod(directory).up().found() == len(TOKENS)


def test_another_address_is_followed_while_the_old_one_works(
    directory: Path, open_pod: OpenPod, tmp_path: Path
) -> None:
    with RedisServer(tmp_path / "new") as server:
        pod = open_pod(directory, memory_bytes=0).up()
        pod.keep()
        write_directory(directory, server.url)
        pod.later_seconds = 10
        assert pod.found() == 0, "it isn't in the new one"
        pod.keep()
        assert pod.found() == len(TOKENS) and int(server.cli("DBSIZE")) >= 10


def test_pods_that_write_at_once_keep_one_account(directory: Path, open_pod: OpenPod, redis: RedisServer) -> None:
    pods = [open_pod(directory, max_bytes=100_000, memory_bytes=0).up() for _ in range(3)]
    for start in range(8):
        for pod in pods:  # the first sequence is everybody's
            tokens = [start, *TOKENS]
            own = tokens if not start else [pods.index(pod) + 100, *tokens]
            pod.store.keep(SCOPE, own, 0, *random_planes(len(own)))
    assert all(pod.store.settle(20) for pod in pods)
    keys = [key for key in redis.cli("--raw", "KEYS", "*").split() if len(key.rpartition(":")[2]) == 64]
    assert 80_000 < sum(int(redis.cli("--raw", "STRLEN", key)) for key in keys) <= 100_000
    assert int(redis.cli("--raw", "ZCARD", *redis.cli("--raw", "KEYS", "*:index:*").split())) >= len(keys)


@pytest.mark.parametrize("kind", ["sentinel", "cluster", "tls"])
def test_every_kind_of_redis(kind: str, open_pod: OpenPod, tmp_path: Path) -> None:
    if kind == "tls":
        user = ("user kv on >a:b/c ~sixfold:kv:* +@read +@write +@connection +@keyspace -@dangerous",)
        config = tmp_path / "redis.conf"
        config.write_text("\n".join(("user default off", *user)))
        server = RedisServer(tmp_path / "tls", config=config, certificates=Certificates(tmp_path / "pki"))
        with server:
            url = server.url.replace("//", "//kv:a%3Ab%2Fc@")
            check_kind(open_pod, write_directory(tmp_path / "address", url, server.ca_file))
            stranger = open_pod(write_directory(tmp_path / "stranger", url)).down()
            wait_until("it is said why", lambda: "TLS" in stranger.store.problem and stranger.faults("tls") > 0)
            wrong = open_pod(write_directory(tmp_path / "wrong", url.replace("b%2Fc", "no"), server.ca_file)).down()
            wait_until("it is counted why", lambda: wrong.faults("authentication") > 0)
            assert "no@" not in wrong.store.problem
    else:
        with (SentinelSet if kind == "sentinel" else RedisCluster)(tmp_path / kind) as servers:
            check_kind(open_pod, write_directory(tmp_path / "address", servers.url))


def check_kind(open_pod: OpenPod, directory: Path) -> None:
    pod = open_pod(directory, max_bytes=100_000).up()
    pod.keep(conversation="talk")
    pod.keep(scope=BOB)
    assert open_pod(directory).up().found() == len(TOKENS)
    later = open_pod(directory).up()
    later.store.prefetch(SCOPE, "talk")
    wait_until("it is in memory", lambda: later.number("memory_bytes") > 0)
    assert pod.erase() == (10, "")
    assert open_pod(directory).up().found() == 0
    for start in range(12):
        pod.keep([start, *TOKENS])
    assert pod.number("bytes_total", direction="evicted") > 0
    assert not pod.number("faults_total", reason="other")


def test_what_does_not_fit_into_the_queue_is_dropped_and_counted(
    open_pod: OpenPod, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = open_pod(None, store="Memory")
    keys, values = random_planes(len(TOKENS))
    monkeypatch.setattr(kv_writer, "QUEUE_BYTES", keys.nbytes)
    pod.store.keep(SCOPE, TOKENS, 0, keys, values)
    assert pod.store.settle(5) and pod.found() == 0
    assert pod.number("bytes_total", direction="dropped") == keys.nbytes + values.nbytes


def test_a_mistake_of_ours_ends_one_lookup_and_nothing_else(open_pod: OpenPod) -> None:
    pod = open_pod(None, store="Memory")
    pod.keep()

    def wake() -> None:
        raise RuntimeError("the engine isn't there")

    lookup = pod.store.find(SCOPE, PROMPT, wake)
    wait_until("it is counted", lambda: pod.faults("internal") == 1)
    assert lookup.is_done and pod.found() == len(TOKENS)
    pod.keep([1, *TOKENS])
    assert pod.found([1, *PROMPT]) == len(TOKENS)
