"""spec.engine.autoscaling and its like -> a HorizontalPodAutoscaler, or KEDA's ScaledObject. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sixfold_api.autoscaling import EngineAutoscalingSpec, Scaler
from sixfold_api.names import component_name
from sixfold_operator.builders.common import Manifest, child, selector

HPA_KIND, HPA_VERSION = "HorizontalPodAutoscaler", "autoscaling/v2"
KEDA_KIND, KEDA_VERSION = "ScaledObject", "keda.sh/v1alpha1"
SCALE_DOWN_SECONDS = 300
"""A load that fell must stay there for so long: a model that has just been dropped takes minutes to load."""
WAKES_ONLY = "1000000"
"""Threshold of a trigger that says whether there should be a pod at all, and never how many."""


def scaler(spec: EngineAutoscalingSpec, served_kinds: Collection[str], prometheus_url: str) -> Scaler:
    """HPA or KEDA, which is `Auto` where it is installed and knows where to look."""
    if spec.scaler is not Scaler.AUTO:
        return spec.scaler
    return Scaler.KEDA if KEDA_KIND in served_kinds and prometheus_url else Scaler.HPA


def autoscaler(
    policy: Manifest, component: str, spec: EngineAutoscalingSpec, kind: Scaler, prometheus_url: str
) -> Manifest:
    """What scales the component's Deployment. An HPA of engines that may sleep holds one at least: it rests while
    there is none, and the operator puts them to sleep and wakes them."""
    if kind is Scaler.KEDA:
        return _scaled_object(policy, component, spec, prometheus_url)
    manifest = _child(policy, HPA_VERSION, HPA_KIND, component)
    manifest["spec"] = {
        "scaleTargetRef": _target(policy, component, "apps/v1"),
        "minReplicas": max(1, spec.min_replicas),
        "maxReplicas": spec.max_replicas,
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": SCALE_DOWN_SECONDS}},
        "metrics": [*_cpu(spec), *_waiting(spec)],
    }
    return manifest


def _cpu(spec: EngineAutoscalingSpec) -> list[dict[str, Any]]:
    if spec.cpu_percent is None:
        return []
    target = {"type": "Utilization", "averageUtilization": spec.cpu_percent}
    return [{"type": "Resource", "resource": {"name": "cpu", "target": target}}]


def _waiting(spec: EngineAutoscalingSpec) -> list[dict[str, Any]]:
    if spec.queued_requests is None:
        return []
    target = {"type": "AverageValue", "averageValue": str(spec.queued_requests)}
    return [{"type": "Pods", "pods": {"metric": {"name": "sixfold_requests_waiting"}, "target": target}}]


def _scaled_object(policy: Manifest, component: str, spec: EngineAutoscalingSpec, prometheus_url: str) -> Manifest:
    manifest = _child(policy, KEDA_VERSION, KEDA_KIND, component)
    triggers: list[dict[str, Any]] = []
    if spec.cpu_percent is not None:
        triggers.append({"type": "cpu", "metricType": "Utilization", "metadata": {"value": str(spec.cpu_percent)}})
    if spec.queued_requests is not None:
        triggers.append(_prometheus(prometheus_url, waiting_query(policy), str(spec.queued_requests)))
    if spec.may_sleep:
        triggers.append(_prometheus(prometheus_url, asked_query(policy), WAKES_ONLY))
    manifest["spec"] = {
        "scaleTargetRef": {"name": component_name(policy["metadata"]["name"], component)},
        "minReplicaCount": spec.min_replicas,
        "maxReplicaCount": spec.max_replicas,
        "cooldownPeriod": int(spec.idle_seconds),
        "triggers": triggers,
    }
    return manifest


def _prometheus(url: str, query: str, threshold: str) -> dict[str, Any]:
    return {"type": "prometheus", "metadata": {"serverAddress": url, "query": query, "threshold": threshold}}


def waiting_query(policy: Manifest) -> str:
    """PromQL: requests of the policy that wait, wherever they do."""
    return _sum(policy, "sixfold_requests_waiting", "sixfold_gateway_queue", "sixfold_gateway_waiting")


def asked_query(policy: Manifest) -> str:
    """PromQL: over 0 while requests wait or run, and for a while after one."""
    lately = f"(sum(increase(sixfold_requests_total{_where(policy)}[5m])) or vector(0))"
    return f"{_sum(policy, 'sixfold_gateway_waiting', 'sixfold_requests_running')} + {lately}"


def _sum(policy: Manifest, *gauges: str) -> str:
    return " + ".join(f"(sum({gauge}{_where(policy)}) or vector(0))" for gauge in gauges)


def _where(policy: Manifest) -> str:
    return f'{{namespace="{policy["metadata"]["namespace"]}",policy="{policy["metadata"]["name"]}"}}'


def _child(policy: Manifest, api_version: str, kind: str, component: str) -> Manifest:
    name = policy["metadata"]["name"]
    return child(policy, api_version, kind, component_name(name, component), selector(name, component))


def _target(policy: Manifest, component: str, api_version: str) -> Manifest:
    name = component_name(policy["metadata"]["name"], component)
    return {"apiVersion": api_version, "kind": "Deployment", "name": name}
