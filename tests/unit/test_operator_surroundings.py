"""Budgets, NetworkPolicies, Ingress and HTTPRoute from specs; how pods spread, start and drain."""

from __future__ import annotations

from typing import Any

import pytest

from sixfold_api.gateway import GatewaySpec
from sixfold_api.policy import EngineSpec, InferencePolicySpec
from sixfold_api.variant import ModelVariantSpec
from sixfold_operator.builders.availability import disruption_budget, wants_budget
from sixfold_operator.builders.common import Manifest, with_hash
from sixfold_operator.builders.exposure import http_route, ingress
from sixfold_operator.builders.job import Inputs, preparation_job
from sixfold_operator.builders.network import job_network_policy, network_policy
from sixfold_operator.builders.workload import engine_deployment, gateway_deployment, service
from sixfold_operator.reconcile.children import has_drifted
from sixfold_operator.settings import OperatorSettings

OBSERVER = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "sixfold-system"}}}
SETTINGS = OperatorSettings(
    runtime_image="registry.example/runtime:1", network_policies=True, network_policy_observers=[OBSERVER]
)
POLICY = {
    "apiVersion": "sixfold.dev/v1alpha1",
    "kind": "InferencePolicy",
    "metadata": {"name": "bot", "namespace": "ns", "uid": "u1"},
}
VARIANT = {**POLICY, "kind": "ModelVariant", "metadata": {"name": "chat", "namespace": "ns", "uid": "v1"}}


def spec(**fields: Any) -> InferencePolicySpec:
    return InferencePolicySpec.model_validate({"generation": {"variantRef": {"name": "chat"}}, **fields})


def deployments(**fields: Any) -> dict[str, Manifest]:
    """Gateway and engine of a policy."""
    asked = spec(**fields)
    engine = engine_deployment(POLICY, "engine", asked.engine, [], [], SETTINGS, drain_seconds=asked.drain_seconds)
    return {"gateway": gateway_deployment(POLICY, asked, SETTINGS), "engine": engine}


@pytest.mark.parametrize("component", ["gateway", "engine", "classifier"])
def test_a_budget_selects_the_pods_and_holds_for_any_number_of_them(component: str) -> None:
    budget = disruption_budget(POLICY, component)
    assert budget["metadata"]["name"] == f"bot-{component}"
    assert budget["spec"]["maxUnavailable"] == 1
    assert "minAvailable" not in budget["spec"]
    assert budget["spec"]["selector"]["matchLabels"] == service(POLICY, component)["spec"]["selector"]
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


@pytest.mark.parametrize(("replicas", "wanted"), [(None, False), (0, False), (1, False), (2, True), (9, True)])
def test_a_budget_is_for_two_replicas_or_more_whoever_set_them(replicas: int | None, wanted: bool) -> None:
    assert wants_budget({"spec": {} if replicas is None else {"replicas": replicas}}) is wanted


@pytest.mark.parametrize("component", ["engine", "classifier"])
def test_engines_admit_their_own_gateways_and_observers(component: str) -> None:
    manifest = network_policy(POLICY, component, spec(), SETTINGS)
    assert manifest["spec"]["policyTypes"] == ["Ingress"]
    assert manifest["spec"]["podSelector"]["matchLabels"] == service(POLICY, component)["spec"]["selector"]
    wire, metrics = manifest["spec"]["ingress"]
    gateways = {"podSelector": {"matchLabels": service(POLICY, "gateway")["spec"]["selector"]}}
    ports = [{"port": port, "protocol": "TCP"} for port in (8001, 8443)]
    assert wire == {"ports": ports, "from": [gateways]}, "a rollout that turns TLS on or off cuts nobody off"
    assert metrics == {"ports": ports[:1], "from": [OBSERVER]}
    encrypted = spec(tls={"secretRef": {"name": "bot-tls"}})
    assert network_policy(POLICY, component, encrypted, SETTINGS) == manifest
    nobody = SETTINGS.model_copy(update={"network_policy_observers": []})
    assert network_policy(POLICY, component, spec(), nobody)["spec"]["ingress"] == [wire]


