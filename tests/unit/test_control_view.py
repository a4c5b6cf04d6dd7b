"""A policy as the control loop sees it, and what its conditions say of the loop."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from sixfold_api.control_status import HistoryEntry, LevelStatus, SignalStatus, Suspension
from sixfold_api.modes import Mode
from sixfold_api.policy import InferencePolicySpec, InferencePolicyStatus
from sixfold_operator.control.model import State
from sixfold_operator.control.view import HISTORY_ENTRIES, ready_since, remembered, spec_hash, state_of, view_of
from sixfold_operator.reconcile.quality_bounds import exit_variants, quality_bounds

CHAT = {"generation": {"variantRef": {"name": "chat"}}}
FULL = {
    "generation": {
        "variantRef": {"name": "chat"},
        "quantized": {"variantRef": {"name": "small"}},
        "speculative": {"draftVariantRef": {"name": "tiny"}},
    },
    "classification": {"variantRef": {"name": "intent"}, "earlyExit": {}},
    "streaming": {"compression": "Off"},
}
NOW = "2026-01-01T00:00:00Z"


def spec(document: dict[str, Any], **changes: Any) -> InferencePolicySpec:
    return InferencePolicySpec.model_validate({**document, **changes})


@pytest.mark.parametrize(
    ("document", "levels"),
    [
        (CHAT | {"streaming": {"compression": "Off"}}, (0, 3)),
        (FULL, (0, 1, 2, 3)),
        (FULL | {"rollbackLevel": 1}, (0, 1)),
        (CHAT | {"rollbackLevel": 2}, (0, 2)),
    ],
)
def test_levels_that_differ(document: dict[str, Any], levels: tuple[int, ...]) -> None:
    assert view_of(spec(document), {}, InferencePolicyStatus()).levels == levels


def test_modes_are_those_that_can_run() -> None:
    view = view_of(spec(FULL), {Mode.SPECULATIVE: "another tokenizer"}, InferencePolicyStatus())
    assert view.modes == {Mode.QUANTIZED, Mode.EARLY_EXIT}
    assert view_of(spec(FULL, rollbackLevel=0), {}, InferencePolicyStatus()).modes > view.modes


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        ({"engine": {"replicas": 7}}, False),
        ({"rollbackLevel": 1}, False),
        ({"analysis": {"interval": "1s"}}, False),
        ({"batching": {}}, True),
        ({"generation": {"variantRef": {"name": "other"}}}, True),
    ],
)
def test_only_what_a_level_runs_counts_into_the_hash(change: dict[str, Any], counts: bool) -> None:
    assert (spec_hash(spec(FULL, **change)) != spec_hash(spec(FULL))) is counts


def test_swapped_weights_are_no_canary() -> None:
    swapped = InferencePolicyStatus.model_validate({"engine": {"fullWeights": "Swap"}})
    assert Mode.QUANTIZED in view_of(spec(FULL), {}, swapped).unsplittable
    assert Mode.QUANTIZED not in view_of(spec(FULL), {}, InferencePolicyStatus()).unsplittable


@pytest.mark.parametrize(("status", "known"), [("True", True), ("False", False)])
def test_since_when_a_policy_is_ready(status: str, known: bool) -> None:
    condition = {"type": "Ready", "status": status, "reason": "Because", "lastTransitionTime": NOW}
    since = ready_since(InferencePolicyStatus.model_validate({"conditions": [condition]}))
    assert since == (datetime(2026, 1, 1, tzinfo=UTC) if known else None)


def test_what_is_remembered_comes_back() -> None:
    state = State(
        level=LevelStatus(target=2, reason="TTFTP95", since=NOW),
        suspended=(Suspension(mode=Mode.EARLY_EXIT, reason="ExitRate", since=NOW),),
        signals=(SignalStatus(name="TTFTP95", failures=2),),
    )
    decisions = [HistoryEntry(at=NOW, decision="LevelChanged", reason=str(n), message="") for n in range(12)]
    status = remembered(InferencePolicyStatus(), state, decisions)
    assert [entry.reason for entry in status.history] == [str(n) for n in range(11, 11 - HISTORY_ENTRIES, -1)]
    again = state_of(InferencePolicyStatus.model_validate(status.to_dict()))
    assert (again.level, again.suspended, again.signals) == (state.level, state.suspended, state.signals)


def variant(status: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"name": "v"}, "spec": {"task": "Generation"}, "status": status}


CHOICE = {
    "depths": [2],
    "thresholds": ["0.9"],
    "exitRate": "0.8",
    "meanLayers": "3",
    "disagreement": "0.01",
    "disagreementBound": "0.02",
}
EXITS = {
    "layers": 6,
    "calibrated": CHOICE,
    "quantile": CHOICE | {"disagreementBound": "0.3"},
    "samples": 100,
    "meanLayers": "3",
    "disagreement": "0.01",
    "accuracy": "0.9",
    "fullAccuracy": "0.9",
    "calibrationError": "0.01",
}
QUALITY = {
    "metric": "perplexity",
    "source": "10",
    "prepared": "10.1",
    "loss": "1",
    "budget": "1",
    "samples": 10,
    "kl": "0.004",
}


def test_thresholds_of_quality_come_from_the_variants_reports() -> None:
    found = {"intent": variant({"exits": EXITS}), "small": variant({"quality": QUALITY})}
    bounds = quality_bounds(spec(FULL), found.get)
    assert bounds == {"ShadowDisagreement": 0.02, "ExitRate": 0.4, "ShadowDivergence": 0.008}
    assert exit_variants(spec(FULL), found.get) == {"intent"}
    tighter = FULL["classification"] | {"earlyExit": {"maxDisagreement": "0.01"}}
    assert quality_bounds(spec(FULL, classification=tighter), found.get)["ShadowDisagreement"] == 0.01
    assert quality_bounds(spec(FULL), {}.get) == {}
    assert exit_variants(spec(CHAT), found.get) == frozenset()
