"""Which models each component serves, or why that isn't known yet. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from sixfold_api.generation import GenerationSpec
from sixfold_api.modes import Mode
from sixfold_api.names import CLASSIFIER, ENGINE, claim_path
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.precision import Scheme
from sixfold_api.runtime_config import Draft, ServedModel, WeightSet
from sixfold_api.scalars import FullWeights, Task
from sixfold_api.variant import ArtifactStatus
from sixfold_operator.builders.common import Manifest
from sixfold_operator.reconcile.inputs import Find, variant_problem
from sixfold_operator.reconcile.rollout import Verdict, condition
from sixfold_operator.reconcile.variant_features import CLASSIFIERS, shortfalls
from sixfold_operator.reconcile.variant_quality import TOKENIZER_MISMATCH


@dataclass
class Load:
    """Models of one Deployment and the claims that hold them."""

    models: list[ServedModel] = field(default_factory=list)
    claims: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Served:
    """What the variants of a policy come to.

    Attributes:
        loads: the load of each component; None unless every variant can be served.
        verdict: VariantsReady.
        unsupported: modes that are left out, because their variant doesn't fit, with the reason.
        warnings: condition type -> what it says while it is True.
        missing_tasks: variant -> tasks that the policy offers and the variant doesn't have.
    """

    loads: dict[str, Load] | None
    verdict: Verdict
    unsupported: dict[Mode, str] = field(default_factory=dict)
    warnings: dict[str, Verdict] = field(default_factory=dict)
    missing_tasks: dict[str, set[str]] = field(default_factory=dict)


class _UnservableError(Exception):
    """A variant that can't be served; the verdict says why."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict


def resolve(spec: InferencePolicySpec, variant: Find) -> Served:
    """What each component serves. A draft that doesn't fit is left out; any other variant that can't be served
    leaves everything as it is."""
    loads: dict[str, Load] = {}
    problems: list[Verdict] = []
    found = shortfalls(spec, variant)
    unsupported = dict(found.unsupported)
    if spec.generation is not None:
        try:
            _generation(spec, spec.generation, variant, loads.setdefault(ENGINE, Load()), unsupported)
        except _UnservableError as error:
            problems.append(error.verdict)
    if spec.classification is not None:
        component = ENGINE if spec.classification.engine is None else CLASSIFIER
        name = spec.classification.variant_ref.name
        try:
            artifact = _artifact(variant, name, *CLASSIFIERS)
        except _UnservableError as error:
            problems.append(error.verdict)
        else:
            task = Task((variant(name) or {})["spec"]["task"])
            _add(loads.setdefault(component, Load()), _served(name, task, artifact), artifact)
    if problems:
        message = "; ".join(problem.message for problem in problems)
        verdict = Verdict(False, problems[0].reason, f"{message}. Pods that run already stay as they are")
        return Served(None, verdict, unsupported, found.warnings, found.missing_tasks)
    names = ", ".join(name for load in loads.values() for model in load.models for name in _names(model))
    return Served(loads, Verdict(True, "Ready", f"Verified: {names}"), unsupported, found.warnings, found.missing_tasks)


def _generation(
    spec: InferencePolicySpec, generation: GenerationSpec, variant: Find, load: Load, unsupported: dict[Mode, str]
) -> None:
    """Put the generating model into the load, and the modes that it has to do without into `unsupported`."""
    name = generation.variant_ref.name
    full = _artifact(variant, name, Task.GENERATION)
    model, artifacts = _served(name, Task.GENERATION, full), [full]
    # The draft first: that it doesn't fit holds whatever becomes of the quantised weights.
    if generation.speculative is not None:
        other = generation.speculative.draft_variant_ref.name
        mismatch = _draft_mismatch(variant(other), other, name, full)
        if mismatch is None:
            artifact = _artifact(variant, other, Task.GENERATION)
            device = generation.speculative.draft_device
            draft = Draft(name=other, path=_path(artifact), digest=artifact.digest, device=device)
            model = model.model_copy(update={"draft": draft})
            artifacts.append(artifact)
        else:
            unsupported[Mode.SPECULATIVE] = mismatch
    if generation.quantized is not None:
        other = generation.quantized.variant_ref.name
        artifact = _artifact(variant, other, Task.GENERATION)
        _require_quantized(variant(other) or {}, artifact, name, full)
        weights = WeightSet(name=other, path=_path(artifact), digest=artifact.digest)
        full_weights = spec.engine.full_weights or FullWeights.AUTO
        model = model.model_copy(update={"quantized": weights, "full_weights": full_weights})
        artifacts.append(artifact)
    _add(load, model, *artifacts)


