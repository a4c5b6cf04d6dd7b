"""Which other variants a preparation begins with, and whether they can be used yet. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sixfold_api.scalars import Task
from sixfold_api.variant import CLAIM_SCHEME, ArtifactStatus, ModelVariantSpec
from sixfold_operator.builders.common import Manifest
from sixfold_operator.builders.job import Inputs
from sixfold_operator.reconcile.rollout import Verdict, condition

Find = Callable[[str], Manifest | None]
"""The variant of a name in the namespace at hand."""


def required_variants(spec: ModelVariantSpec) -> list[str]:
    """Names of the variants that must be Ready before this one's Job can start."""
    return [ref.name for ref in (spec.source.variant_ref, spec.draft_for) if ref is not None]


def find_inputs(name: str, spec: ModelVariantSpec, variant: Find) -> Inputs | Verdict:
    """The addresses of what variant `name` is made from, or what it waits for."""
    for needed in required_variants(spec):
        problem = variant_problem(variant(needed), needed, spec.task)
        if problem is None:
            continue
        if needed == name or _leads_to(name, needed, variant):
            message = f"ModelVariant {name} needs {needed}, which needs {name}: neither can be prepared first"
            return Verdict(False, "VariantCycle", message)
        return problem._replace(message=f"{problem.message}. The preparation starts when it is")
    source, target = spec.source.variant_ref, spec.draft_for
    return Inputs(
        source=spec.source.uri or "" if source is None else _address(variant(source.name)),
        target="" if target is None else _address(variant(target.name)),
    )


def variant_problem(variant: Manifest | None, name: str, *tasks: Task) -> Verdict | None:
    """Why the weights of a variant can't be used for one of the tasks; None if they can."""
    if variant is None or "deletionTimestamp" in variant["metadata"]:
        return Verdict(False, "VariantMissing", f"ModelVariant {name} doesn't exist in this namespace")
    has = variant["spec"]["task"]
    if has not in tasks:
        needed = " or ".join(tasks)
        return Verdict(False, "WrongTask", f"ModelVariant {name} has task {has}; {needed} is needed here")
    ready = condition(variant, "Ready")
    if ready.get("status") != "True" or "artifact" not in variant["status"]:
        why = f"{ready['reason']}: {ready.get('message', '')}" if ready else "not looked at yet"
        return Verdict(False, "VariantNotReady", f"ModelVariant {name} is not ready ({why})")
    return None


def _address(variant: Manifest | None) -> str:
    artifact = ArtifactStatus.model_validate((variant or {})["status"]["artifact"])
    return f"{CLAIM_SCHEME}{artifact.claim_name}/{artifact.path}"


def _leads_to(goal: str, name: str, variant: Find) -> bool:
    """Whether `goal` stands among what variant `name` needs, however far."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        found = variant(waiting.pop())
        needed = set(_references(found["spec"])) - seen if found is not None else set()
        seen |= needed
        waiting += needed
    return goal in seen


def _references(spec: Manifest) -> Iterable[str]:
    """As `required_variants`, of a spec as it lies in the API."""
    references = (spec.get("source", {}).get("variantRef"), spec.get("draftFor"))
    return (reference["name"] for reference in references if reference is not None)
