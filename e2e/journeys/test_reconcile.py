"""What happens when parts are killed, edited, missing or wrong. What ran before goes on answering."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from levels import LevelMeter
from stack import (
    JOURNEY_KEY,
    SYSTEM_NAMESPACE,
    Cluster,
    condition,
    fill_models_claim,
    model_folders,
    wait_ready,
    wait_until,
)
from traffic import Traffic, stream_chat


async def test_operator_killed_in_the_middle_of_a_change(cluster: Cluster, namespace: str, gateway: str) -> None:
    """A patch that lands while the operator is dead is carried out by its successor; streams don't notice."""
    meter = LevelMeter(cluster, namespace, "assistant")
    async with Traffic(gateway, JOURNEY_KEY, "assistant", clients=4) as traffic:
        cluster.kubectl(
            "delete",
            "pod",
            "-n",
            SYSTEM_NAMESPACE,
            "-l",
            "app.kubernetes.io/name=sixfold",
            "--grace-period=0",
            "--force",
        )
        move = await asyncio.to_thread(meter.move, 1, 120)
        assert move.level == 1
        await asyncio.to_thread(meter.move, 3)
    assert not traffic.failed, traffic.failed[:3]
    assert traffic.outcomes


def test_children_come_back(cluster: Cluster, namespace: str) -> None:
    """A deleted Service and an edited Deployment are put right."""
    service = cluster.get(namespace, "service", "assistant-engine")
    assert service is not None
    cluster.kubectl("delete", "service", "-n", namespace, "assistant-engine")
    wait_until("the Service is back", lambda: cluster.get(namespace, "service", "assistant-engine"), 30)
    cluster.patch(namespace, "deployment", "assistant-gateway", {"spec": {"replicas": 1}})

    def replicas() -> bool:
        deployment = cluster.get(namespace, "deployment", "assistant-gateway")
        return deployment is not None and deployment["spec"]["replicas"] == 2

    wait_until("the Deployment has two replicas again", replicas, 30)
    wait_ready(cluster, namespace, "assistant")


async def test_engine_killed(cluster: Cluster, namespace: str, gateway: str) -> None:
    """Without its only engine the gateway answers 503 with Retry-After, and 200 when the engine is back."""
    (engine,) = cluster.list(namespace, "pods", "sixfold.dev/policy=assistant,sixfold.dev/component=engine")
    cluster.kubectl("delete", "pod", "-n", namespace, engine["metadata"]["name"], "--grace-period=0", "--force")
    seen: list[int] = []
    async with httpx.AsyncClient(
        base_url=gateway, timeout=60, headers={"Authorization": f"Bearer {JOURNEY_KEY}"}
    ) as http:

        async def ask() -> int:
            body = {"model": "assistant", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 4}
            answer = await http.post("/v1/chat/completions", json=body)
            if answer.status_code == 503:
                assert int(answer.headers["retry-after"]) > 0
                assert answer.json()["error"]["message"]
            return answer.status_code

        for _ in range(240):
            seen.append(await ask())
            if seen[-1] == 200 and 503 in seen:
                break
            await asyncio.sleep(0.25)
    assert set(seen) <= {200, 503}
    assert seen[-1] == 200
    await asyncio.to_thread(wait_ready, cluster, namespace, "assistant")


async def test_another_variant_takes_over_under_load(cluster: Cluster, namespace: str, gateway: str) -> None:
    """A new variantRef rolls the engine; every stream that is asked for meanwhile is answered whole."""
    cluster.apply(namespace, variant("chat-next", "pvc://models/chat-draft"))
    async with Traffic(gateway, JOURNEY_KEY, "assistant", clients=4) as traffic:
        for name in ("chat-next", "chat"):
            change = {"spec": {"generation": {"variantRef": {"name": name}}}}
            await asyncio.to_thread(cluster.patch, namespace, "ipol", "assistant", change)
            await asyncio.to_thread(wait_ready, cluster, namespace, "assistant")
    cluster.kubectl("delete", "mvar", "-n", namespace, "chat-next")
    assert not traffic.failed, traffic.failed[:3]
    assert traffic.outcomes


