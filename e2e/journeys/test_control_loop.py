"""From waste to action, on a cluster with a real Prometheus and a real Alertmanager."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from stack import SYSTEM_NAMESPACE, Cluster, condition, image_of, wait_ready, wait_until
from watching import (
    FAST,
    REACTION_GOAL_SECONDS,
    SMALL_POD,
    WASTED_RATIO,
    Talk,
    Watched,
    chat,
    classify,
    repeat_a_long_prompt,
)

ENGINE = {"accelerator": {"type": "CPU"}, "costPerHour": "2.50", "pod": SMALL_POD}
GATEWAY = {"replicas": 1, "pod": SMALL_POD}
HEAVY_DRAFT = {
    "apiVersion": "sixfold.dev/v1alpha1",
    "kind": "ModelVariant",
    "metadata": {"name": "heavy-draft"},
    "spec": {
        "task": "Generation",
        "source": {"uri": "pvc://models/chat"},
        "draftFor": {"name": "chat"},
        "evaluation": {"uri": "pvc://models/text/heldout.jsonl"},
    },
}
"""As heavy as its target: drafting with it can't pay."""


@pytest.fixture(scope="module")
def wasteful(cluster: Cluster, namespace: str) -> Iterator[Watched]:
    """A policy that leaves a mode off from which its traffic would gain."""
    policy = Watched(cluster, namespace, "wasteful")
    policy.apply(
        {"engine": ENGINE, "gateway": GATEWAY, "generation": {"variantRef": {"name": "chat"}}, "analysis": FAST}
    )
    wait_ready(cluster, namespace, "wasteful")
    yield policy
    cluster.kubectl("delete", "ipol", "wasteful", "-n", namespace)


@pytest.fixture(scope="module")
def guarded(cluster: Cluster, namespace: str) -> Iterator[Watched]:
    """A policy with a draft that can't pay, and nothing wrong with it otherwise."""
    cluster.apply(namespace, HEAVY_DRAFT)
    policy = Watched(cluster, namespace, "guarded")
    policy.apply(
        {
            "engine": ENGINE,
            "gateway": GATEWAY,
            "generation": {
                "variantRef": {"name": "chat"},
                "quantized": {"variantRef": {"name": "chat-int4"}},
                "speculative": {
                    "draftVariantRef": {"name": "heavy-draft"},
                    "draftDevice": "CPU",
                    "numTokens": 4,
                    "length": "Fixed",
                },
            },
            "classification": {"variantRef": {"name": "film-sentiment"}},
            "batching": {},
            "analysis": {**FAST, "initialDelay": "1h"},
        }
    )
    wait_ready(cluster, namespace, "guarded")
    yield policy
    cluster.kubectl("delete", "ipol", "guarded", "-n", namespace)


async def test_waste_becomes_a_ticket_and_its_patch_ends_it(wasteful: Watched) -> None:
    with wasteful.cluster.reach(wasteful.namespace, "wasteful-gateway", 8000) as url:
        async with Talk(url, "wasteful", repeat_a_long_prompt) as talk:
            began = time.monotonic()
            await asyncio.to_thread(wasteful.wait, "a ticket is open", wasteful.tickets)
            print(f"\nfrom the first wasteful request to the ticket: {time.monotonic() - began:.1f} s")
            await asyncio.sleep(8)
            (ticket,) = wasteful.tickets()
            spec = ticket["spec"]
            assert spec["cause"] == "RecomputedPrefix", ticket
            assert float(spec["evidence"]["value"]) > float(spec["evidence"]["threshold"])
            assert float(spec["savingPerMonth"]) > 0
            assert wasteful.condition("TicketOpen")["status"] == "True"
            before = wasted_ratio(wasteful)
            patch = json.dumps(spec["recommendation"]["patch"])
            wasteful.cluster.kubectl("patch", "ipol", "wasteful", "-n", wasteful.namespace, "--type=merge", "-p", patch)

            def resolved() -> bool:
                return wasteful.tickets()[0]["status"]["phase"] == "Resolved"

            await asyncio.to_thread(wasteful.wait, "the ticket is resolved", resolved, 120)
            after = wasted_ratio(wasteful)
            print(f"wasted FLOPs: {before:.2f} before the patch, {after:.2f} after it; {talk.asked} requests")
        assert before > 0.65 > after
        assert talk.failed == []


