"""Every pod there may be is taken by a namespace that enforces Pod Security `restricted`, by a real kube-apiserver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from sixfold_api.policy import InferencePolicySpec
from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task
from sixfold_api.variant import ModelVariantSpec
from sixfold_operator.builders.job import Inputs, preparation_job
from sixfold_operator.builders.workload import engine_deployment, gateway_deployment
from sixfold_operator.settings import OperatorSettings

NAMESPACE = "restricted-pods"
SETTINGS = OperatorSettings(runtime_image="registry.example/runtime:1", hub_endpoint="https://hub.example.com")
OWNER = {"apiVersion": "sixfold.dev/v1alpha1", "metadata": {"name": "bot", "namespace": NAMESPACE, "uid": "u1"}}
POLICY, VARIANT = OWNER | {"kind": "InferencePolicy"}, OWNER | {"kind": "ModelVariant"}
EVERYTHING = {
    "redis": {"enabled": True},
    "prometheus": {"enabled": True, "storage": {"persistent": True}},
    "alerts": {"enabled": True},
    "signals": [{"name": "TTFTP95", "threshold": 1.5}],
    "sinks": [{"name": "hook", "type": "Webhook", "url": "https://h", "secretRef": {"name": "h", "key": "k"}}],
}


def policys_pods() -> Iterator[dict[str, Any]]:
    """Deployments and Jobs with every volume and environment variable that a policy or variant may bring."""
    spec = InferencePolicySpec.model_validate(
        {
            "gateway": {"apiKeysSecretRef": {"name": "keys"}},
            "engine": {"accelerator": {"type": "GPU", "resourceName": "nvidia.com/mig-1g.10gb"}},
            "generation": {
                "variantRef": {"name": "chat"},
                "kvCacheReuse": {"store": "Redis", "redis": {"urlSecretRef": {"name": "redis", "key": "url"}}},
            },
            "classification": {"variantRef": {"name": "mood"}, "engine": {"accelerator": {"type": "CPU"}}},
            "streaming": {"dictionaryConfigMapRef": {"name": "texts", "key": "words"}},
        }
    )
    assert spec.classification is not None and spec.classification.engine is not None
    assert spec.generation is not None and spec.generation.kv_cache_reuse is not None
    model = ServedModel(name="chat", task=Task.GENERATION, path="/claims/models/chat", digest="sha256:aa")
    redis = spec.generation.kv_cache_reuse.redis
    yield gateway_deployment(POLICY, spec, SETTINGS)
    yield engine_deployment(POLICY, "engine", spec.engine, [model], ["models"], SETTINGS, redis)
    yield engine_deployment(POLICY, "classifier", spec.classification.engine, [model], ["models"], SETTINGS)
    variant = {
        "task": "Generation",
        "source": {"uri": f"hf://org/name@{'0' * 40}"},
        "artifact": {"claimName": "models"},
        "credentialsSecretRef": {"name": "hub"},
    }
    parsed = ModelVariantSpec.model_validate(variant)
    yield preparation_job(VARIANT, parsed, Inputs(str(parsed.source.uri)), SETTINGS)


@pytest.fixture(scope="module")
def namespace(http: httpx.Client) -> str:
    labels = {
        "pod-security.kubernetes.io/enforce": "restricted",
        "pod-security.kubernetes.io/enforce-version": "latest",
    }
    http.post("/api/v1/namespaces", json={"metadata": {"name": NAMESPACE, "labels": labels}}).raise_for_status()
    return f"/api/v1/namespaces/{NAMESPACE}/pods?dryRun=All"


def create(http: httpx.Client, path: str, workload: dict[str, Any]) -> httpx.Response:
    template = workload["spec"]["template"]
    metadata = {"name": workload["metadata"]["name"], "labels": template["metadata"]["labels"]}
    return http.post(path, json={"metadata": metadata, "spec": template["spec"]})


def test_no_pod_is_refused(
    namespace: str, http: httpx.Client, render: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(EVERYTHING))
    rendered = render(f"--values={tmp_path / 'values.yaml'}")
    charts = [document for document in rendered if "template" in document.get("spec", {})]
    assert len(charts) == 3, "operator, Redis and Prometheus"
    for workload in (*charts, *policys_pods()):
        answer = create(http, namespace, workload)
        assert answer.is_success, f"{workload['kind']} {workload['metadata']['name']}: {answer.text}"


def test_the_namespace_refuses_what_is_not_restricted(namespace: str, http: httpx.Client) -> None:
    workload = next(policys_pods())
    workload["spec"]["template"]["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    answer = create(http, namespace, workload)
    assert answer.status_code == 403
    assert "allowPrivilegeEscalation" in answer.text
