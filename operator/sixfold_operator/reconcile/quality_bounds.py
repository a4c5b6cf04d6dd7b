"""What the reports of a policy's variants promise -> thresholds of quality signals, and what tuning may rely on.

Pure.
"""

from __future__ import annotations

from sixfold_api.classification import ExitRule
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.variant import ModelVariantStatus
from sixfold_operator.reconcile.inputs import Find
from sixfold_operator.reconcile.rollout import last_status

HALF_THE_EXITS = 0.5
"""An exit rate below this part of the calibrated one says that the texts are of another kind."""
KL_MARGIN = 2.0
"""Divergence in service may be so many times the one on held-out text."""


def quality_bounds(spec: InferencePolicySpec, variant: Find) -> dict[str, float]:
    """Signal -> threshold, for those that the variants' reports speak about."""
    bounds: dict[str, float] = {}
    classification, generation = spec.classification, spec.generation
    if classification is not None and classification.early_exit is not None:
        exits = _status(variant, classification.variant_ref.name).exits
        if exits is not None:
            rule = classification.early_exit.rule
            choice = exits.quantile if rule is ExitRule.QUANTILE else exits.calibrated
            asked = classification.early_exit.max_disagreement
            bounds["ShadowDisagreement"] = float(choice.disagreement_bound if asked is None else asked)
            if rule is not ExitRule.FIXED and asked is None:
                bounds["ExitRate"] = HALF_THE_EXITS * float(choice.exit_rate)
    if generation is not None and generation.quantized is not None:
        quality = _status(variant, generation.quantized.variant_ref.name).quality
        if quality is not None and quality.kl is not None:
            bounds["ShadowDivergence"] = KL_MARGIN * float(quality.kl)
    return bounds


def exit_variants(spec: InferencePolicySpec, variant: Find) -> frozenset[str]:
    """The policy's classifier, if its exit heads let texts exit."""
    if spec.classification is None:
        return frozenset()
    name = spec.classification.variant_ref.name
    exits = _status(variant, name).exits
    return frozenset({name}) if exits is not None and exits.calibrated.lets_texts_exit else frozenset()


def _status(variant: Find, name: str) -> ModelVariantStatus:
    found = variant(name)
    return ModelVariantStatus() if found is None else last_status(ModelVariantStatus, found)
