"""What engine pods say about their weights -> the policy's status. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from sixfold_api.modes import Mode
from sixfold_api.policy import EngineStatus
from sixfold_api.runtime_config import ModelState, PodState
from sixfold_api.scalars import FullWeights
from sixfold_operator.reconcile.findings import Findings
from sixfold_operator.reconcile.rollout import Verdict


def full_weights(findings: Findings, before: EngineStatus | None) -> FullWeights | None:
    """Where full weights are meanwhile, as the pods decided; Swap if a single one has no room for both sets.

    What the pods said last stands while none answers; None for a policy without quantised weights.
    """
    generation = findings.spec.generation
    if generation is None or generation.quantized is None:
        return None
    told = {model.full_weights for _, model in _models(findings) if model.full_weights is not None}
    if not told:
        return before.full_weights if before is not None else None
    return FullWeights.SWAP if FullWeights.SWAP in told else FullWeights.RESIDENT


def weights_failed(findings: Findings) -> Verdict | None:
    """The first pod that couldn't load the weights that the level asks for."""
    for state, model in _models(findings):
        if model.weights_error:
            went_on = f"; {model.weights} goes on answering" if model.weights else ""
            return Verdict(False, "LoadFailed", f"pod {state.pod}: {model.name}: {model.weights_error}{went_on}")
    return None


def draft_shortened(findings: Findings) -> Verdict | None:
    """The first pod that drafts less than the policy allows."""
    for state, model in _models(findings):
        if model.draft_shortened:
            return Verdict(False, "MemoryShort", f"pod {state.pod}: {model.name}: {model.draft_shortened}")
    return None


def slices_failed(findings: Findings) -> Verdict | None:
    """The first pod that can't serve a task whose slice the variant has; TasksMissing tells of the others."""
    for state, model in _models(findings):
        missing = findings.missing_tasks.get(model.name, ())
        failed = [entry for entry in sorted(model.slice_errors.items()) if entry[0] not in missing]
        if failed:
            told = "; ".join(f"{task}: {reason}" for task, reason in failed)
            return Verdict(False, "LoadFailed", f"pod {state.pod}: {model.name}: {told}")
    return None


def weights_under_way(findings: Findings) -> bool:
    """Whether a pod still answers with other weights than the level asks for, or complains: it is asked again."""
    generation = findings.spec.generation
    if weights_failed(findings) or slices_failed(findings) or draft_shortened(findings):
        return True
    if generation is None or generation.quantized is None:
        return False
    active = findings.effective.config.is_active(Mode.QUANTIZED)
    wanted = generation.quantized.variant_ref.name if active else generation.variant_ref.name
    return any(
        model.name == generation.variant_ref.name and model.weights not in ("", wanted)
        for _, model in _models(findings)
    )


def _models(findings: Findings) -> Iterator[tuple[PodState, ModelState]]:
    for _, state in sorted(findings.states.items()):
        for model in state.models:
            yield state, model