def test_gateways_admit_everybody_or_those_that_are_named() -> None:
    (rule,) = network_policy(POLICY, "gateway", spec(), SETTINGS)["spec"]["ingress"]
    assert rule == {"ports": [{"port": 8000, "protocol": "TCP"}]}
    peers = [
        {"cidr": "10.0.0.0/8"},
        {"podLabels": {"app": "web"}},
        {"namespaceLabels": {}},
        {"namespaceLabels": {"team": "a"}, "podLabels": {"app": "web"}},
    ]
    (rule,) = network_policy(POLICY, "gateway", spec(gateway={"allowFrom": peers}), SETTINGS)["spec"]["ingress"]
    assert rule["from"] == [
        {"ipBlock": {"cidr": "10.0.0.0/8"}},
        {"podSelector": {"matchLabels": {"app": "web"}}},
        {"namespaceSelector": {"matchLabels": {}}},
        {"namespaceSelector": {"matchLabels": {"team": "a"}}, "podSelector": {"matchLabels": {"app": "web"}}},
        OBSERVER,
    ]


def test_preparation_admits_nobody() -> None:
    manifest = job_network_policy(VARIANT)
    variant = ModelVariantSpec.model_validate({"task": "Generation", "source": {"uri": "pvc://m/c"}})
    job = preparation_job(VARIANT, variant, Inputs("pvc://m/c"), SETTINGS)
    selected = manifest["spec"]["podSelector"]["matchLabels"].items()
    assert selected <= job["spec"]["template"]["metadata"]["labels"].items()
    assert manifest["spec"]["ingress"] == []
    assert manifest["metadata"]["name"] == "chat-prepare"


def gateway_of(**fields: Any) -> GatewaySpec:
    return spec(gateway=fields).gateway


