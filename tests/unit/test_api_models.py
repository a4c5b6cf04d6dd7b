"""The contract's models by themselves: names on the wire, nulls, conditions, durations."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sixfold_api.conditions import Condition, ConditionStatus, merge
from sixfold_api.names import claim_path, component_name, config_map_name
from sixfold_api.policy import InferencePolicySpec, InferencePolicyStatus
from sixfold_api.precision import Precision, QualityReport
from sixfold_api.scalars import duration_seconds
from sixfold_api.variant import ArtifactFacts, ModelVariantSpec, PreparationSummary

GENERATION = {"variantRef": {"name": "chat"}}
QUANTISED = {
    "source": {"uri": "pvc://m/c"},
    "precision": {"scheme": "INT8"},
    "evaluation": {"uri": "pvc://m/text.jsonl"},
    "artifact": {"claimName": "m"},
}
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def test_a_file_speaks_wire_names_only() -> None:
    with pytest.raises(ValidationError, match="rollback_level"):
        InferencePolicySpec.model_validate({"generation": GENERATION, "rollback_level": 2})
    with pytest.raises(ValidationError, match="variant_ref"):
        InferencePolicySpec.model_validate({"generation": {"variant_ref": {"name": "chat"}}})


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(ValidationError, match="rolbackLevel"):
        InferencePolicySpec.model_validate({"generation": GENERATION, "rolbackLevel": 2})


def test_a_block_without_a_value_is_an_absent_block() -> None:
    empty = {
        "generation": GENERATION,
        "engine": None,
        "gateway": {"rateLimit": None, "pod": {"nodeSelector": {"a": None}}},
    }
    spec = InferencePolicySpec.model_validate(empty)
    assert (
        spec.to_dict()
        == InferencePolicySpec.model_validate(
            {"generation": GENERATION, "gateway": {"pod": {"nodeSelector": {}}}}
        ).to_dict()
    )
    assert "engine" not in spec.model_fields_set


def test_a_status_of_a_newer_operator_is_read() -> None:
    status = InferencePolicyStatus.model_validate({"effectiveLevel": 2, "signals": [{"name": "TTFTP95"}]})
    assert status.effective_level == 2


def test_absent_optionals_are_left_out() -> None:
    lists = ("modes", "conditions", "suspended", "tuned", "signals", "history")
    assert InferencePolicyStatus(effective_level=2).to_dict() == {"effectiveLevel": 2, **{name: [] for name in lists}}
    assert PreparationSummary().to_dict() == {"slices": []}


@pytest.mark.parametrize(
    "text, seconds", [("90s", 90), ("1h30m", 5400), ("250ms", 0.25), ("1m1m", 120), ("1h1ms", 3600.001)]
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_seconds(text) == pytest.approx(seconds)


def test_names_of_children_stay_under_kubernetes_limit() -> None:
    longest = "a" * 40
    names = [config_map_name(longest), *(component_name(longest, part) for part in ("gateway", "engine", "classifier"))]
    assert all(len(name) <= 63 for name in names)
    assert claim_path("models", "chat/") == "/claims/models/chat"
    assert claim_path("models") == "/claims/models"


def condition(type_: str, status: ConditionStatus, reason: str = "Because") -> Condition:
    return Condition(type=type_, status=status, reason=reason)


def test_a_condition_keeps_its_time_until_its_status_changes() -> None:
    first = merge([], [condition("Ready", ConditionStatus.FALSE)], NOON)
    assert first[0].last_transition_time == "2026-01-01T12:00:00Z"
    later = NOON + timedelta(minutes=1)
    same = merge(first, [condition("Ready", ConditionStatus.FALSE, "AnotherReason")], later)
    assert (same[0].last_transition_time, same[0].reason) == ("2026-01-01T12:00:00Z", "AnotherReason")
    changed = merge(same, [condition("Ready", ConditionStatus.TRUE)], later)
    assert changed[0].last_transition_time == "2026-01-01T12:01:00Z"


STATUSES = st.sampled_from(ConditionStatus)
CONDITIONS = st.dictionaries(st.sampled_from(["Ready", "Conflict", "WorkloadReady"]), STATUSES).map(
    lambda found: [condition(type_, status) for type_, status in found.items()]
)


@given(CONDITIONS, CONDITIONS)
def test_merging_says_exactly_what_is_observed_and_rests(before: list[Condition], now: list[Condition]) -> None:
    stored = merge([], before, NOON)
    merged = merge(stored, now, NOON + timedelta(hours=1))
    assert [entry.type for entry in merged] == sorted(entry.type for entry in now)
    assert {(entry.type, entry.status) for entry in merged} == {(entry.type, entry.status) for entry in now}
    assert merge(merged, reversed(now), NOON + timedelta(hours=2)) == merged


@pytest.mark.parametrize(
    ("fields", "writes", "budget"),
    [
        ({"source": {"uri": "pvc://m/c"}}, False, "1"),
        ({"source": {"uri": f"hf://a/b@{'0' * 40}"}, "artifact": {"claimName": "m"}}, True, "1"),
        (QUANTISED, True, "1"),
        (QUANTISED | {"perplexityBudgetPercent": "0.25"}, True, "0.25"),
        (QUANTISED | {"task": "Classification"}, True, "0.5"),
        (QUANTISED | {"task": "Classification", "accuracyBudgetPoints": "2"}, True, "2"),
        ({"source": {"uri": "pvc://m/c"}, "slices": [{"name": "sql"}]}, False, "1"),
        (
            {
                "source": {"uri": "pvc://m/c"},
                "slices": [{"name": "sql", "checkpoint": "pvc://m/sql"}],
                "artifact": {"claimName": "m"},
            },
            True,
            "1",
        ),
    ],
)
def test_what_a_variant_writes_and_may_lose(fields: dict[str, Any], writes: bool, budget: str) -> None:
    spec = ModelVariantSpec.model_validate({"task": "Generation", **fields})
    assert (spec.writes, spec.budget) == (writes, budget)


def test_a_loss_up_to_the_budget_is_within_it() -> None:
    report = {"metric": "accuracy", "source": "0.91", "prepared": "0.9", "budget": "1", "samples": 9}
    assert QualityReport.model_validate(report | {"loss": "1"}).within_budget
    assert QualityReport.model_validate(report | {"loss": "-0.2"}).within_budget
    assert not QualityReport.model_validate(report | {"loss": "1.000001"}).within_budget


def test_a_whole_number_that_a_rule_reads_is_no_float() -> None:
    for bits in (4.0, "4", True):
        with pytest.raises(ValidationError, match="bits"):
            Precision.model_validate({"scheme": "GPTQ", "bits": bits})


def test_a_digest_is_a_sha256() -> None:
    with pytest.raises(ValidationError, match="digest"):
        ArtifactFacts.model_validate(
            {
                "digest": "md5:0",
                "sizeBytes": 1,
                "parameters": 1,
                "architecture": "X",
                "dtype": "float32",
                "contextTokens": 1,
                "vocabularyTokens": 1,
                "tokenizerFingerprint": f"sha256:{'0' * 64}",
            }
        )
