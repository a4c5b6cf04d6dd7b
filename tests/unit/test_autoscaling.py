"""Autoscalers from specs, and when engines sleep and wake."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold_api.autoscaling import EngineAutoscalingSpec, GatewayAutoscalingSpec, Scaler
from sixfold_api.effective import effective
from sixfold_api.policy import EngineSpec, InferencePolicySpec
from sixfold_api.runtime_config import PodState, Role
from sixfold_operator.builders.autoscaling import KEDA_KIND, autoscaler, scaler
from sixfold_operator.builders.workload import SCALED_BY_ANNOTATION, engine_deployment, surges
from sixfold_operator.reconcile.sleep import look_seconds, wanted_replicas
from sixfold_operator.settings import OperatorSettings

POLICY = {
    "apiVersion": "sixfold.dev/v1alpha1",
    "kind": "InferencePolicy",
    "metadata": {"name": "bot", "namespace": "ns", "uid": "u1"},
}
URL = "http://prometheus:9090"


def load(**fields: Any) -> EngineAutoscalingSpec:
    return EngineAutoscalingSpec.model_validate({"maxReplicas": 4, "cpuPercent": 80, **fields})


def gateway(idle_seconds: float | None) -> PodState:
    return PodState(role=Role.GATEWAY, pod="g", ready=True, sequence=1, level=3, idle_seconds=idle_seconds)


def test_an_hpa_scales_the_deployment_by_cpu_and_by_waiting_requests() -> None:
    manifest = autoscaler(POLICY, "engine", load(queuedRequests=8, minReplicas=2), Scaler.HPA, "")
    assert manifest["apiVersion"] == "autoscaling/v2"
    assert manifest["spec"]["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "bot-engine"}
    assert (manifest["spec"]["minReplicas"], manifest["spec"]["maxReplicas"]) == (2, 4)
    cpu, waiting = manifest["spec"]["metrics"]
    assert cpu["resource"]["target"]["averageUtilization"] == 80
    assert waiting["pods"]["metric"]["name"] == "sixfold_requests_waiting"
    assert waiting["pods"]["target"]["averageValue"] == "8"


def test_an_hpa_rests_at_no_pod_and_never_goes_there_itself() -> None:
    assert autoscaler(POLICY, "engine", load(minReplicas=0), Scaler.HPA, "")["spec"]["minReplicas"] == 1


def test_keda_wakes_for_whoever_waits_and_counts_what_waits() -> None:
    spec = load(minReplicas=0, idleAfter="5m", queuedRequests=8)
    manifest = autoscaler(POLICY, "engine", spec, Scaler.KEDA, URL)
    assert manifest["spec"]["scaleTargetRef"] == {"name": "bot-engine"}
    assert (manifest["spec"]["minReplicaCount"], manifest["spec"]["cooldownPeriod"]) == (0, 300)
    cpu, waiting, asked = manifest["spec"]["triggers"]
    assert cpu["type"] == "cpu"
    assert waiting["metadata"]["threshold"] == "8"
    assert 'sixfold_gateway_waiting{namespace="ns",policy="bot"}' in asked["metadata"]["query"]
    assert {trigger["metadata"]["serverAddress"] for trigger in (waiting, asked)} == {URL}


@pytest.mark.parametrize(
    "asked, kinds, url, expected",
    [
        ("Auto", {KEDA_KIND}, URL, Scaler.KEDA),
        ("Auto", {KEDA_KIND}, "", Scaler.HPA),
        ("Auto", set(), URL, Scaler.HPA),
        ("HPA", {KEDA_KIND}, URL, Scaler.HPA),
        ("KEDA", set(), "", Scaler.KEDA),
    ],
)
def test_auto_takes_keda_where_it_can(asked: str, kinds: set[str], url: str, expected: Scaler) -> None:
    assert scaler(load(scaler=asked), kinds, url) is expected


def test_gateways_are_scaled_by_cpu() -> None:
    spec = GatewayAutoscalingSpec.model_validate({"minReplicas": 2, "maxReplicas": 6}).as_load()
    manifest = autoscaler(POLICY, "gateway", spec, Scaler.HPA, "")
    assert manifest["metadata"]["name"] == "bot-gateway"
    assert [entry["type"] for entry in manifest["spec"]["metrics"]] == ["Resource"]


def test_replicas_are_left_alone() -> None:
    engine = EngineSpec.model_validate({"autoscaling": {"maxReplicas": 4, "cpuPercent": 80}})
    settings = OperatorSettings(runtime_image="registry.example/runtime:1")
    manifest = engine_deployment(POLICY, "engine", engine, [], ["models"], settings)
    assert "replicas" not in manifest["spec"]
    assert SCALED_BY_ANNOTATION in manifest["metadata"]["annotations"]


def test_several_gpus_that_are_scaled_dont_surge() -> None:
    assert surges(EngineSpec.model_validate({"autoscaling": {"maxReplicas": 4, "cpuPercent": 80}}))
    assert not surges(
        EngineSpec.model_validate({"autoscaling": {"minReplicas": 2, "maxReplicas": 4, "cpuPercent": 80}})
    )


def test_only_policies_whose_engines_may_sleep_hold_requests() -> None:
    def config(**engine: Any) -> bool:
        spec = {"generation": {"variantRef": {"name": "chat"}}, "engine": engine}
        return effective(InferencePolicySpec.model_validate(spec)).config.may_sleep

    assert not config()
    assert not config(autoscaling={"maxReplicas": 4, "cpuPercent": 80})
    assert config(autoscaling={"minReplicas": 0, "maxReplicas": 4, "cpuPercent": 80})


def test_each_of_the_gateways_that_there_are_has_its_share() -> None:
    spec = InferencePolicySpec.model_validate(
        {
            "generation": {"variantRef": {"name": "chat"}},
            "gateway": {
                "autoscaling": {"maxReplicas": 8},
                "rateLimit": {"requestsPerSecond": 40, "burst": 9},
            },
        }
    )
    share = effective(spec, gateways=4).config.rate_limit
    assert share is not None and (share.requests_per_second, share.burst) == (10, 3)


SLEEPER = load(minReplicas=0, idleAfter="1m")


@pytest.mark.parametrize(
    "replicas, gateways, idle, expected",
    [
        (2, 1, [61.0], 0),
        (2, 1, [59.0], 2),
        (2, 2, [61.0, 0.0], 2),
        (2, 2, [61.0], 2),  # one gateway says nothing: it may have a request
        (2, 1, [None], 2),  # an older image
        (2, 0, [], 2),
        (0, 1, [5.0], 0),
        (0, 2, [5.0, 0.0], 1),
        (0, 2, [0.0], 1),
        (0, 0, [], 0),
    ],
)
def test_when_engines_sleep_and_wake(replicas: int, gateways: int, idle: list[float | None], expected: int) -> None:
    assert wanted_replicas(SLEEPER, replicas, gateways, map(gateway, idle)) == expected


@given(
    st.integers(0, 9),
    st.integers(0, 4),
    st.lists(st.one_of(st.none(), st.floats(0, 1e6, allow_nan=False)), max_size=4),
)
def test_nothing_else_ever_changes_the_number(replicas: int, gateways: int, idle: list[float | None]) -> None:
    states = list(map(gateway, idle))
    assert wanted_replicas(load(), replicas, gateways, states) == replicas
    target = wanted_replicas(SLEEPER, replicas, gateways, states)
    assert target in ({replicas, 0} if replicas else {0, 1})
    if 0.0 in idle:
        assert target > 0


def test_gateways_are_asked_often_while_engines_sleep() -> None:
    assert look_seconds(SLEEPER, 0) < look_seconds(SLEEPER, 1) <= SLEEPER.idle_seconds / 4
