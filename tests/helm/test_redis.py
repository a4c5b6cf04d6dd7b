"""The chart's Redis: what is rendered, a real redis-server with it, and passwords that outlive upgrades."""

from __future__ import annotations

import base64
import json
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis as client
import yaml
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from sixfold_api.policy import InferencePolicySpec

ON = "--set=redis.enabled=true"
NAMESPACES = "--set=redis.urlSecret.namespaces={team-a,sixfold-system}"
PASSWORD = "--set-string=redis.password=1234567890123456"


def named(documents: list[dict[str, Any]], kind: str, namespace: str = "sixfold-system") -> dict[str, Any]:
    (found,) = [
        document
        for document in documents
        if (document["kind"], document["metadata"]["name"]) == (kind, "sixfold-redis")
        and document["metadata"]["namespace"] == namespace
    ]
    return found


def test_there_is_none_unless_it_is_asked_for(render) -> None:
    assert not [document for document in render() if "redis" in document["metadata"]["name"]]


def test_each_namespace_gets_the_url_and_only_the_server_the_password(render) -> None:
    documents = render(ON, NAMESPACES, PASSWORD)
    url = "redis://:1234567890123456@sixfold-redis.sixfold-system.svc:6379/0"
    assert named(documents, "Secret", "team-a")["stringData"] == {"url": url}
    own = named(documents, "Secret")["stringData"]
    assert own == {"url": url, "password": "1234567890123456", "auth.conf": "requirepass 1234567890123456\n"}
    elsewhere = render(ON, "--set=redis.urlSecret.namespaces={team-a}")
    assert "url" not in named(elsewhere, "Secret")["stringData"]
    password = named(elsewhere, "Secret")["stringData"]["password"]
    assert re.fullmatch("[A-Za-z0-9]{32}", password)
    assert urlsplit(named(elsewhere, "Secret", "team-a")["stringData"]["url"]).password == password
    assert "url" in named(render(ON), "Secret")["stringData"]


def test_only_engines_of_these_namespaces_may_connect(render) -> None:
    documents = render(ON, NAMESPACES)
    policy, deployment = named(documents, "NetworkPolicy")["spec"], named(documents, "Deployment")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert named(documents, "Service")["spec"]["selector"].items() <= labels.items()
    ((peer,),) = [rule["from"] for rule in policy["ingress"]]
    assert peer["namespaceSelector"]["matchExpressions"][0]["values"] == ["team-a", "sixfold-system"]
    assert peer["podSelector"]["matchLabels"]["sixfold.dev/component"] == "engine"
    assert (policy["policyTypes"], policy.get("egress")) == (["Ingress", "Egress"], None)
    open_ = render(ON, "--set=redis.networkPolicy=false")
    assert ("NetworkPolicy", "sixfold-redis") not in {(d["kind"], d["metadata"]["name"]) for d in open_}