def _require_quantized(quantized: Manifest, artifact: ArtifactStatus, full_name: str, full: ArtifactStatus) -> None:
    """Quantised weights answer in place of the full ones: they must be some, and read the same token ids."""
    name = quantized["metadata"]["name"]
    asked = quantized["spec"].get("precision", {}).get("scheme", Scheme.NONE)
    if asked == Scheme.NONE and artifact.scheme is Scheme.NONE:
        message = f"ModelVariant {name} isn't quantised; spec.generation.quantized needs one with spec.precision"
        raise _UnservableError(Verdict(False, "NotQuantized", message))
    one_model = "both must come from one model"
    if artifact.tokenizer_fingerprint != full.tokenizer_fingerprint:
        message = f"ModelVariants {name} and {full_name} have different tokenizers: {one_model}"
        raise _UnservableError(Verdict(False, TOKENIZER_MISMATCH, message))
    if artifact.vocabulary_tokens != full.vocabulary_tokens:
        sizes = f"{artifact.vocabulary_tokens} and {full.vocabulary_tokens} tokens"
        message = f"ModelVariants {name} and {full_name} have vocabularies of {sizes}: {one_model}"
        raise _UnservableError(Verdict(False, TOKENIZER_MISMATCH, message))


def _draft_mismatch(draft: Manifest | None, name: str, target_name: str, target: ArtifactStatus) -> str | None:
    """Why a draft can't draft for the target, whatever else becomes of it; None if nothing is known against it."""
    message = f"the tokenizer of the draft {name} isn't that of {target_name}; choose a draft of the same family"
    if draft is None or draft["spec"]["task"] != Task.GENERATION.value:
        return None
    ready = condition(draft, "Ready")
    is_for_target = draft["spec"].get("draftFor", {}).get("name") == target_name
    if is_for_target and ready.get("status") == "False" and ready["reason"] == TOKENIZER_MISMATCH:
        return message
    fingerprint = draft.get("status", {}).get("artifact", {}).get("tokenizerFingerprint")
    return message if fingerprint not in (None, target.tokenizer_fingerprint) else None


def _artifact(variant: Find, name: str, *tasks: Task) -> ArtifactStatus:
    """The verified weights of a variant; raises _UnservableError."""
    found = variant(name)
    problem = variant_problem(found, name, *tasks)
    if problem is not None or found is None:
        raise _UnservableError(problem or Verdict(False, "VariantMissing", name))
    return ArtifactStatus.model_validate(found["status"]["artifact"])


def _served(name: str, task: Task, artifact: ArtifactStatus) -> ServedModel:
    return ServedModel(name=name, task=task, path=_path(artifact), digest=artifact.digest)


def _path(artifact: ArtifactStatus) -> str:
    return claim_path(artifact.claim_name, artifact.path)


def _add(load: Load, model: ServedModel, *artifacts: ArtifactStatus) -> None:
    load.models.append(model)
    load.claims += [artifact.claim_name for artifact in artifacts]


def _names(model: ServedModel) -> list[str]:
    """Names of the variants in a model."""
    return [weights.name for weights in (model, model.quantized, model.draft) if weights is not None]
