"""What would end a kind of waste, for a given policy: a change that its schema takes, or advice. Pure.

Each cause has a list of candidates, best first. The first one that the policy's schema accepts is what is recommended,
so a patch that would violate it is never offered; the last candidate is always advice in words.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from sixfold_api.merge_patch import contains, merged
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.ticket import Cause, Recommendation
from sixfold_api.tuning import merge_patch, spec_value, tuned_spec, why_not_tunable
from sixfold_operator.control.remedies import REMEDIES, Candidate, Situation
from sixfold_operator.control.waste import Facts

SUMMARY_CHARACTERS = 1024


def recommend(cause: Cause, spec: InferencePolicySpec, facts: Facts, variant: str | None = None) -> Recommendation:
    """What would end the waste.

    Args:
        variant: the ModelVariant, or the task of a slice, that wastes.
    """
    situation = Situation(spec, tuned_spec(spec, facts.tuned)[0], facts, variant)
    for candidate in REMEDIES[cause](situation):
        recommendation = _checked(situation, candidate)
        if recommendation is not None:
            return recommendation
    raise AssertionError(f"the candidates for {cause} must end in advice")


def written(spec: InferencePolicySpec) -> dict[str, Any]:
    """The spec as the user wrote it, without defaults."""
    return spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)


def _checked(situation: Situation, candidate: Candidate) -> Recommendation | None:
    """The candidate, if the policy's schema takes it and it would change something that wasn't tried in vain."""
    spec, summary = situation.spec, candidate.summary[:SUMMARY_CHARACTERS]
    if candidate.path is not None and candidate.value is not None:
        path, value = candidate.path, candidate.value
        if (path, value) in situation.facts.rejected or value == spec_value(situation.now, path):
            return None
        if why_not_tunable(spec, path, value):
            return None
        return Recommendation(summary=summary, patch=merge_patch(spec, path, value), path=path, value=value)
    if candidate.patch is None:
        return Recommendation(summary=summary)
    patch = {"spec": candidate.patch}
    document = {"spec": written(spec)}
    if contains({"spec": spec.to_dict()}, patch):
        return None
    try:
        InferencePolicySpec.model_validate(merged(document, patch)["spec"])
    except ValidationError:
        return None
    return Recommendation(summary=summary, patch=patch)