def test_the_operators_selector_finds_no_redis(render) -> None:
    documents = render(ON)
    deployments = (found for found in documents if found["kind"] == "Deployment")
    (operator,) = [found for found in deployments if found["metadata"]["name"] == "sixfold-operator"]
    redis = named(documents, "Deployment")
    for one, other in ((operator, redis), (redis, operator)):
        labels = other["spec"]["template"]["metadata"]["labels"]
        assert not one["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_what_redis_reads_at_its_start_restarts_it(render) -> None:
    def annotations(*values: str) -> dict[str, str]:
        template = named(render(ON, *values), "Deployment")["spec"]["template"]
        return dict(template["metadata"]["annotations"])

    plain = annotations(PASSWORD)
    assert annotations(PASSWORD, NAMESPACES) == plain
    for change in ("--set=redis.maxMemoryMiB=64", "--set-string=redis.password=6543210987654321"):
        assert annotations(PASSWORD, change) != plain
    assert "1234567890123456" not in json.dumps(plain)


def test_memory_placement_and_image(render, tmp_path: Path) -> None:
    redis: dict[str, Any] = {
        "enabled": True,
        "maxMemoryMiB": 1024,
        "image": {"repository": "registry.example/valkey", "tag": "8"},
        "resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "2"}},
        "nodeSelector": {"pool": "cache"},
        "tolerations": [{"key": "cache", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
    }
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({"redis": redis, "imagePullSecrets": [{"name": "registry"}]}))
    pod = named(render(f"--values={tmp_path / 'values.yaml'}"), "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == "registry.example/valkey:8"
    assert container["resources"] == {
        "requests": {"cpu": "1", "memory": "1344Mi"},
        "limits": {"cpu": "2", "memory": "1344Mi"},
    }
    for name in ("nodeSelector", "tolerations", "affinity"):
        assert pod[name] == redis[name]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("redis.password=short", "at '/redis/password'"),
        ("redis.password=with a blank and more", "at '/redis/password'"),
        ("redis.image.tag=", "at '/redis/image/tag'"),
        ("redis.maxMemoryMiB=1Gi", "at '/redis/maxMemoryMiB': got string, want integer"),
        ("redis.urlSecret.namespaces={Team}", "at '/redis/urlSecret/namespaces/0'"),
        ("redis.persistence=true", "additional properties 'persistence' not allowed"),
    ],
)
def test_bad_values_are_refused(render, value: str, words: str) -> None:
    with pytest.raises(ValueError, match="values don't meet the specifications") as caught:
        render(ON, f"--set={value}")
    assert words in str(caught.value)


@pytest.fixture
def server(render, tmp_path: Path) -> Iterator[client.Redis]:
    """A redis-server with the rendered files, as the pod has them."""
    documents = render(ON, PASSWORD, "--set=redis.maxMemoryMiB=16")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    rendered = named(documents, "ConfigMap")["data"]["redis.conf"]
    text = rendered.replace("/etc/sixfold-redis", str(tmp_path)).replace("/data", str(tmp_path))
    (tmp_path / "redis.conf").write_text(text.replace("port 6379", f"port {port}"))
    (tmp_path / "auth.conf").write_text(named(documents, "Secret")["stringData"]["auth.conf"])
    (container,) = named(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    arguments = [argument.replace("/etc/sixfold-redis", str(tmp_path)) for argument in container["args"]]
    log = (tmp_path / "log").open("w")
    running = subprocess.Popen([*container["command"], *arguments], stdout=log, stderr=log)
    url = named(documents, "Secret")["stringData"]["url"].replace(
        "sixfold-redis.sixfold-system.svc:6379", f"127.0.0.1:{port}"
    )
    retry = Retry(ConstantBackoff(0.05), 200)  # until it listens
    with client.Redis.from_url(url, retry=retry, retry_on_error=[client.ConnectionError]) as connected:
        yield connected
    running.terminate()
    assert running.wait(10) == 0, (tmp_path / "log").read_text()
    log.close()
    assert not list(tmp_path.glob("*.rdb")), "nothing is saved"


def test_a_real_server_starts_with_it(server: client.Redis, tmp_path: Path) -> None:
    assert server.ping()
    settings = server.config_get("maxmemory", "maxmemory-policy", "save", "appendonly")
    assert settings == {
        "maxmemory": str(16 * 2**20),
        "maxmemory-policy": "volatile-lru",
        "save": "",
        "appendonly": "no",
    }
    port = server.connection_pool.connection_kwargs["port"]
    with client.Redis(port=port) as stranger, pytest.raises(client.AuthenticationError):
        stranger.ping()
    server.set("index", b"kept")
    for number in range(64):
        server.set(f"block-{number}", b"x" * 2**19, ex=3600)
    assert server.get("index") == b"kept"
    assert 0 < server.dbsize() < 64, "blocks go, not writes"


def test_upgrades_keep_the_password_and_the_values_change_it(release, helm, kubectl) -> None:
    def secret(namespace: str) -> dict[str, str]:
        found = json.loads(kubectl("-n", namespace, "get", "secret", "sixfold-redis", "-o", "json"))
        return {name: base64.b64decode(value).decode() for name, value in found["data"].items()}

    kubectl("create", "namespace", "team-redis")
    both = "--set=redis.urlSecret.namespaces={team-redis,sixfold-system}"
    notes = release(ON, both)
    assert "team-redis, sixfold-system" in notes
    (patch,) = re.findall(r"-p '([^']*kvCacheReuse[^']*)'", notes)
    spec = json.loads(patch)["spec"]
    spec["generation"]["variantRef"] = {"name": "chat"}
    InferencePolicySpec.model_validate(spec)
    first = secret("sixfold-system")
    assert secret("team-redis") == {"url": first["url"]}
    assert urlsplit(first["url"]).password == first["password"]
    release(ON, both, "--set=redis.maxMemoryMiB=64")
    assert secret("sixfold-system") == first
    release(ON, both, PASSWORD)
    assert urlsplit(secret("team-redis")["url"]).password == "1234567890123456"
    release("--set=redis.enabled=false")
    assert kubectl("-n", "team-redis", "get", "secret", "sixfold-redis", "--ignore-not-found") == ""


def test_the_apiserver_takes_it_in_a_restricted_namespace(render, kubectl) -> None:
    kubectl("create", "namespace", "redis-restricted")
    kubectl("label", "namespace", "redis-restricted", "pod-security.kubernetes.io/enforce=restricted")
    documents = [found for found in render(ON) if found["metadata"]["name"] == "sixfold-redis"]
    for document in documents:
        document["metadata"]["namespace"] = "redis-restricted"
    stream = yaml.safe_dump_all(documents)
    shown = kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=stream)
    assert len(shown.splitlines()) == len(documents) == 5
    pod = named(documents, "Deployment", "redis-restricted")["spec"]["template"] | {"apiVersion": "v1", "kind": "Pod"}
    pod["metadata"] |= {"name": "redis", "namespace": "redis-restricted"}
    assert "created" in kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
