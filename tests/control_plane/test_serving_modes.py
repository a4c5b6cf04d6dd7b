"""KV reuse, batching and the gateway's limits: from the policy to pods and ConfigMap, and what pods say back."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("operator")

REDIS = {"urlSecretRef": {"name": "redis", "key": "url"}, "caSecretRef": {"name": "redis", "key": "ca.crt"}}
REUSE = {"store": "Redis", "redis": REDIS}
GENERATION = {"variantRef": {"name": "chat"}, "kvCacheReuse": REUSE}
GATEWAY = {"apiKeysSecretRef": {"name": "keys"}, "tenants": [{"name": "web", "priority": "High"}]}


def config(scene: Any) -> dict[str, Any]:
    config_map = scene.api.get("ConfigMap", "bot-runtime") or {}
    return dict(json.loads(config_map.get("data", {}).get("config.json", "{}")).get("stable", {}))


def volume(scene: Any, deployment: str, name: str) -> dict[str, Any] | None:
    live = scene.api.get("Deployment", deployment)
    volumes = live["spec"]["template"]["spec"]["volumes"] if live else []
    return next((entry for entry in volumes if entry["name"] == name), None)


def prepared(scene: Any, **spec: Any) -> None:
    scene.claim()
    scene.variant()
    scene.finish_job(summary={"facts": scene.FACTS})
    scene.policy(**spec)


def test_redis_and_dictionary_are_files_and_all_else_is_hot(scene: Any) -> None:
    words = {"dictionaryConfigMapRef": {"name": "words", "key": "zstd"}}
    prepared(scene, generation=GENERATION, gateway=GATEWAY, streaming=words, batching={})
    mounted = scene.eventually("engines get Redis's address", lambda: volume(scene, "bot-engine", "redis"))
    sources = [source["secret"] for source in mounted["projected"]["sources"]]
    assert [(source["name"], source["items"], source["optional"]) for source in sources] == [
        ("redis", [{"key": "url", "path": "url"}], True),
        ("redis", [{"key": "ca.crt", "path": "ca.crt"}], True),
    ]
    assert volume(scene, "bot-gateway", "redis") is None
    assert scene.eventually("gateways get it", lambda: volume(scene, "bot-gateway", "stream-dictionary"))
    before = {name: scene.api.get("Deployment", name)["metadata"] for name in ("bot-engine", "bot-gateway")}
    hot = {
        "generation": {"kvCacheReuse": {"ttl": "2h", "maxSize": "1Gi", "memorySize": "1Mi", "minPromptTokens": 100}},
        "batching": {"maxBatchTokens": 4096},
        "gateway": {"requestTimeout": "30s", "maxRequestSize": "1Mi", "demoPage": True, "tenants": []},
    }
    scene.api.patch("InferencePolicy", "bot", {"spec": hot})
    scene.eventually("pods are told", lambda: config(scene)["requestLimits"]["timeoutSeconds"] == 30)
    told = config(scene)
    assert told["kvReuse"] == {
        "store": "Redis",
        "ttlSeconds": 7200,
        "maxBytes": 2**30,
        "memoryBytes": 2**20,
        "blockTokens": 32,
        "minPromptTokens": 100,
    }
    assert (told["batching"]["maxBatchTokens"], told["requestLimits"]["maxBytes"]) == (4096, 2**20)
    assert told["demoPage"] is True
    scene.api.patch("InferencePolicy", "bot", {"spec": {"rollbackLevel": 2}})
    scene.sequence(2)
    assert not {"kvReuse", "batching"} & config(scene).keys()
    scene.wait_generation("InferencePolicy", "bot")
    for name, metadata in before.items():
        assert scene.api.get("Deployment", name)["metadata"]["generation"] == metadata["generation"], "nothing rolls"
    scene.api.patch(
        "InferencePolicy", "bot", {"spec": {"generation": {"kvCacheReuse": {"redis": {"caSecretRef": None}}}}}
    )
    scene.eventually(
        "another address rolls", lambda: len(volume(scene, "bot-engine", "redis")["projected"]["sources"]) == 1
    )


def test_a_classifier_is_batched_without_generation(scene: Any) -> None:
    scene.claim()
    scene.variant("intent", "Classification")
    scene.policy(generation=None, classification={"variantRef": {"name": "intent"}}, batching={"shortWait": "1ms"})
    told = scene.eventually("pods are told", lambda: config(scene))
    assert told["batching"]["shortWaitSeconds"] == 0.001
    modes = scene.eventually("modes are told", lambda: scene.api.get("InferencePolicy", "bot").get("status"))["modes"]
    assert {"name": "DynamicBatching", "state": "Active", "reason": ""} in modes


def test_tenants_without_a_key_are_told(scene: Any, pod_reports: Any) -> None:
    prepared(scene, gateway=GATEWAY)
    report = pod_reports(8000)
    missing = "spec.gateway.tenants names web, which isn't the name of an API key"
    report.say(sequence=1, level=3, tenants=1, not_found=[missing])
    at = {"podIP": report.address, "podIPs": [{"ip": report.address}]}
    scene.pod("bot-gateway", "bot-gateway-1", {**scene.RUNNING, **at})
    assert missing in scene.wait("InferencePolicy", "bot", "PartsNotFound", "True", "PodsGoWithout")["message"]
    report.say(sequence=scene.sequence(3), level=3, tenants=2)
    scene.wait("InferencePolicy", "bot", "PartsNotFound", "")


def test_pods_that_lose_redis_and_find_it_again_are_heard(scene: Any, pod_reports: Any) -> None:
    prepared(scene, generation=GENERATION)
    report = pod_reports(8001)
    problem = "Redis doesn't answer; blocks are reused from this pod's memory only"
    report.say(sequence=1, level=3)
    at = {"podIP": report.address, "podIPs": [{"ip": report.address}]}
    scene.pod("bot-engine", "bot-engine-1", {**scene.RUNNING, **at})
    sequence = scene.sequence(3)
    report.say(sequence=sequence, level=3)
    scene.wait("InferencePolicy", "bot", "ConfigApplied", "True")
    report.say(sequence=sequence, level=3, unsupported={"KVCacheReuse": problem})  # nothing in the API changes
    told = scene.wait("InferencePolicy", "bot", "KVReuseDegraded", "True", "PodsGoWithout")
    assert problem in told["message"]
    scene.eventually("people are warned", lambda: "PodsGoWithout" in scene.warnings())
    report.say(sequence=sequence, level=3)

    def gone() -> bool:
        status = scene.api.get("InferencePolicy", "bot")["status"]
        active = {"name": "KVCacheReuse", "state": "Active", "reason": ""} in status["modes"]
        return active and "KVReuseDegraded" not in {entry["type"] for entry in status["conditions"]}

    scene.eventually("it is told by itself that Redis is back", gone)