async def test_a_slow_draft_suspends_speculation_and_nothing_else(guarded: Watched) -> None:
    with guarded.cluster.reach(guarded.namespace, "guarded-gateway", 8000) as url:
        async with Talk(url, "guarded", chat) as talk:
            await asyncio.sleep(6)
            guarded.patch(analysis=FAST)
            seconds = await switched(
                guarded, "speculation is suspended", lambda: guarded.mode("Speculative") == "Suspended"
            )
            print(f"\nfrom the fault to switched pods: {seconds:.1f} s (goal {REACTION_GOAL_SECONDS:.0f} s)")
            assert guarded.level() == 3, guarded.history()
            assert guarded.condition("RolledBack")["status"] == "True"
            # It comes back after health, breaches again, and is then left alone.
            await asyncio.to_thread(
                guarded.wait, "speculation is rejected", lambda: rejected(guarded, "mode", "Speculative"), 180
            )
            await asyncio.sleep(25)
            assert guarded.mode("Speculative") == "Suspended", guarded.history()
        assert talk.failed == []


async def test_a_latency_breach_steps_down_and_health_steps_up_again(guarded: Watched) -> None:
    with guarded.cluster.reach(guarded.namespace, "guarded-gateway", 8000) as url:
        async with Talk(url, "guarded", chat) as talk:
            start = guarded.level()
            limited = {**FAST, "thresholds": [{"signal": "RequestP95", "threshold": "0.000001"}]}
            guarded.patch(analysis=limited)
            seconds = await switched(guarded, "the level is lower", lambda: guarded.level() < start)
            first = guarded.level()
            print(f"\nfrom the breach to switched pods: {seconds:.1f} s, level {start} -> {first}")
            guarded.patch(analysis={**FAST, "thresholds": []})
            assert first in (start - 1, start - 2), guarded.history()  # level 2 is level 1 while its mode is rejected
            await asyncio.to_thread(guarded.wait, "the level is back", lambda: guarded.level() == start, 120)
            assert any(entry["reason"] == "Recovered" for entry in guarded.status()["history"])
            guarded.patch(analysis=limited)
            await asyncio.to_thread(
                guarded.wait, "the level is rejected", lambda: rejected(guarded, "level", start), 60
            )
            guarded.patch(analysis={**FAST, "thresholds": []})
            await asyncio.sleep(30)
            assert guarded.level() < start, guarded.history()
            guarded.patch(retryToken="journey")
            await asyncio.to_thread(guarded.wait, "a human has another try", lambda: guarded.level() == start, 30)
        assert talk.failed == []


async def test_wrong_labels_go_straight_to_level_0(guarded: Watched) -> None:
    with guarded.cluster.reach(guarded.namespace, "guarded-gateway", 8000) as url:
        async with Talk(url, "guarded", classify) as talk:
            fault = {"rule": "Fixed", "threshold": "0.0"}
            guarded.patch(shadow={"sampleRate": "1"}, classification={"earlyExit": fault}, analysis=FAST)
            seconds = await switched(guarded, "the level is 0", lambda: guarded.level() == 0)
            print(f"\nfrom wrong labels to switched pods: {seconds:.1f} s")
            assert guarded.status()["level"]["reason"] == "ShadowDisagreement", guarded.history()
        assert talk.failed == []
    guarded.patch(shadow=None, classification={"earlyExit": None})
    await asyncio.to_thread(guarded.wait, "the mended spec is tried", lambda: guarded.level() == 3, 30)


