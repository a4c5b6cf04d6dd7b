"""Budgets, NetworkPolicies and the ways in from outside: they appear, change and go; foreign ones are left alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

OBSERVER = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "sixfold-system"}}}
ENVIRONMENT = {
    "SIXFOLD_NETWORK_POLICIES": "true",
    "SIXFOLD_NETWORK_POLICY_OBSERVERS": json.dumps([OBSERVER]),
    "SIXFOLD_INGRESS_ANNOTATIONS": json.dumps({"cert-manager.io/cluster-issuer": "letsencrypt"}),
    "SIXFOLD_RESYNC_SECONDS": "1",
}
ROUTES = "/apis/gateway.networking.k8s.io/v1/httproutes"
HOST = "chat.example.com"


@pytest.fixture(scope="module", autouse=True)
def configured(operator: Any) -> None:
    """The operator as the chart configures it."""
    operator.stop()
    operator.start(**ENVIRONMENT)


@pytest.fixture
def gateway_api(http: httpx.Client) -> Iterator[Callable[[], None]]:
    """Installs HTTPRoutes: the CRD of the Gateway API's standard channel, version v1 without its descriptions."""
    definition = json.loads((Path(__file__).parent / "httproutes.crd.json").read_text())
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"

    def install() -> None:
        http.post(path, json=definition).raise_for_status()

    yield install
    http.delete(f"{path}/{definition['metadata']['name']}")


def change(scene: Any, **spec: Any) -> None:
    scene.api.patch("InferencePolicy", "bot", {"spec": spec})
    scene.wait_generation("InferencePolicy", "bot")


def gone(scene: Any, kind: str, name: str) -> None:
    scene.eventually(f"{kind} {name} is gone", lambda: scene.api.get(kind, name) is None)


def there(scene: Any, kind: str, name: str) -> Any:
    live = scene.eventually(f"{kind} {name} is there", lambda: scene.api.get(kind, name))
    assert live["metadata"]["ownerReferences"][0]["controller"]
    return live


def test_budgets_follow_the_number_of_replicas(scene: Any) -> None:
    scene.ready_policy()
    assert scene.api.list("PodDisruptionBudget") == [], "a lone pod must not keep a node from draining"
    change(scene, engine={"replicas": 2}, gateway={"replicas": 3})
    for part in ("engine", "gateway"):
        budget = there(scene, "PodDisruptionBudget", f"bot-{part}")
        assert budget["spec"]["maxUnavailable"] == 1
        deployment = scene.api.get("Deployment", f"bot-{part}")
        assert budget["spec"]["selector"] == deployment["spec"]["selector"]
    scene.replace_deleted("PodDisruptionBudget", "bot-engine")
    change(scene, engine={"replicas": 1})
    gone(scene, "PodDisruptionBudget", "bot-engine")
    assert scene.api.get("PodDisruptionBudget", "bot-gateway")


def test_budgets_follow_an_autoscaler(scene: Any) -> None:
    """The number that the Deployment has is what counts, and it stays as it is."""
    scene.ready_policy()
    change(scene, engine={"autoscaling": {"minReplicas": 1, "maxReplicas": 6, "cpuPercent": 80, "scaler": "HPA"}})
    scene.api.patch("Deployment", "bot-engine", {"spec": {"replicas": 4}}, "scale")
    there(scene, "PodDisruptionBudget", "bot-engine")
    assert scene.api.get("Deployment", "bot-engine")["spec"]["replicas"] == 4
    scene.api.patch("Deployment", "bot-engine", {"spec": {"replicas": 1}}, "scale")
    gone(scene, "PodDisruptionBudget", "bot-engine")