def test_a_gpu_that_no_node_has(cluster: Cluster, namespace: str) -> None:
    """The scheduler's own words reach the policy's conditions."""
    if has_gpu(cluster):
        pytest.skip("a node of this cluster has an nvidia.com/gpu")
    policy = {"generation": {"variantRef": {"name": "chat"}}, "engine": {"accelerator": {"type": "GPU"}}}
    cluster.apply(namespace, inference_policy("needs-gpu", policy))

    def unschedulable() -> bool:
        seen = condition(cluster.get(namespace, "ipol", "needs-gpu"), "WorkloadReady")
        return seen["reason"] == "Unschedulable" and "nvidia.com/gpu" in seen["message"]

    wait_until("WorkloadReady says Unschedulable", unschedulable, 60)
    cluster.kubectl("delete", "ipol", "-n", namespace, "needs-gpu")


@pytest.mark.parametrize("fault", ["missing", "corrupt", "wrong-task", "wrong-tokenizer"])
def test_a_bad_variant_says_why_and_nothing_stops(
    cluster: Cluster, namespace: str, gateway: str, fault: str, tmp_path: Path
) -> None:
    """A policy that is pointed to a broken variant keeps serving the good one, and says what is wrong."""
    reason = {
        "missing": "SourceNotFound",
        "corrupt": "CorruptWeights",
        "wrong-task": "WrongArchitecture",
        "wrong-tokenizer": "TokenizerMismatch",
    }[fault]
    if fault in ("corrupt", "wrong-tokenizer"):
        fill_models_claim(namespace, {**model_folders(), fault: broken_copy(fault, tmp_path / fault)})
    folder = {"wrong-task": "sentiment"}.get(fault, fault)
    cluster.apply(namespace, variant(f"bad-{fault}", f"pvc://models/{folder}"))

    def refused() -> bool:
        seen = condition(cluster.get(namespace, "mvar", f"bad-{fault}"), "Prepared")
        return seen["status"] == "False" and seen["reason"] == reason

    wait_until(f"Prepared is False with {reason}", refused, 120)
    cluster.patch(namespace, "ipol", "assistant", {"spec": {"generation": {"variantRef": {"name": f"bad-{fault}"}}}})
    wait_until(
        "VariantsReady is False",
        lambda: condition(cluster.get(namespace, "ipol", "assistant"), "VariantsReady")["status"] == "False",
        30,
    )
    outcome = asyncio.run(ask_once(gateway))
    assert outcome.error == ""
    cluster.patch(namespace, "ipol", "assistant", {"spec": {"generation": {"variantRef": {"name": "chat"}}}})
    wait_ready(cluster, namespace, "assistant")
    cluster.kubectl("delete", "mvar", "-n", namespace, f"bad-{fault}")


def test_a_namespace_goes_while_the_operator_is_away(cluster: Cluster) -> None:
    """No finalizer holds a namespace back."""
    name = "journeys-leaving"
    cluster.kubectl("create", "namespace", name)
    cluster.apply(name, variant("chat", "pvc://models/chat"))
    (deployment,) = cluster.list(SYSTEM_NAMESPACE, "deployments", "app.kubernetes.io/component=operator")
    operator, replicas = f"deployment/{deployment['metadata']['name']}", deployment["spec"]["replicas"]
    cluster.kubectl("scale", "-n", SYSTEM_NAMESPACE, operator, "--replicas=0")
    try:
        cluster.kubectl("delete", "namespace", name, "--timeout=60s")
    finally:
        cluster.kubectl("scale", "-n", SYSTEM_NAMESPACE, operator, f"--replicas={replicas}")
        cluster.kubectl("rollout", "status", "-n", SYSTEM_NAMESPACE, operator, "--timeout=120s")


async def ask_once(gateway: str) -> Any:
    async with httpx.AsyncClient(base_url=gateway, timeout=60) as http:
        return await stream_chat(http, JOURNEY_KEY, "assistant", "Who is there?", 8)


def has_gpu(cluster: Cluster) -> bool:
    return any("nvidia.com/gpu" in node["status"]["allocatable"] for node in cluster.list("default", "nodes"))


def broken_copy(fault: str, target: Path) -> Path:
    """The chat model with one thing wrong."""
    target.mkdir()
    for file in model_folders()["chat"].iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    if fault == "corrupt":
        weights = target / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-4096])
    else:
        (target / "tokenizer.json").write_bytes((model_folders()["sentiment"] / "tokenizer.json").read_bytes())
    return target


def variant(name: str, uri: str) -> dict[str, Any]:
    spec = {"task": "Generation", "source": {"uri": uri}}
    return {"apiVersion": "sixfold.dev/v1alpha1", "kind": "ModelVariant", "metadata": {"name": name}, "spec": spec}


def inference_policy(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "sixfold.dev/v1alpha1", "kind": "InferencePolicy", "metadata": {"name": name}, "spec": spec}
