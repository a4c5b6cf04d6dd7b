"""NetworkPolicies: who may connect to the pods of a policy or a variant. Pure.

Without spec.tls a pod has one port for everything, so whoever may read an engine's metrics may also open its protocol:
engines admit the policy's gateways and those observers that the chart names (the operator, Prometheus). With it the
protocol has a port of its own, for gateways only, and observers get the other one. Only what comes in is
restricted: where pods may connect to (DNS, Redis, a hub) depends on the cluster. The kubelet's probes come from the
pod's own node, which Kubernetes always lets in.
"""

from __future__ import annotations

from sixfold_api.exposure import ClientPeer
from sixfold_api.names import COMPONENT_LABEL, ENGINE_TLS_PORT, GATEWAY, PREPARE, VARIANT_LABEL, component_name
from sixfold_api.policy import InferencePolicySpec
from sixfold_operator.builders.common import Manifest, child, selector
from sixfold_operator.builders.workload import PORTS
from sixfold_operator.settings import OperatorSettings

NETWORK_POLICY_KIND = "NetworkPolicy"


def network_policy(policy: Manifest, component: str, spec: InferencePolicySpec, settings: OperatorSettings) -> Manifest:
    """Whom the pods of a component admit."""
    name = policy["metadata"]["name"]
    peers: list[Manifest]
    if component == GATEWAY:
        peers = [_client(peer) for peer in spec.gateway.allow_from]
    else:
        peers = [{"podSelector": {"matchLabels": selector(name, GATEWAY)}}]
    observers = list(settings.network_policy_observers)
    rules = [_rule(PORTS[component], [*peers, *observers] if peers else [])]
    if component != GATEWAY and spec.tls is not None:
        rules = [_rule(ENGINE_TLS_PORT, peers), *([_rule(PORTS[component], observers)] if observers else [])]
    return _isolated(policy, component_name(name, component), selector(name, component), rules)


def _rule(port: int, peers: list[Manifest]) -> Manifest:
    """Without peers it admits everybody."""
    return {"ports": [{"port": port, "protocol": "TCP"}], **({"from": peers} if peers else {})}


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