def test_pods_admit_those_who_need_them(scene: Any) -> None:
    scene.ready_policy()
    for name in ("bot-engine", "bot-gateway", "chat-prepare"):
        there(scene, "NetworkPolicy", name)
    wire, metrics = engines = scene.api.get("NetworkPolicy", "bot-engine")["spec"]["ingress"]
    labels = {"sixfold.dev/policy": "bot", "sixfold.dev/component": "gateway"}
    assert wire["from"] == [{"podSelector": {"matchLabels": labels}}]
    assert metrics["from"] == [OBSERVER]
    assert "ingress" not in scene.api.get("NetworkPolicy", "chat-prepare")["spec"]
    change(scene, gateway={"allowFrom": [{"cidr": "10.0.0.0/8"}]})

    def sources() -> Any:
        (rule,) = scene.api.get("NetworkPolicy", "bot-gateway")["spec"]["ingress"]
        return rule.get("from")

    scene.eventually("the gateway asks who comes", lambda: sources() == [{"ipBlock": {"cidr": "10.0.0.0/8"}}, OBSERVER])
    # By hand, and back.
    scene.api.patch("NetworkPolicy", "bot-engine", {"spec": {"ingress": [{}]}})
    scene.eventually(
        "engines are closed again", lambda: scene.api.get("NetworkPolicy", "bot-engine")["spec"]["ingress"] == engines
    )


def test_an_address_that_is_none_is_told(scene: Any) -> None:
    scene.ready_policy()
    change(scene, gateway={"allowFrom": [{"cidr": "10.0.0.0/99"}]})
    seen = scene.wait("InferencePolicy", "bot", "WorkloadReady", "False", "Refused")
    assert "10.0.0.0/99" in seen["message"]


def test_an_ingress_comes_changes_and_goes(scene: Any) -> None:
    scene.ready_policy()
    change(scene, gateway={"ingress": {"host": HOST, "className": "nginx"}})
    live = there(scene, "Ingress", "bot-gateway")
    annotations = live["metadata"]["annotations"]
    assert annotations["nginx.ingress.kubernetes.io/proxy-read-timeout"] == "610"
    assert annotations["cert-manager.io/cluster-issuer"] == "letsencrypt"
    change(
        scene, gateway={"ingress": {"host": HOST, "className": None, "tlsSecretName": "tls"}, "requestTimeout": "1h"}
    )

    def changed() -> bool:
        live = scene.api.get("Ingress", "bot-gateway")
        timeout = live["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-read-timeout"]
        return timeout == "3610" and "tls" in live["spec"] and "ingressClassName" not in live["spec"]

    scene.eventually("the Ingress has changed", changed)
    change(scene, gateway={"ingress": None})
    gone(scene, "Ingress", "bot-gateway")


def test_a_route_waits_for_the_gateway_api(scene: Any, gateway_api: Callable[[], None]) -> None:
    scene.ready_policy()
    change(scene, gateway={"httpRoute": {"parentRefs": [{"name": "shared", "namespace": "edge"}], "hostnames": [HOST]}})
    seen = scene.wait("InferencePolicy", "bot", "ExposureFailed", "True", "GatewayAPIMissing")
    assert "install the Gateway API" in seen["message"]
    scene.wait("InferencePolicy", "bot", "Ready", "True")
    gateway_api()
    live = there(scene, "HTTPRoute", "bot-gateway")
    (rule,) = live["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s"}
    assert rule["backendRefs"][0]["kind"] == "Service"
    scene.eventually(
        "nothing fails", lambda: not scene.api.condition("InferencePolicy", "bot", "ExposureFailed")["status"]
    )
    change(scene, gateway={"httpRoute": {"hostnames": ["other.example.com"]}})
    scene.eventually(
        "the route has changed",
        lambda: scene.api.get("HTTPRoute", "bot-gateway")["spec"]["hostnames"] == ["other.example.com"],
    )
    scene.api.delete("HTTPRoute", "bot-gateway")
    there(scene, "HTTPRoute", "bot-gateway")
    change(scene, gateway={"httpRoute": None})
    gone(scene, "HTTPRoute", "bot-gateway")


