"""The operator as a process against a real kube-apiserver: from resources to children, and back into statuses."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.usefixtures("operator")


def test_a_policy_becomes_children_that_it_owns(scene: Any) -> None:
    scene.ready_policy()
    api = scene.api
    policy = api.get("InferencePolicy", "bot")
    for kind, name in [
        ("Deployment", "bot-gateway"),
        ("Deployment", "bot-engine"),
        ("Service", "bot-gateway"),
        ("Service", "bot-engine"),
        ("ConfigMap", "bot-runtime"),
    ]:
        (owner,) = api.get(kind, name)["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (policy["metadata"]["uid"], True)
    assert api.get("Service", "bot-engine")["spec"]["clusterIP"] == "None"
    assert policy["status"]["level"]["target"] == 3
    assert policy["status"]["observedGeneration"] == policy["metadata"]["generation"]
    assert not policy["metadata"].get("finalizers")
    assert not policy["metadata"].get("annotations")


def test_a_variant_is_prepared_once(scene: Any) -> None:
    scene.claim()
    scene.variant()
    assert scene.wait("ModelVariant", "chat", "Prepared", "False")["reason"] == "Preparing"
    job = scene.finish_job(summary={"facts": scene.FACTS})
    scene.wait("ModelVariant", "chat", "Ready", "True", "Prepared")
    status = scene.api.get("ModelVariant", "chat")["status"]
    assert status["artifact"]["claimName"] == "models"
    assert status["artifact"]["path"] == "chat"
    assert status["artifact"]["digest"] == scene.FACTS["digest"]
    assert status["size"] == "7.1 MiB"
    assert status["jobName"] == job["metadata"]["name"]
    scene.api.delete("Job", job["metadata"]["name"])
    scene.api.patch("ModelVariant", "chat", {"spec": {"preparation": {"deadline": "2h"}}})
    scene.wait_generation("ModelVariant", "chat")
    assert scene.api.list("Job") == []
    assert scene.api.condition("ModelVariant", "chat", "Ready")["status"] == "True"


def test_a_failed_preparation_says_why_and_starts_again_when_its_job_is_deleted(scene: Any) -> None:
    scene.claim()
    scene.variant()
    failure = {"reason": "CorruptWeights", "message": "model.safetensors is cut off"}
    job = scene.finish_job(summary={"failure": failure}, ok=False)
    seen = scene.wait("ModelVariant", "chat", "Prepared", "False", "CorruptWeights")
    assert "model.safetensors is cut off" in seen["message"]
    assert job["metadata"]["name"] in seen["message"]
    scene.api.delete("Job", job["metadata"]["name"])
    scene.wait("ModelVariant", "chat", "Prepared", "False", "Preparing")
    again = scene.job()
    assert again["metadata"]["name"] == job["metadata"]["name"]
    assert again["metadata"]["uid"] != job["metadata"]["uid"]


def test_a_job_that_the_cluster_ends_says_the_clusters_reason(scene: Any) -> None:
    scene.claim()
    scene.variant()
    scene.finish_job(ok=False)
    seen = scene.wait("ModelVariant", "chat", "Prepared", "False", "BackoffLimitExceeded")
    assert "backoff limit" in seen["message"]


def test_a_missing_claim_is_said_before_a_job_hangs(scene: Any) -> None:
    scene.variant()
    seen = scene.wait("ModelVariant", "chat", "Prepared", "False", "ClaimMissing")
    assert "models" in seen["message"]
    assert scene.api.list("Job") == []


def test_a_missing_variant_and_one_of_the_wrong_task(scene: Any) -> None:
    scene.claim()
    scene.policy("missing")
    seen = scene.wait("InferencePolicy", "missing", "VariantsReady", "False", "VariantMissing")
    assert "chat" in seen["message"]
    scene.variant("chat", "Classification")
    scene.wait("InferencePolicy", "missing", "VariantsReady", "False", "WrongTask")
    scene.wait("InferencePolicy", "missing", "Ready", "False", "WrongTask")
    assert scene.api.list("Deployment") == []


def test_children_that_are_deleted_or_edited_come_back(scene: Any) -> None:
    scene.ready_policy()
    api = scene.api
    for kind, name in [("Service", "bot-engine"), ("Deployment", "bot-gateway"), ("ConfigMap", "bot-runtime")]:
        scene.replace_deleted(kind, name)
    api.patch("Deployment", "bot-engine", {"spec": {"replicas": 5}})
    scene.eventually(
        "the replicas are the policy's", lambda: api.get("Deployment", "bot-engine")["spec"]["replicas"] == 1
    )
    api.patch("ConfigMap", "bot-runtime", {"data": {"config.json": "{}"}})
    scene.eventually(
        "the configuration is whole", lambda: "stable" in api.get("ConfigMap", "bot-runtime")["data"]["config.json"]
    )


def test_a_foreign_deployment_is_left_alone(scene: Any) -> None:
    scene.claim()
    scene.variant()
    labels = {"app": "foreign"}
    container = {"name": "c", "image": "foreign"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    spec = {"selector": {"matchLabels": labels}, "template": template}
    foreign = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "bot-engine"}, "spec": spec}
    before = scene.api.create(foreign)
    scene.policy()
    scene.finish_job(summary={"facts": scene.FACTS})
    seen = scene.wait("InferencePolicy", "bot", "Conflict", "True", "Conflict")
    assert "Deployment bot-engine" in seen["message"]
    scene.wait("InferencePolicy", "bot", "Ready", "False", "Conflict")
    after = scene.api.get("Deployment", "bot-engine")
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
    scene.eventually("the other children are there", lambda: scene.api.get("Deployment", "bot-gateway"))


def test_a_gpu_that_no_node_has(scene: Any) -> None:
    scene.claim()
    scene.variant()
    scene.policy(engine={"accelerator": {"type": "GPU", "count": 2}})
    scene.finish_job(summary={"facts": scene.FACTS})
    message = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    scene.pod("bot-engine", "bot-engine-1", {"phase": "Pending", "conditions": [unscheduled]})
    seen = scene.wait("InferencePolicy", "bot", "WorkloadReady", "False", "Unschedulable")
    assert message in seen["message"]
    limits = scene.api.get("Deployment", "bot-engine")["spec"]["template"]["spec"]["containers"][0]["resources"][
        "limits"
    ]
    assert limits == {"nvidia.com/gpu": "2"}


def test_a_pod_template_that_the_api_refuses(scene: Any) -> None:
    scene.claim()
    scene.variant()
    resources = {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}
    scene.policy(engine={"accelerator": {"type": "CPU"}, "pod": {"resources": resources}})
    scene.finish_job(summary={"facts": scene.FACTS})
    seen = scene.wait("InferencePolicy", "bot", "WorkloadReady", "False", "Refused")
    assert "must be less than or equal to cpu limit" in seen["message"]


def test_all_pods_pass_pod_security_restricted(scene: Any) -> None:
    """In a namespace that enforces it, the API takes the pods of Job, gateway and engine."""
    enforce = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    headers = {"Content-Type": "application/merge-patch+json"}
    path = f"/api/v1/namespaces/{scene.api.namespace}"
    assert scene.api.http.patch(path, content=json.dumps(enforce), headers=headers).is_success
    scene.ready_policy()
    for part in ("engine", "gateway"):
        scene.pod(f"bot-{part}", f"bot-{part}-1", scene.RUNNING)


def test_scaling_goes_through_the_policy(scene: Any) -> None:
    """The scale subresource of a CRD works only while the field is set (measured: 500 where it is absent)."""
    scene.ready_policy()
    api = scene.api
    api.patch("InferencePolicy", "bot", {"spec": {"engine": {"replicas": 1}}})
    scale = api.http.get(api.path("InferencePolicy", "bot") + "/scale").json()
    assert scale["status"] == {"replicas": 1, "selector": "sixfold.dev/policy=bot,sixfold.dev/component=engine"}
    api.patch("InferencePolicy", "bot", {"spec": {"replicas": 3}}, "scale")
    scene.eventually(
        "three engines are asked for", lambda: api.get("Deployment", "bot-engine")["spec"]["replicas"] == 3
    )


def test_a_classifier_of_its_own_comes_and_goes(scene: Any) -> None:
    scene.claim()
    scene.variant()
    scene.variant("mood", "Classification")
    engine = {"accelerator": {"type": "CPU"}}
    scene.policy(classification={"variantRef": {"name": "mood"}, "engine": engine})
    for variant in ("chat", "mood"):
        scene.finish_job(variant, {"facts": scene.FACTS})
    for part in ("engine", "gateway", "classifier"):
        scene.deployment_ready(f"bot-{part}")
    scene.wait("InferencePolicy", "bot", "Ready", "True")
    scene.api.patch("InferencePolicy", "bot", {"spec": {"classification": {"engine": None}}})
    generation = scene.wait_generation("InferencePolicy", "bot")
    assert generation
    assert scene.api.get("Deployment", "bot-classifier"), "it stays until the engine serves its model"
    for part in ("engine", "gateway"):
        scene.deployment_ready(f"bot-{part}")
    scene.eventually("the classifier is gone", lambda: scene.api.get("Deployment", "bot-classifier") is None)
    scene.eventually("its Service is gone", lambda: scene.api.get("Service", "bot-classifier") is None)


def test_conditions_go_with_their_feature(scene: Any) -> None:
    scene.policy()
    scene.wait("InferencePolicy", "bot", "OpenGateway", "True", "NoApiKeys")
    scene.api.patch("InferencePolicy", "bot", {"spec": {"gateway": {"apiKeysSecretRef": {"name": "keys"}}}})
    scene.eventually(
        "OpenGateway is gone", lambda: not scene.api.condition("InferencePolicy", "bot", "OpenGateway")["status"]
    )


def test_nothing_is_written_while_nothing_changes(scene: Any, operator: Any) -> None:
    """A resource is touched from outside (a label): its reconcile writes nothing."""
    scene.ready_policy()
    kinds = ("InferencePolicy", "ModelVariant", "Deployment", "Service", "ConfigMap", "Job", "Event")

    def versions() -> dict[tuple[str, str], str]:
        found = [(kind, item["metadata"]) for kind in kinds for item in scene.api.list(kind)]
        return {(kind, metadata["name"]): metadata["resourceVersion"] for kind, metadata in found}

    settle(versions)
    scene.api.patch("InferencePolicy", "bot", {"metadata": {"labels": {"touched": "yes"}}})
    scene.api.patch("ModelVariant", "chat", {"metadata": {"labels": {"touched": "yes"}}})
    before = versions()
    reconciles = reconciles_done(operator)
    scene.api.patch("InferencePolicy", "bot", {"metadata": {"labels": {"touched": "again"}}})
    scene.eventually("the operator has looked at it", lambda: reconciles_done(operator) > reconciles)
    after = versions()
    assert {key for key in after if after[key] != before.get(key)} == {("InferencePolicy", "bot")}


def test_a_namespace_goes_with_the_operator_gone(scene: Any) -> None:
    """Nothing that the operator made has a finalizer, so nothing holds a namespace back."""
    scene.ready_policy()
    for kind in ("InferencePolicy", "ModelVariant", "Deployment", "Service", "ConfigMap", "Job"):
        for item in scene.api.list(kind):
            assert not item["metadata"].get("finalizers"), item
            if kind != "InferencePolicy" and kind != "ModelVariant":
                assert item["metadata"]["ownerReferences"][0]["controller"]


def test_a_deleted_policy_is_forgotten(scene: Any, operator: Any) -> None:
    scene.policy()
    scene.wait("InferencePolicy", "bot", "Ready", "False")
    series = f'sixfold_operator_policy_level{{namespace="{scene.api.namespace}",policy="bot"}}'
    scene.eventually("the series is there", lambda: series in operator_metrics(operator))
    scene.api.delete("InferencePolicy", "bot")
    scene.eventually("the series is gone", lambda: series not in operator_metrics(operator))


def test_the_operator_is_small_and_says_that_it_lives(operator: Any) -> None:
    assert httpx.get(f"http://127.0.0.1:{operator.port}/healthz", trust_env=False).text == "ok"
    metrics = operator_metrics(operator)
    for name in ("sixfold_operator_last_tick_timestamp_seconds", "sixfold_operator_api_requests_total"):
        assert name in metrics
    status = Path(f"/proc/{operator.process.pid}/status").read_text()
    resident_kib = int(status.split("VmRSS:")[1].split()[0])
    print(f"operator: {resident_kib / 1024:.0f} MiB resident")
    assert resident_kib < 150 * 1024


def replicas(scene: Any) -> int:
    asked: int = scene.api.get("Deployment", "bot-engine")["spec"]["replicas"]
    return asked


def operator_metrics(operator: Any) -> str:
    return httpx.get(f"http://127.0.0.1:{operator.port}/metrics", trust_env=False).text


def reconciles_done(operator: Any) -> float:
    lines = operator_metrics(operator).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("sixfold_operator_reconciles_total"))


def settle(versions: Any) -> None:
    """Until two looks in a row are the same."""
    last = None
    while (now := versions()) != last:
        last = now
        time.sleep(0.3)