async def test_without_prometheus_nothing_moves(guarded: Watched) -> None:
    cluster = guarded.cluster
    scale = ("scale", "deployment/sixfold-prometheus", "-n", SYSTEM_NAMESPACE)
    with cluster.reach(guarded.namespace, "guarded-gateway", 8000) as url:
        async with Talk(url, "guarded", chat) as talk:
            await asyncio.to_thread(
                guarded.wait, "metrics are there", lambda: guarded.condition("MetricsAvailable")["status"] == "True"
            )
            cluster.kubectl(*scale, "--replicas=0")
            try:
                gone = await asyncio.to_thread(
                    guarded.wait,
                    "the condition says that metrics are gone",
                    lambda: (c := guarded.condition("MetricsAvailable"))["status"] == "False" and c,
                )
                assert gone["reason"] == "PrometheusError", gone
                level, history = guarded.level(), guarded.history()
                guarded.patch(analysis={**FAST, "thresholds": [{"signal": "RequestP95", "threshold": "0.000001"}]})
                await asyncio.sleep(60)
                assert (guarded.level(), guarded.history()) == (level, history)
            finally:
                guarded.patch(analysis={**FAST, "thresholds": []})
                cluster.kubectl(*scale, "--replicas=1")
            await asyncio.to_thread(
                guarded.wait, "metrics are back", lambda: guarded.condition("MetricsAvailable")["status"] == "True", 120
            )
        assert talk.failed == []


async def test_an_alert_lowers_only_policies_that_list_it(guarded: Watched, alertmanager: str) -> None:
    start = guarded.level()
    guarded.patch(analysis={**FAST, "alerts": [{"alertName": "High5xx", "action": "StepDown"}]})
    labels = {"namespace": guarded.namespace, "policy": "guarded"}
    async with httpx.AsyncClient(base_url=alertmanager) as http:
        await fire(http, {"alertname": "NobodyAsked", **labels}, lasts_seconds=60)
        await asyncio.sleep(5)
        assert guarded.level() == start
        await fire(http, {"alertname": "High5xx", **labels}, lasts_seconds=60)
        seconds = await switched(guarded, "the level is lower", lambda: guarded.level() < start)
        print(f"\nfrom the alert to switched pods: {seconds:.1f} s")
        assert guarded.status()["level"]["reason"] == "Alert/High5xx", guarded.history()
        await fire(http, {"alertname": "High5xx", **labels}, lasts_seconds=0)
        with guarded.cluster.reach(guarded.namespace, "guarded-gateway", 8000) as url:
            async with Talk(url, "guarded", chat):
                await asyncio.to_thread(guarded.wait, "the level is back", lambda: guarded.level() == start, 120)


async def test_a_higher_level_proves_itself_on_some_requests_first(guarded: Watched) -> None:
    arms: list[str] = []

    async def ask(http: httpx.AsyncClient, model: str) -> str:
        body = {"model": model, "messages": [{"role": "user", "content": "Who goes there?"}], "max_tokens": 8}
        answer = await http.post("/v1/chat/completions", json=body)
        arms.append(f"{answer.headers['x-sixfold-arm']} {answer.headers['x-sixfold-level']}")
        return "" if answer.is_success else answer.text

    canary = {"steps": [20, 50], "stepDuration": "3s", "minSamples": 5, "hashBy": "Request"}
    with guarded.cluster.reach(guarded.namespace, "guarded-gateway", 8000) as url:
        async with Talk(url, "guarded", ask) as talk:
            guarded.patch(rollbackLevel=0, canary=canary, analysis={**FAST, "alerts": []})
            await asyncio.to_thread(guarded.wait, "level 0 runs", lambda: guarded.level() == 0 and guarded.applied())
            guarded.patch(rollbackLevel=1)
            await asyncio.to_thread(guarded.wait, "a canary runs", lambda: guarded.mode("Quantized") == "Canary", 60)
            # 4-bit weights are slower than full ones on so small a model: it may well be rejected.
            ended = ("Active", "Suspended")
            await asyncio.to_thread(guarded.wait, "it is judged", lambda: guarded.mode("Quantized") in ended, 180)
        decisions = [entry["decision"] for entry in reversed(guarded.status()["history"])]
        print(f"\n{', '.join(decisions[-5:])}; canary answers: {sum(arm.startswith('canary') for arm in arms)}")
        is_kept = guarded.mode("Quantized") == "Active"
        end = "CanaryPromoted" if is_kept else "CanaryRejected"
        assert {"CanaryStarted", end} <= set(decisions), guarded.history()
        assert "canary 1" in arms
        assert talk.failed == []


