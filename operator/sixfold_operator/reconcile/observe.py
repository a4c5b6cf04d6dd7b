"""One look at a policy: its pods, Deployments, variants and tickets, and what is decided from them. No I/O."""

from __future__ import annotations

from dataclasses import replace

from sixfold_api.effective import Effective, effective
from sixfold_api.names import CLASSIFIER, COMPONENT_LABEL, ENGINE, GATEWAY, VARIANT_KIND, component_name
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.runtime_config import CanaryConfig
from sixfold_operator.builders.common import Manifest
from sixfold_operator.cache import Cache
from sixfold_operator.control.levels import ArmInputs, effective_inputs
from sixfold_operator.reconcile.config_rollout import reach
from sixfold_operator.reconcile.decided import Decided
from sixfold_operator.reconcile.decisions import Decider
from sixfold_operator.reconcile.findings import Findings
from sixfold_operator.reconcile.rollout import is_leaving, is_ready
from sixfold_operator.reconcile.served import Load, resolve
from sixfold_operator.reconcile.tickets import existing_tickets


def observe(
    cache: Cache, decider: Decider, policy: Manifest, spec: InferencePolicySpec
) -> tuple[Findings, dict[str, Load] | None]:
    """What is known of a policy, with what the control loop makes of it; and what each component serves, None where
    that isn't known."""
    namespace, name = policy["metadata"]["namespace"], policy["metadata"]["name"]
    pods: dict[str, list[Manifest]] = {}
    for pod in cache.tagged("Pod", namespace, f"policy/{name}"):
        if not is_leaving(pod):
            pods.setdefault(pod["metadata"]["labels"].get(COMPONENT_LABEL, ""), []).append(pod)
    deployments = {
        part: cache.get("Deployment", namespace, component_name(name, part)) for part in (GATEWAY, ENGINE, CLASSIFIER)
    }

    def variant(variant_name: str) -> Manifest | None:
        return cache.get(VARIANT_KIND, namespace, variant_name)

    served = resolve(spec, variant)
    tickets = existing_tickets(cache, policy)
    working = {part: sum(map(is_ready, pods.get(part, ()))) for part in (ENGINE, CLASSIFIER)}
    decided = decider.decide(policy, spec, served.unsupported, variant, tickets, working)
    stable, canary = effective_inputs(decided.state, decided.view)

    def of(arm: ArmInputs) -> Effective:
        return effective(
            spec,
            arm.target,
            served.unsupported,
            tuned=arm.tuned,
            suspended=arm.suspended,
            gateways=_scaled_gateways(spec, deployments[GATEWAY]),
        )

    found = of(stable)
    findings = Findings(
        policy=policy,
        spec=spec,
        effective=found,
        reach=reach([], {}, 0),
        variants=served.verdict,
        deployments=deployments,
        pods=pods,
        states={},
        decided=replace(decided, state=replace(decided.state, tuned=found.tuned)),
        canary=None if canary is None else _canary(spec, decided, of(canary)),
        warnings=served.warnings,
        missing_tasks=served.missing_tasks,
    )
    return findings, served.loads


def _scaled_gateways(spec: InferencePolicySpec, gateway: Manifest | None) -> int | None:
    """How many gateways an autoscaler wants; None where the spec says it."""
    if spec.gateway.autoscaling is None or gateway is None:
        return None
    return max(1, int(gateway["spec"].get("replicas", 1)))


def _canary(spec: InferencePolicySpec, decided: Decided, found: Effective) -> CanaryConfig | None:
    canary = decided.state.canary
    if canary is None or spec.canary is None:
        return None
    return CanaryConfig(percent=canary.percent, hash_by=spec.canary.hash_by, config=found.config)
