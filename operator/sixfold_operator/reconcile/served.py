"""Which models each component serves, or why that isn't known yet. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sixfold_api.names import CLASSIFIER, ENGINE, claim_path
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task
from sixfold_api.variant import ArtifactStatus
from sixfold_operator.builders.common import Manifest
from sixfold_operator.reconcile.rollout import Verdict, condition


@dataclass
class Load:
    """Models of one Deployment and the claims that hold them."""

    models: list[ServedModel] = field(default_factory=list)
    claims: list[str] = field(default_factory=list)


def wanted_variants(spec: InferencePolicySpec) -> list[tuple[str, str, Task]]:
    """Component, name of the variant and task of every model that a policy asks for."""
    wanted = []
    if spec.generation is not None:
        wanted.append((ENGINE, spec.generation.variant_ref.name, Task.GENERATION))
    if spec.classification is not None:
        component = ENGINE if spec.classification.engine is None else CLASSIFIER
        wanted.append((component, spec.classification.variant_ref.name, Task.CLASSIFICATION))
    return wanted


def resolve(
    spec: InferencePolicySpec, variant: Callable[[str], Manifest | None]
) -> tuple[dict[str, Load] | None, Verdict]:
    """The load of each component and VariantsReady; no loads unless every variant can be served."""
    loads: dict[str, Load] = {}
    problems: list[Verdict] = []
    for component, name, task in wanted_variants(spec):
        found = variant(name)
        problem = _problem(found, name, task)
        if problem is not None or found is None:
            problems.append(problem or Verdict(False, "VariantMissing", name))
            continue
        artifact = ArtifactStatus.model_validate(found["status"]["artifact"])
        load = loads.setdefault(component, Load())
        path = claim_path(artifact.claim_name, artifact.path)
        load.models.append(ServedModel(name=name, task=task, path=path, digest=artifact.digest))
        load.claims.append(artifact.claim_name)
    if problems:
        message = "; ".join(problem.message for problem in problems)
        return None, Verdict(False, problems[0].reason, f"{message}. Pods that run already stay as they are")
    names = ", ".join(model.name for load in loads.values() for model in load.models)
    return loads, Verdict(True, "Ready", f"Verified: {names}")


def _problem(variant: Manifest | None, name: str, task: Task) -> Verdict | None:
    if variant is None or "deletionTimestamp" in variant["metadata"]:
        return Verdict(False, "VariantMissing", f"ModelVariant {name} doesn't exist in this namespace")
    has = variant["spec"]["task"]
    if has != task.value:
        return Verdict(False, "WrongTask", f"ModelVariant {name} has task {has}; {task.value} is needed here")
    ready = condition(variant, "Ready")
    if ready.get("status") != "True" or "artifact" not in variant["status"]:
        why = f"{ready['reason']}: {ready.get('message', '')}" if ready else "not looked at yet"
        return Verdict(False, "VariantNotReady", f"ModelVariant {name} is not ready ({why})")
    return None
