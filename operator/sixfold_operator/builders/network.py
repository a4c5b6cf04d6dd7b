"""NetworkPolicies: who may connect to the pods of a policy or a variant. Pure.

Without spec.tls a pod has one port for everything, so whoever may read an engine's metrics may also open its protocol:
engines admit the policy's gateways and those observers that the chart names (the operator, Prometheus). With it the
protocol has a port of its own, where observers aren't admitted. Gateways are admitted to both, since pods of both kinds
run side by side while a rollout turns it on or off.

Only what comes in is restricted: where pods may connect to (DNS, Redis, a hub) depends on the cluster. The kubelet's
probes come from the pod's own node, which Kubernetes always lets in.
"""

from __future__ import annotations

from sixfold_api.exposure import ClientPeer
from sixfold_api.names import (
    COMPONENT_LABEL,
    ENGINE_PORT,
    ENGINE_TLS_PORT,
    GATEWAY,
    GATEWAY_PORT,
    PREPARE,
    VARIANT_LABEL,
    component_name,
)
from sixfold_api.policy import InferencePolicySpec
from sixfold_operator.builders.common import Manifest, child, selector
from sixfold_operator.settings import OperatorSettings

NETWORK_POLICY_KIND = "NetworkPolicy"


def network_policy(policy: Manifest, component: str, spec: InferencePolicySpec, settings: OperatorSettings) -> Manifest:
    """Whom the pods of a component admit."""
    name = policy["metadata"]["name"]
    observers = settings.network_policy_observers
    if component == GATEWAY:
        clients = [_client(peer) for peer in spec.gateway.allow_from]
        rules = [_rule([GATEWAY_PORT], [*clients, *observers] if clients else [])]
    else:
        gateways = [{"podSelector": {"matchLabels": selector(name, GATEWAY)}}]
        rules = [_rule([ENGINE_PORT, ENGINE_TLS_PORT], gateways)]
        if observers:
            rules.append(_rule([ENGINE_PORT], observers))
    return _isolated(policy, component_name(name, component), selector(name, component), rules)


def _rule(ports: list[int], peers: list[Manifest]) -> Manifest:
    """Without peers it admits everybody."""
    return {"ports": [{"port": port, "protocol": "TCP"} for port in ports], **({"from": peers} if peers else {})}


def job_network_policy(variant: Manifest) -> Manifest:
    """Preparation Jobs admit nobody."""
    name = variant["metadata"]["name"]
    labels = {VARIANT_LABEL: name, COMPONENT_LABEL: PREPARE}
    return _isolated(variant, component_name(name, PREPARE), labels, [])


def _isolated(owner: Manifest, name: str, labels: dict[str, str], rules: list[Manifest]) -> Manifest:
    manifest = child(owner, "networking.k8s.io/v1", NETWORK_POLICY_KIND, name, labels)
    manifest["spec"] = {"podSelector": {"matchLabels": labels}, "policyTypes": ["Ingress"], "ingress": rules}
    return manifest


def _client(peer: ClientPeer) -> Manifest:
    if peer.cidr is not None:
        return {"ipBlock": {"cidr": peer.cidr}}
    selectors = {"namespaceSelector": peer.namespace_labels, "podSelector": peer.pod_labels}
    return {key: {"matchLabels": labels} for key, labels in selectors.items() if labels is not None}