@pytest.mark.parametrize(
    "foreign",
    [
        {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "spec": {"minAvailable": 5}},
        {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "spec": {"podSelector": {}}},
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "Ingress",
            "spec": {"defaultBackend": {"service": {"name": "other", "port": {"number": 80}}}},
        },
    ],
    ids=lambda manifest: manifest["kind"],
)
def test_a_foreign_object_of_that_name_is_left_alone(scene: Any, foreign: dict[str, Any]) -> None:
    before = scene.api.create({**foreign, "metadata": {"name": "bot-gateway"}})
    scene.claim()
    scene.variant()
    scene.policy(gateway={"replicas": 2, "ingress": {"host": HOST}})
    scene.finish_job(summary={"facts": scene.FACTS})
    seen = scene.wait("InferencePolicy", "bot", "Conflict", "True", "Conflict")
    if foreign["kind"] not in seen["message"]:  # a budget comes with its Deployment
        scene.eventually(
            "the budget is in the way",
            lambda: foreign["kind"] in scene.api.condition("InferencePolicy", "bot", "Conflict")["message"],
        )
    after = scene.api.get(foreign["kind"], "bot-gateway")
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
    there(scene, "Deployment", "bot-gateway")


def test_nothing_is_written_while_nothing_changes(scene: Any) -> None:
    """Every second everything is looked at again, and there is nothing to do."""
    scene.ready_policy()
    exposed = {"replicas": 2, "ingress": {"host": HOST}}
    change(scene, engine={"replicas": 2}, gateway=exposed)
    kinds = ("PodDisruptionBudget", "NetworkPolicy", "Ingress", "Deployment", "InferencePolicy", "ModelVariant")
    there(scene, "PodDisruptionBudget", "bot-gateway")
    for part in ("engine", "gateway"):
        scene.deployment_ready(f"bot-{part}")
    scene.wait("InferencePolicy", "bot", "Ready", "True")

    def versions() -> dict[str, str]:
        found = [item["metadata"] for kind in kinds for item in scene.api.list(kind)]
        return {metadata["uid"]: metadata["resourceVersion"] for metadata in found}

    before = versions()
    scene.api.patch("InferencePolicy", "bot", {"metadata": {"labels": {"touched": "yes"}}})
    scene.replace_deleted("Service", "bot-gateway")  # so the operator has looked at it since
    after = versions()
    assert len([uid for uid in after if after[uid] != before.get(uid)]) == 1, "the policy itself, which was touched"


def test_two_namespaces_with_rights_in_these_only_and_network_policies_turned_off(
    make_scene: Callable[[], Any], http: httpx.Client, operator: Any, operator_kubeconfig: Path, tmp_path: Path
) -> None:
    """As the chart's watchNamespaces: the same rules, bound in each namespace and nowhere else."""
    one, two, other = make_scene(), make_scene(), make_scene()
    for scene in (one, two, other):
        scene.claim()
        scene.variant()
        scene.policy(gateway={"ingress": {"host": HOST}})
    account = {"name": f"in-{one.api.namespace}", "namespace": "default"}
    accounts = "/api/v1/namespaces/default/serviceaccounts"
    http.post(accounts, json={"metadata": account}).raise_for_status()
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "sixfold"}
    for scene in (one, two):
        path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{scene.api.namespace}/rolebindings"
        subject = {"kind": "ServiceAccount", **account}
        binding = {"metadata": {"name": "sixfold"}, "roleRef": role, "subjects": [subject]}
        http.post(path, json=binding).raise_for_status()
    token = http.post(f"{accounts}/{account['name']}/token", json={"spec": {}}).raise_for_status().json()
    config = json.loads(operator_kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token["status"]["token"]}
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(json.dumps(config))
    for scene in (one, two, other):  # what the operator with all rights has made meanwhile
        there(scene, "Ingress", "bot-gateway")
    operator.stop()
    for scene in (one, two, other):
        scene.api.delete("Ingress", "bot-gateway")
    namespaces = json.dumps([one.api.namespace, two.api.namespace])
    changed = {"SIXFOLD_WATCH_NAMESPACES": namespaces, "SIXFOLD_NETWORK_POLICIES": "false"}
    operator.start(**{**ENVIRONMENT, **changed, "KUBECONFIG": str(kubeconfig)})
    for scene in (one, two):
        there(scene, "Ingress", "bot-gateway")
        scene.replace_deleted("Ingress", "bot-gateway")
        for name in ("bot-gateway", "bot-engine", "chat-prepare"):
            gone(scene, "NetworkPolicy", name)
    assert other.api.get("Ingress", "bot-gateway") is None
    assert other.api.get("NetworkPolicy", "bot-gateway")
