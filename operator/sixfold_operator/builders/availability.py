"""PodDisruptionBudgets of a policy's Deployments, and how their pods spread. Pure."""

from __future__ import annotations

from sixfold_api.names import component_name
from sixfold_operator.builders.common import Manifest, child, selector

BUDGET_KIND = "PodDisruptionBudget"
BUDGET_FROM_REPLICAS = 2


def wants_budget(deployment: Manifest) -> bool:
    """Whether drained nodes should take its pods one after the other: a lone pod would keep a node from draining.

    What counts is the number that the Deployment has, whoever set it: the policy, an autoscaler, a person.
    """
    return bool(deployment["spec"].get("replicas", 1) >= BUDGET_FROM_REPLICAS)


def disruption_budget(policy: Manifest, component: str) -> Manifest:
    """The budget of a component: at most one pod away, however many there are. Pods that aren't ready don't hold a
    node back."""
    name = policy["metadata"]["name"]
    labels = selector(name, component)
    manifest = child(policy, "policy/v1", BUDGET_KIND, component_name(name, component), labels)
    manifest["spec"] = {
        "maxUnavailable": 1,
        "selector": {"matchLabels": labels},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return manifest


def spread(policy: str, component: str) -> list[Manifest]:
    """Constraints for pods of a component: over nodes and zones where there is room, never at the price of not running.

    Each revision is spread for itself, or a rollout would end as uneven as its old pods allowed.
    """
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": selector(policy, component)},
            "matchLabelKeys": ["pod-template-hash"],
        }
        for key in ("kubernetes.io/hostname", "topology.kubernetes.io/zone")
    ]