def test_an_ingress_lets_streams_and_large_prompts_through() -> None:
    asked = gateway_of(ingress={"host": "a.example.com"}, requestTimeout="1h", maxRequestSize="8Mi")
    assert asked.ingress is not None
    manifest = ingress(POLICY, asked, asked.ingress, {})
    annotations = manifest["metadata"]["annotations"]
    assert annotations["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
    assert annotations["nginx.ingress.kubernetes.io/proxy-read-timeout"] == "3610"
    assert annotations["nginx.ingress.kubernetes.io/proxy-body-size"] == str(8 * 2**20)
    assert annotations["nginx.org/proxy-buffering"] == "False"
    assert annotations["haproxy.org/timeout-server"] == "3610s"
    assert not any("snippet" in name for name in annotations)
    (rule,) = manifest["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert (rule["host"], path["path"], path["pathType"]) == ("a.example.com", "/v1", "Prefix")
    assert path["backend"]["service"] == {"name": "bot-gateway", "port": {"number": 8000}}
    assert not {"tls", "ingressClassName"} & set(manifest["spec"])


def test_an_ingress_with_class_tls_and_annotations_of_the_chart() -> None:
    fields = {"host": "a.example.com", "className": "nginx", "path": "/v1/chat", "tlsSecretName": "a-tls"}
    asked = gateway_of(ingress=fields)
    assert asked.ingress is not None
    extra = {"nginx.ingress.kubernetes.io/proxy-read-timeout": "60", "cert-manager.io/cluster-issuer": "letsencrypt"}
    manifest = ingress(POLICY, asked, asked.ingress, extra)
    assert manifest["metadata"]["annotations"].items() >= extra.items()
    assert manifest["spec"]["ingressClassName"] == "nginx"
    assert manifest["spec"]["tls"] == [{"hosts": ["a.example.com"], "secretName": "a-tls"}]
    assert manifest["spec"]["rules"][0]["http"]["paths"][0]["path"] == "/v1/chat"


def test_a_route_has_no_limit_on_streams() -> None:
    fields = {"parentRefs": [{"name": "shared", "namespace": "edge", "sectionName": "https"}, {"name": "own"}]}
    asked = gateway_of(httpRoute=fields).http_route
    assert asked is not None
    manifest = http_route(POLICY, asked)
    assert manifest["spec"]["parentRefs"] == fields["parentRefs"]
    assert "hostnames" not in manifest["spec"]
    (rule,) = manifest["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s"}
    assert rule["backendRefs"] == [{"name": "bot-gateway", "port": 8000}]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]


def test_an_annotation_that_was_edited_by_hand_is_drift() -> None:
    asked = gateway_of(ingress={"host": "a.example.com"})
    assert asked.ingress is not None
    wanted = with_hash(ingress(POLICY, asked, asked.ingress, {}))
    metadata = wanted["metadata"]
    annotations = {**metadata["annotations"], "added/by-somebody": "yes"}
    assert not has_drifted({**wanted, "metadata": {**metadata, "annotations": annotations}}, wanted)
    annotations["nginx.ingress.kubernetes.io/proxy-buffering"] = "on"
    assert has_drifted({**wanted, "metadata": {**metadata, "annotations": annotations}}, wanted)


def test_pods_spread_where_they_can() -> None:
    for part, manifest in deployments().items():
        constraints = manifest["spec"]["template"]["spec"]["topologySpreadConstraints"]
        keys = [constraint["topologyKey"] for constraint in constraints]
        assert keys == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
        for constraint in constraints:
            assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"
            assert constraint["labelSelector"]["matchLabels"] == service(POLICY, part)["spec"]["selector"]
            assert constraint["matchLabelKeys"] == ["pod-template-hash"]


def test_scaling_and_exposure_roll_nothing() -> None:
    exposed = {"ingress": {"host": "a.example.com"}, "allowFrom": [{"cidr": "10.0.0.0/8"}], "replicas": 3}
    before, after = deployments(), deployments(gateway=exposed, engine={"replicas": 4})
    for part in before:
        assert before[part]["spec"]["template"] == after[part]["spec"]["template"]


def test_a_slow_load_has_a_deadline_of_its_own() -> None:
    engine = deployments(engine={"startupDeadline": "1h"})["engine"]
    probe = engine["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
    assert probe["httpGet"]["path"] == "/readyz"
    assert probe["periodSeconds"] * probe["failureThreshold"] == 3600
    assert engine["spec"]["progressDeadlineSeconds"] > 3600
    default = EngineSpec().startup_deadline
    assert default == "30m"
    gateway = deployments()["gateway"]["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
    assert gateway["httpGet"]["path"] == "/healthz", "a gateway waits for engines without being restarted"


@pytest.mark.parametrize(("fields", "seconds"), [({}, 120), ({"drainDeadline": "15m"}, 900)])
def test_running_requests_may_finish_before_the_grace_period_ends(fields: dict[str, str], seconds: int) -> None:
    for manifest in deployments(**fields).values():
        pod = manifest["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        env = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert env["SIXFOLD_DRAIN_SECONDS"] == str(seconds)
        pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pod["terminationGracePeriodSeconds"] > pause + seconds


def test_priority_and_mig_slices_reach_engines_and_jobs() -> None:
    mig = "nvidia.com/mig-1g.10gb"
    engine = {"accelerator": {"type": "GPU", "resourceName": mig}, "pod": {"priorityClassName": "high"}}
    pod = deployments(engine=engine)["engine"]["spec"]["template"]["spec"]
    assert pod["priorityClassName"] == "high"
    assert pod["containers"][0]["resources"]["limits"] == {mig: "1"}
    preparation = {"pod": {"priorityClassName": "low", "resources": {"limits": {mig: "1"}}}}
    fields = {"task": "Generation", "source": {"uri": "pvc://m/c"}, "preparation": preparation}
    job = preparation_job(VARIANT, ModelVariantSpec.model_validate(fields), Inputs("pvc://m/c"), SETTINGS)
    pod = job["spec"]["template"]["spec"]
    assert pod["priorityClassName"] == "low"
    assert pod["containers"][0]["resources"]["limits"] == {mig: "1"}
