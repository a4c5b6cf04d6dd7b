"""Who decides how many pods there are: autoscalers as children, the hand-over of `replicas`, and engines that sleep."""

from __future__ import annotations

import logging

from sixfold_api.autoscaling import EngineAutoscalingSpec, Scaler
from sixfold_api.names import CLASSIFIER, ENGINE, GATEWAY
from sixfold_api.policy import InferencePolicySpec
from sixfold_operator.builders.autoscaling import HPA_KIND, KEDA_KIND, autoscaler, scaler
from sixfold_operator.builders.common import Manifest
from sixfold_operator.builders.workload import SCALED_BY_ANNOTATION, components
from sixfold_operator.kube import REPLICAS_MANAGER, ApiError
from sixfold_operator.reconcile.children import is_controlled_by
from sixfold_operator.reconcile.context import Context
from sixfold_operator.reconcile.findings import Findings
from sixfold_operator.reconcile.rollout import Verdict, is_running
from sixfold_operator.reconcile.sleep import look_seconds, wanted_replicas
from sixfold_operator.reconcile.surroundings import attempt, remove_others

KEDA_MISSING = (
    "this cluster doesn't serve ScaledObject of keda.sh/v1alpha1, so the number of pods stays as it is: install KEDA,"
    " or set autoscaling.scaler to HPA or Auto. It is looked for again by itself"
)
log = logging.getLogger(__name__)


def load_of(spec: InferencePolicySpec, part: str) -> EngineAutoscalingSpec | None:
    """By what load a component is scaled; None where its number of pods is in the spec."""
    if part == GATEWAY:
        return None if spec.gateway.autoscaling is None else spec.gateway.autoscaling.as_load()
    if part == CLASSIFIER:
        own = spec.classification and spec.classification.engine
        return own.autoscaling if own else None
    return spec.engine.autoscaling


async def autoscale(context: Context, findings: Findings) -> None:
    """Autoscalers of the Deployments that are there; those that are no longer asked for go."""
    policy, spec, url = findings.policy, findings.spec, context.settings.prometheus_url
    wanted: dict[str, list[Manifest]] = {HPA_KIND: [], KEDA_KIND: []}
    for part in components(spec):
        load = load_of(spec, part)
        if load is not None and _own(findings, part) is not None:
            manifest = autoscaler(policy, part, load, scaler(load, context.served_kinds, url), url)
            wanted[manifest["kind"]].append(manifest)
    for kind, manifests in wanted.items():
        for manifest in manifests:
            if kind == KEDA_KIND and kind not in context.served_kinds:
                findings.unscaled = Verdict(False, "KEDAMissing", KEDA_MISSING)
            else:
                await attempt(findings, context.children.ensure(manifest))
        await remove_others(context, findings, kind, manifests)


async def ensure_deployment(context: Context, wanted: Manifest) -> Manifest:
    """As Children.ensure. Before `replicas` is left out for the first time, its number gets another owner: the API
    would set it to one."""
    if "replicas" not in wanted["spec"]:
        live = await context.children.find(wanted)
        if live is not None and SCALED_BY_ANNOTATION not in live["metadata"].get("annotations", {}):
            await _set_replicas(context, live, live["spec"].get("replicas", 1))
    return await context.children.ensure(wanted)


async def sleep_or_wake(context: Context, findings: Findings) -> float | None:
    """Take engines away that nobody asks, and bring them back when somebody does. Returns after how many seconds to ask
    the gateways again; None where no engine may sleep."""
    waits, metadata = [], findings.policy["metadata"]
    gateways = sum(map(is_running, findings.pods.get(GATEWAY, ())))
    for part in (ENGINE, CLASSIFIER):
        load, live = load_of(findings.spec, part), _own(findings, part)
        if load is None or live is None or not load.may_sleep:
            continue
        if scaler(load, context.served_kinds, context.settings.prometheus_url) is Scaler.KEDA:
            continue  # which does it itself
        replicas = live["spec"].get("replicas", 1)
        target = wanted_replicas(load, replicas, gateways, findings.states.values())
        if target != replicas:
            what = "woken by a request" if target else "put to sleep: nobody asks"
            log.info("%s: %s", part, what, extra={"fields": {key: metadata[key] for key in ("namespace", "name")}})
            await _set_replicas(context, live, target)
        waits.append(look_seconds(load, target))
    return min(waits, default=None)


def _own(findings: Findings, part: str) -> Manifest | None:
    """The component's Deployment, unless it is somebody else's: then its number of pods is too."""
    live = findings.deployments.get(part)
    return live if live is not None and is_controlled_by(live, findings.policy["metadata"]["uid"]) else None


async def _set_replicas(context: Context, live: Manifest, replicas: int) -> None:
    metadata = {key: live["metadata"][key] for key in ("name", "namespace", "uid")}
    manifest = {
        "apiVersion": live["apiVersion"],
        "kind": live["kind"],
        "metadata": metadata,
        "spec": {"replicas": replicas},
    }
    try:
        changed = await context.kube.apply(manifest, force=True, manager=REPLICAS_MANAGER)
    except ApiError as error:
        if error.status != 404:
            raise
    else:
        context.cache.put(changed, written=("metadata", "spec"))
