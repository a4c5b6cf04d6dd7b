"""What stands around a policy's Deployments: NetworkPolicies, PodDisruptionBudgets, Ingress and HTTPRoute."""

from __future__ import annotations

from collections.abc import Awaitable, Collection

from sixfold_api.names import CLASSIFIER, ENGINE, GATEWAY
from sixfold_operator.builders.availability import BUDGET_KIND, disruption_budget, wants_budget
from sixfold_operator.builders.common import Manifest
from sixfold_operator.builders.exposure import INGRESS_KIND, ROUTE_KIND, http_route, ingress
from sixfold_operator.builders.network import NETWORK_POLICY_KIND, network_policy
from sixfold_operator.builders.workload import components
from sixfold_operator.kube import ApiError
from sixfold_operator.reconcile.children import ForeignObjectError, is_controlled_by
from sixfold_operator.reconcile.context import Context
from sixfold_operator.reconcile.findings import Findings
from sixfold_operator.reconcile.rollout import Verdict

REFUSED = "Refused"
KIND_MISSING = (
    "this cluster doesn't serve HTTPRoute of gateway.networking.k8s.io/v1: install the Gateway API (1.2 or newer) with"
    " a controller for it, or use spec.gateway.ingress. It is tried again by itself"
)
_PARTS = (GATEWAY, ENGINE, CLASSIFIER)


async def attempt(findings: Findings, work: Awaitable[Manifest]) -> Manifest | None:
    """The child; None if it can't be written now, which then stands in the conditions."""
    try:
        return await work
    except ForeignObjectError as error:
        findings.conflicts.append(str(error))
    except ApiError as error:
        if not error.is_refusal:
            raise
        findings.refusals.append(error.message)
    return None


async def isolate(context: Context, findings: Findings) -> None:
    """NetworkPolicies, before there are pods. A classifier that is still needed keeps its own."""
    policy, spec, wanted = findings.policy, findings.spec, []
    if context.settings.network_policies:
        there = {part for part, deployment in findings.deployments.items() if deployment is not None}
        parts = [part for part in _PARTS if part in there.union(components(spec))]
        wanted = [network_policy(policy, part, spec, context.settings) for part in parts]
    for manifest in wanted:
        await attempt(findings, context.children.ensure(manifest))
    await remove_others(context, findings, NETWORK_POLICY_KIND, wanted)


async def surround(context: Context, findings: Findings) -> None:
    """Budgets of the Deployments that are there, and the ways in from outside."""
    policy, gateway = findings.policy, findings.spec.gateway
    budgets = [
        disruption_budget(policy, part)
        for part, deployment in findings.deployments.items()
        if deployment is not None and wants_budget(deployment)
    ]
    for manifest in budgets:
        await attempt(findings, context.children.ensure(manifest))
    await remove_others(context, findings, BUDGET_KIND, budgets)
    ways: dict[str, list[Manifest]] = {INGRESS_KIND: [], ROUTE_KIND: []}
    if gateway.ingress is not None:
        ways[INGRESS_KIND] = [ingress(policy, gateway, gateway.ingress, context.settings.ingress_annotations)]
    if gateway.http_route is not None:
        ways[ROUTE_KIND] = [http_route(policy, gateway.http_route)]
    for kind, wanted in ways.items():
        for manifest in wanted:
            await _expose(context, findings, manifest)
        await remove_others(context, findings, kind, wanted)


async def _expose(context: Context, findings: Findings, manifest: Manifest) -> None:
    """Whatever the API or a controller's webhook has against it: the policy serves inside the cluster all the same."""
    try:
        await context.children.ensure(manifest)
    except ForeignObjectError as error:
        findings.conflicts.append(str(error))
    except ApiError as error:
        if error.status in (0, 409):  # unreachable, or somebody wrote at the same time: the whole pass is tried again
            raise
        missing = manifest["kind"] == ROUTE_KIND and error.status == 404
        reason, message = ("GatewayAPIMissing", KIND_MISSING) if missing else (REFUSED, error.message)
        findings.unexposed.append(Verdict(False, reason, f"{manifest['kind']}: {message}"))


async def remove_others(context: Context, findings: Findings, kind: str, wanted: Collection[Manifest]) -> None:
    """Children of a kind that were once asked for."""
    metadata = findings.policy["metadata"]
    kept = {manifest["metadata"]["name"] for manifest in wanted}
    for old in context.cache.tagged(kind, metadata["namespace"], f"policy/{metadata['name']}"):
        if old["metadata"]["name"] in kept or not is_controlled_by(old, metadata["uid"]):
            continue
        try:
            await context.kube.delete(old)
        except ApiError as error:
            if not error.is_refusal:
                raise
            findings.refusals.append(error.message)
        else:
            context.cache.remove(old)  # nobody watches HTTPRoutes


def exposure_refused(findings: Findings) -> bool:
    """Whether trying again soon may help; a kind that is missing is looked for at each resync."""
    return any(verdict.reason == REFUSED for verdict in findings.unexposed)


def exposure_failed(findings: Findings) -> Verdict | None:
    """The first way in that can't be opened; with what is the matter with all of them."""
    if not findings.unexposed:
        return None
    first, *_ = findings.unexposed
    return first._replace(message="; ".join(verdict.message for verdict in findings.unexposed))
