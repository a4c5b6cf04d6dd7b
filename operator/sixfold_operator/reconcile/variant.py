"""Reconciling a ModelVariant: observe -> plan -> apply."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pydantic import ValidationError

from sixfold_api.names import VARIANT_KIND
from sixfold_api.variant import ModelVariantSpec, ModelVariantStatus
from sixfold_operator.builders.common import Manifest
from sixfold_operator.builders.job import Inputs, bare_job, claims, job_name, preparation_job
from sixfold_operator.builders.network import NETWORK_POLICY_KIND, job_network_policy
from sixfold_operator.kube import ApiError
from sixfold_operator.reconcile.children import ForeignObjectError, controller, is_controlled_by
from sixfold_operator.reconcile.context import Context
from sixfold_operator.reconcile.inputs import find_inputs
from sixfold_operator.reconcile.rollout import Verdict, last_status
from sixfold_operator.reconcile.status_writer import transition_notes, write_status
from sixfold_operator.reconcile.variant_plan import VariantPlan, plan, recorded, status_of

REFUSED_RETRY_SECONDS = 10.0
NOTED = ("Prepared", "WithinBudget", "DraftCompatible", "ExitsCalibrated")
"""Conditions whose changes are told in Events."""


async def reconcile_variant(
    context: Context, namespace: str, name: str, changed: Callable[[Manifest], None]
) -> float | None:
    """One pass; returns after how many seconds to look again, or None. Raises ApiError.

    `changed` hears of a status that was written: policies wait for it, and the watch event is no news by then.
    """
    variant = context.cache.get(VARIANT_KIND, namespace, name)
    if variant is None or "deletionTimestamp" in variant["metadata"]:
        return None
    try:
        spec = ModelVariantSpec.model_validate(variant["spec"])
    except ValidationError as error:
        before = last_status(ModelVariantStatus, variant)
        verdict = Verdict(False, "InvalidSpec", f"This operator can't read the spec; nothing is changed. {error}")
        step = recorded(before, verdict)
    else:
        step = await _try_step(context, variant, spec)
    if await _write(context, variant, step):
        changed(variant)
    return step.again_seconds


async def _try_step(context: Context, variant: Manifest, spec: ModelVariantSpec) -> VariantPlan:
    """What was done, or what the API and foreign objects have against it."""
    try:
        return await _carry_out(context, variant, spec)
    except ForeignObjectError as error:
        return VariantPlan(Verdict(False, "Conflict", str(error)), again_seconds=REFUSED_RETRY_SECONDS)
    except ApiError as error:
        if not error.is_refusal:
            raise
        verdict = Verdict(False, "JobRefused", f"The API refused the preparation Job or its network: {error.message}")
        return VariantPlan(verdict, again_seconds=REFUSED_RETRY_SECONDS)


async def _carry_out(context: Context, variant: Manifest, spec: ModelVariantSpec) -> VariantPlan:
    """Plan on what is there, and do it."""
    namespace, name, uid = (variant["metadata"][key] for key in ("namespace", "name", "uid"))
    await _isolate(context, variant)
    prepared = last_status(ModelVariantStatus, variant).artifact is not None
    job = None if prepared else await context.children.find(bare_job(variant, spec))
    pods = _pods_of(context, variant, job) if job is not None else []
    inputs = find_inputs(name, spec, lambda other: context.cache.get(VARIANT_KIND, namespace, other))
    missing: list[str] = []
    if not prepared and job is None and isinstance(inputs, Inputs):
        missing = await _missing_claims(context, namespace, claims(spec, inputs))
    step = plan(variant, spec, job, pods, inputs, missing, context.clock.now())
    if step.create_job and isinstance(inputs, Inputs):
        await context.children.ensure(preparation_job(variant, spec, inputs, context.settings))
    if step.discard_job and job is not None:
        await context.kube.delete(job)
    if not prepared:
        for old in context.cache.tagged("Job", namespace, f"variant/{name}"):
            if is_controlled_by(old, uid) and old["metadata"]["name"] != job_name(variant, spec):
                await context.kube.delete(old)
    return step


async def _isolate(context: Context, variant: Manifest) -> None:
    """The NetworkPolicy of the Job's pods, before there are any; it goes where none are wanted any more."""
    metadata = variant["metadata"]
    if context.settings.network_policies:
        await context.children.ensure(job_network_policy(variant))
        return
    for old in context.cache.tagged(NETWORK_POLICY_KIND, metadata["namespace"], f"variant/{metadata['name']}"):
        if is_controlled_by(old, metadata["uid"]):
            await context.kube.delete(old)


def _pods_of(context: Context, variant: Manifest, job: Manifest) -> list[Manifest]:
    """The pods that this Job made, oldest first."""
    tag = f"variant/{variant['metadata']['name']}"
    pods = [
        pod
        for pod in context.cache.tagged("Pod", variant["metadata"]["namespace"], tag)
        if (controller(pod) or {}).get("uid") == job["metadata"]["uid"]
    ]
    return sorted(pods, key=lambda pod: pod["metadata"]["creationTimestamp"])


async def _missing_claims(context: Context, namespace: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if await context.kube.get("PersistentVolumeClaim", namespace, name) is None]


async def _write(context: Context, variant: Manifest, step: VariantPlan) -> bool:
    status = status_of(step, variant, context.clock.now())
    before = last_status(ModelVariantStatus, variant)
    notes = transition_notes(before.conditions, status.conditions, NOTED)
    return await write_status(context, variant, status, notes)
