"""What a policy asks of its variants beside weights: exits and tasks -> modes that can't run, and warnings. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from sixfold_api.classification import EarlyExitSpec, ExitRule
from sixfold_api.exit_heads import ExitHeads
from sixfold_api.modes import Mode
from sixfold_api.policy import ClassificationSpec, InferencePolicySpec
from sixfold_api.scalars import Task
from sixfold_api.subgraphs import SubgraphsSpec
from sixfold_api.variant import ModelVariantStatus
from sixfold_operator.builders.common import Manifest
from sixfold_operator.reconcile.inputs import Find, variant_problem
from sixfold_operator.reconcile.rollout import Verdict, last_status

CLASSIFIERS = (Task.CLASSIFICATION, Task.TOKEN_CLASSIFICATION)
NAMES_SHOWN = 12


@dataclass(frozen=True)
class Shortfalls:
    """What a policy has to do without, though it is served.

    Attributes:
        unsupported: modes that don't run, with the reason.
        warnings: condition type -> what it says while it is True.
        missing_tasks: variant -> tasks that the policy offers and the variant doesn't have.
    """

    unsupported: dict[Mode, str] = field(default_factory=dict)
    warnings: dict[str, Verdict] = field(default_factory=dict)
    missing_tasks: dict[str, set[str]] = field(default_factory=dict)


def shortfalls(spec: InferencePolicySpec, variant: Find) -> Shortfalls:
    """Of the variants that can be served; of the others nothing is known yet."""
    found = Shortfalls()
    classification, generation = spec.classification, spec.generation
    lacking: list[str] = []
    offered = 0
    if classification is not None:
        name = classification.variant_ref.name
        manifest = variant(name)
        if manifest is not None and variant_problem(manifest, name, *CLASSIFIERS) is None:
            _classifier(classification, manifest, found)
            if classification.subgraphs is not None:
                offered += _tasks("classification", classification.subgraphs, manifest, found, lacking)
    if generation is not None and generation.subgraphs is not None:
        name = generation.variant_ref.name
        manifest = variant(name)
        if manifest is not None and variant_problem(manifest, name, Task.GENERATION) is None:
            offered += _tasks("generation", generation.subgraphs, manifest, found, lacking)
    if lacking:
        message = f"{'; '.join(lacking)}. Make a ModelVariant that has them among its slices, or remove them here"
        found.warnings["TasksMissing"] = Verdict(False, "NoSuchSlice", message)
        if not offered:
            found.unsupported[Mode.SUBGRAPHS] = lacking[0]
    return found


def _classifier(classification: ClassificationSpec, variant: Manifest, found: Shortfalls) -> None:
    name, task = variant["metadata"]["name"], Task(variant["spec"]["task"])
    status = last_status(ModelVariantStatus, variant)
    if classification.early_exit is not None:
        problem = _exits_problem(classification.early_exit, variant, status)
        if problem is not None:
            found.unsupported[Mode.EARLY_EXIT] = f"ModelVariant {name} {problem}"
    tasks = {slice_.task for slice_ in status.slices if slice_.name in _names(classification.subgraphs)}
    if classification.escalate is not None and Task.CLASSIFICATION not in {task, *tasks}:
        message = f"ModelVariant {name} labels tokens, so no text is escalated: remove classification.escalate"
        found.warnings["EscalationUnused"] = Verdict(False, "LabelsTokens", message)


def _exits_problem(early_exit: EarlyExitSpec, variant: Manifest, status: ModelVariantStatus) -> str | None:
    """Why no text can exit; None if nothing is known against it."""
    if variant["spec"]["task"] != Task.CLASSIFICATION:
        return "labels tokens; exits are for task: Classification"
    if status.exits is None:
        return "has no exit heads: make one with exitHeads, and point classification.variantRef to it"
    if early_exit.length_relaxation is not None:
        return None
    if early_exit.rule is ExitRule.QUANTILE and not status.exits.quantile.lets_texts_exit:
        return "has no exit by the rule Quantile"
    default = ExitHeads.model_fields["max_disagreement"].default
    budget = float(variant["spec"].get("exitHeads", {}).get("maxDisagreement", default))
    asked = budget if early_exit.max_disagreement is None else float(early_exit.max_disagreement)
    if early_exit.rule is ExitRule.CALIBRATED and asked <= budget and not status.exits.calibrated.lets_texts_exit:
        return f"has no exit that disagrees with the full model in at most {asked:g} of the texts: allow more, or none"
    return None


def _tasks(block: str, subgraphs: SubgraphsSpec, variant: Manifest, found: Shortfalls, lacking: list[str]) -> int:
    """How many of the tasks the variant has; a sentence about those that it lacks goes to `lacking`."""
    has = {entry.name for entry in last_status(ModelVariantStatus, variant).slices}
    asked, owner = _names(subgraphs), variant["metadata"]["name"]
    missing = [name for name in asked if name not in has]
    if missing:
        there = f"it has {_listed(sorted(has))}" if has else "it has none"
        lacking.append(f"{block}.subgraphs: ModelVariant {owner} has no slice for {_listed(missing)}; {there}")
        found.missing_tasks[owner] = set(missing)
    return len(asked) - len(missing)


def _names(subgraphs: SubgraphsSpec | None) -> Sequence[str]:
    return () if subgraphs is None else [task.name for task in subgraphs.tasks]


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown} and {len(names) - NAMES_SHOWN} more"
