"""Recommendations fit the policy they are for, and each step is bounded."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold_api.control_status import TunedValue
from sixfold_api.merge_patch import contains, merged
from sixfold_api.modes import Mode
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.scalars import quantity_value
from sixfold_api.ticket import Cause, Recommendation
from sixfold_operator.control import steps
from sixfold_operator.control.recommendations import recommend
from sixfold_operator.control.waste import Facts

GENERATION: dict[str, Any] = {"variantRef": {"name": "chat"}}
DRAFTED = {"generation": {**GENERATION, "speculative": {"draftVariantRef": {"name": "tiny"}, "numTokens": 8}}}
CLASSIFIER: dict[str, Any] = {"classification": {"variantRef": {"name": "intent"}}}
TOKENS = "/generation/speculative/numTokens"


def advice(cause: Cause, document: dict[str, Any], variant: str | None = None, **facts: Any) -> Recommendation:
    return recommend(cause, InferencePolicySpec.model_validate(document), Facts("shop", "bot", **facts), variant)


def test_drafts_get_as_long_as_acceptance_supports() -> None:
    found = advice(Cause.REJECTED_DRAFT, DRAFTED, acceptance=0.4)
    assert (found.path, found.value) == (TOKENS, "4")
    assert found.patch == {"spec": {"generation": {"speculative": {"numTokens": 4}}}}


def test_what_was_taken_back_is_not_recommended_again() -> None:
    found = advice(Cause.REJECTED_DRAFT, DRAFTED, acceptance=0.4, rejected=frozenset({(TOKENS, "4")}))
    assert found.path is None and found.patch == {"spec": {"generation": {"speculative": None}}}


def test_a_step_starts_from_the_tuned_value() -> None:
    tuned = TunedValue(path=TOKENS, value="4", base="8", since="2030-01-01T00:00:00Z")
    assert advice(Cause.REJECTED_DRAFT, DRAFTED, acceptance=0.1, tuned=(tuned,)).value == "2"


def test_a_mode_under_the_ceiling_needs_the_ceiling_raised() -> None:
    found = advice(Cause.PADDING, {"generation": GENERATION, "batching": {}, "rollbackLevel": 2})
    assert found.patch == {"spec": {"rollbackLevel": 3}}
    found = advice(Cause.PADDING, {"generation": GENERATION, "rollbackLevel": 2})
    assert found.patch == {"spec": {"batching": {"maxBatchTokens": 1024}, "rollbackLevel": 3}}


@pytest.mark.parametrize("facts", [{"target": 2}, {"suspended": frozenset({Mode.DYNAMIC_BATCHING})}])
def test_what_the_operator_turned_off_is_not_the_users_to_patch(facts: dict[str, Any]) -> None:
    found = advice(Cause.PADDING, {"generation": GENERATION, "batching": {}}, **facts)
    assert found.patch is None and "kubectl sixfold explain policy bot" in found.summary


def test_exits_need_heads() -> None:
    assert "exitHeads" in advice(Cause.UNNEEDED_LAYERS, CLASSIFIER).summary
    found = advice(Cause.UNNEEDED_LAYERS, CLASSIFIER, exit_variants=frozenset({"intent"}))
    assert found.patch == {"spec": {"classification": {"earlyExit": {"rule": "Calibrated"}}}}


def test_a_hot_task_is_pinned_and_the_others_stay() -> None:
    tasks = {"tasks": [{"name": "ner"}, {"name": "topic", "pinned": True}]}
    document = {"classification": {"variantRef": {"name": "intent"}, "subgraphs": tasks}}
    found = advice(Cause.MIS_HOT_TASK, document, "ner")
    assert (found.path, found.value) == ("/classification/subgraphs/tasks/ner/pinned", "true")
    after = merged({"spec": document}, found.patch)["spec"]["classification"]["subgraphs"]["tasks"]
    assert after == [{"name": "ner", "pinned": True}, {"name": "topic", "pinned": True}]


def test_an_idle_classifier_gives_its_own_pod_back() -> None:
    document = {"generation": GENERATION, "classification": {**CLASSIFIER["classification"], "engine": {"replicas": 3}}}
    found = advice(Cause.IDLE_ACCELERATOR, document, "intent")
    assert found.patch == {"spec": {"classification": {"engine": {"replicas": 2}}}}
    assert advice(Cause.IDLE_ACCELERATOR, document, "chat").patch is None


@given(st.integers(2, 16), st.one_of(st.none(), st.floats(0, 1)))
def test_drafts_get_shorter_by_one_to_half(tokens: int, share: float | None) -> None:
    assert max(1, tokens // 2) <= steps.supported_draft_tokens(tokens, share) < tokens


@given(st.integers(1, 16), st.floats(0.01, 0.99))
def test_token_acceptance_explains_the_share(tokens: int, chance: float) -> None:
    share = sum(chance**i for i in range(1, tokens + 1)) / tokens
    assert steps.token_acceptance(tokens, share) == pytest.approx(chance, abs=1e-6)


@given(st.integers(1, 2**40), st.sampled_from(["", "Ki", "Mi", "G"]))
def test_doubling_a_size_is_exact(number: int, unit: str) -> None:
    assert quantity_value(steps.doubled_size(f"{number}{unit}")) == int(quantity_value(f"{number}{unit}") * 2)


JSON = st.recursive(
    st.none() | st.integers(0, 3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from("abc"), JSON, max_size=3), JSON)
def test_a_merged_patch_is_contained(document: dict[str, Any], patch: Any) -> None:
    assert contains(merged(document, patch), patch)