async def fire(http: httpx.AsyncClient, labels: dict[str, str], lasts_seconds: float) -> None:
    ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + lasts_seconds))
    (await http.post("/api/v2/alerts", json=[{"labels": labels, "endsAt": ends}])).raise_for_status()


async def switched(policy: Watched, what: str, check: Any) -> float:
    """Seconds from now until something was decided and every pod runs it."""
    began = time.monotonic()
    await asyncio.to_thread(policy.wait, what, lambda: check() and policy.applied(), 120)
    return time.monotonic() - began


def rejected(policy: Watched, kind: str, value: Any) -> bool:
    return any(entry.get(kind) == value for entry in policy.status()["level"].get("rejected", []))


def wasted_ratio(policy: Watched) -> float:
    """Of the last 20 seconds, as Prometheus has it."""
    value = policy.ask_prometheus(WASTED_RATIO)
    assert value is not None
    return value


@pytest.fixture(scope="module")
def alertmanager(cluster: Cluster) -> Iterator[str]:
    """Base URL of an Alertmanager that sends all alerts to the operator."""
    secret = cluster.get(SYSTEM_NAMESPACE, "secret", "sixfold-alerts")
    assert secret is not None, "the chart makes the receiver's token up"
    token = base64.b64decode(secret["data"]["token"]).decode()
    cluster.apply(SYSTEM_NAMESPACE, *_alertmanager_objects(cluster, token))
    wait_until(
        "Alertmanager is ready",
        lambda: condition(cluster.get(SYSTEM_NAMESPACE, "deployment", "alertmanager"), "Available")["status"] == "True",
    )
    with cluster.reach(SYSTEM_NAMESPACE, "alertmanager", 9093) as url:
        yield url
    cluster.kubectl("delete", "-n", SYSTEM_NAMESPACE, "deployment,service,secret", "-l", "app=alertmanager")


def _alertmanager_objects(cluster: Cluster, token: str) -> list[dict[str, Any]]:
    receiver = f"http://sixfold-operator-alerts.{SYSTEM_NAMESPACE}.svc:9401/alerts"
    config = {
        "route": {"receiver": "sixfold", "group_by": ["..."], "group_wait": "0s", "group_interval": "1s"},
        "receivers": [
            {
                "name": "sixfold",
                "webhook_configs": [
                    {"url": receiver, "http_config": {"authorization": {"type": "Bearer", "credentials": token}}}
                ],
            }
        ],
    }
    labels = {"app": "alertmanager"}
    container = {
        "name": "alertmanager",
        "image": image_of("alertmanager"),
        "imagePullPolicy": "IfNotPresent",
        "command": [
            "alertmanager",
            "--config.file=/etc/alertmanager/alertmanager.yml",
            "--storage.path=/tmp",
            "--cluster.listen-address=",
        ],
        "ports": [{"containerPort": 9093}],
        "readinessProbe": {"httpGet": {"path": "/-/ready", "port": 9093}, "periodSeconds": 1},
        "volumeMounts": [{"name": "config", "mountPath": "/etc/alertmanager"}],
    }
    metadata = {"name": "alertmanager", "labels": labels}
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": metadata,
            "stringData": {"alertmanager.yml": json.dumps(config)},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata,
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {
                        "containers": [container],
                        "volumes": [{"name": "config", "secret": {"secretName": "alertmanager"}}],
                    },
                },
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"selector": labels, "ports": [{"port": 9093}]},
        },
    ]
