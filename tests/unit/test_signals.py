"""The signals file, and answers of Prometheus as readings."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold_api.modes import Mode
from sixfold_api.ticket import Cause
from sixfold_operator.control.answers import AnswerError, readings, snapshot
from sixfold_operator.control.model import Action, Reading, SignalKind
from sixfold_operator.control.promql import expression_of, query_of
from sixfold_operator.control.signals import BUILT_IN, SignalsError, load

NAMES = [
    "ErrorRate",
    "RequestP95",
    "TTFTP95",
    "InterTokenP95",
    "ExitRate",
    "AcceptanceRate",
    "DraftTime",
    "KVFaults",
    "BufferWait",
    "QueueWait",
    "ShadowDisagreement",
    "ShadowDivergence",
    "WastedFlops",
    "PaddingWaste",
    "RejectedDrafts",
    "RecomputedPrefix",
    "UnneededLayers",
    "CancelledWork",
    "KVHitRate",
    "MisHotTask",
    "IdleAccelerator",
    "GeneratedLabels",
]
PLACE = ("shop", "bot")
NOW = datetime(2030, 1, 1, tzinfo=UTC)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def test_names_are_api() -> None:
    judged = [signal.name for signal in BUILT_IN if signal.kind is not SignalKind.FIGURE]
    assert judged == NAMES
    assert [signal.name for signal in BUILT_IN if signal.is_primary] == ["ErrorRate", "RequestP95"]
    blamed = {signal.name: signal.blames for signal in BUILT_IN if signal.action is Action.SUSPEND}
    assert blamed == {
        "ExitRate": Mode.EARLY_EXIT,
        "AcceptanceRate": Mode.SPECULATIVE,
        "DraftTime": Mode.SPECULATIVE,
        "KVFaults": Mode.KV_CACHE_REUSE,
        "BufferWait": Mode.SAMPLER_PIPELINE,
        "QueueWait": Mode.DYNAMIC_BATCHING,
    }


def test_a_file_changes_and_adds() -> None:
    document = [
        {"name": "TTFTP95", "window": "15s", "minSamples": 5, "threshold": "0.8", "clear": 0.8},
        {
            "name": "Toxicity",
            "query": "avg by (namespace, policy) (toxicity)",
            "samples": "sum by (namespace, policy) (increase(judged_total[$window]))",
            "threshold": 0.1,
            "action": "Suspend",
            "mode": "Speculative",
            "window": "2m",
        },
        {"name": "Chatter", "kind": "Waste", "cause": "Cancelled", "query": "a", "samples": "b", "threshold": 1},
    ]
    signals = {signal.name: signal for signal in load(document)}
    first, further, waste = signals["TTFTP95"], signals["Toxicity"], signals["Chatter"]
    assert (first.window_seconds, first.min_samples, first.threshold, first.clear) == (15.0, 5.0, 0.8, 0.8)
    assert "[15s]" in query_of(first)
    assert (further.action, further.blames, further.window_seconds) == (Action.SUSPEND, Mode.SPECULATIVE, 120.0)
    assert (waste.kind, waste.cause) == (SignalKind.WASTE, Cause.CANCELLED)
    assert len(signals) == len(BUILT_IN) + 2
    assert load(None) == load([]) == BUILT_IN


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({}, "a list is needed, not dict"),
        (["TTFTP95"], r"signals\[0\]: an object with a name"),
        ([{"name": "TTFTP95"}, {"name": "TTFTP95"}], r"signals\[1\] \(TTFTP95\): this name comes twice"),
        ([{"name": "TTFTP95", "query": "up"}], "query of a built-in signal can't be changed"),
        ([{"name": "TTFTP95", "threshold": "soon"}], "threshold: .*number"),
        ([{"name": "TTFTP95", "threshold": float("nan")}], "threshold: .*finite"),
        ([{"name": "TTFTP95", "window": "100h"}], "between 1s and 24h"),
        ([{"name": "Mine", "query": "up"}], "no built-in signal has this name, so it needs samples, threshold"),
        ([{"name": "no name", "query": "a", "samples": "b", "threshold": 1}], "name: "),
        ([{"name": "Mine", "query": "a", "samples": "b", "threshold": 1, "kind": "Waste"}], "cause is needed"),
        ([{"name": "Mine", "query": "a", "samples": "b", "threshold": 1, "action": "Suspend"}], "mode is needed"),
    ],
)
def test_what_is_wrong_is_said(document: object, says: str) -> None:
    with pytest.raises(SignalsError, match=says):
        load(document)


@given(JSON | st.lists(st.dictionaries(st.sampled_from(["name", "query", "window", "threshold"]), JSON), max_size=3))
def test_no_file_brings_anything_but_signals_or_an_error(document: object) -> None:
    try:
        assert load(document)
    except SignalsError as error:
        assert str(error).startswith("signals")


def row(part: str, number: str, **labels: str) -> dict[str, Any]:
    where = {"namespace": PLACE[0], "policy": PLACE[1], "sixfold_part": part, **labels}
    return {"metric": where, "value": [NOW.timestamp(), number]}


def test_values_meet_their_samples() -> None:
    found = readings(
        [
            row("value", "0.5", level="2", arm="stable"),
            row("samples", "40", level="2", arm="stable"),
            row("value", "NaN", level="3", arm="canary"),
            row("value", "1", level="x"),
            {"metric": {"sixfold_part": "value"}, "value": [0, "1"]},
        ]
    )[PLACE]
    assert found[0] == Reading(0.5, 40.0, NOW.timestamp(), 2, "stable")
    assert (found[1].samples, found[1].level) == (0.0, 3)
    assert len(found) == 2


@given(JSON | st.lists(st.fixed_dictionaries({"metric": JSON, "value": JSON}), max_size=3))
def test_no_answer_brings_anything_but_readings_or_an_error(rows: object) -> None:
    try:
        readings(rows)
    except AnswerError as error:
        assert str(error)


def test_series_without_a_policy_are_told() -> None:
    with pytest.raises(AnswerError, match="lack the labels namespace and policy"):
        readings([{"metric": {"job": "x"}, "value": [0, "1"]}])


@pytest.mark.parametrize(
    ("age_seconds", "scrapes", "interval_seconds", "reason"),
    [
        (1.0, 15.0, 2.0, "Found"),
        (6.0, 15.0, 2.0, "Stale"),
        (14.0, 1.0, 30.0, "Found"),
        (59.0, 1.0, 5.0, "Found"),
        (80.0, 1.0, 30.0, "Stale"),
        (80.0, 1.0, 60.0, "Found"),
        (float("nan"), 1.0, 30.0, "Missing"),
    ],
)
def test_a_sample_is_stale_by_intervals_and_scrapes(
    age_seconds: float, scrapes: float, interval_seconds: float, reason: str
) -> None:
    fresh = {"Freshness": {PLACE: (Reading(age_seconds, scrapes, NOW.timestamp()),)}}
    found = snapshot(PLACE, NOW, fresh, {}, interval_seconds)
    assert found.reason == reason
    assert bool(found.message) == (reason != "Found")


def test_what_no_policy_of_prometheus_is_missing_and_a_dead_one_an_error() -> None:
    assert snapshot(PLACE, NOW, {"Freshness": {}}, {}, 30.0).reason == "Missing"
    dead = snapshot(PLACE, NOW, {}, {"ErrorRate": "it can't be reached"}, 30.0)
    assert (dead.reason, dead.message) == ("PrometheusError", "it can't be reached")


def test_both_halves_of_an_expression_stand_on_their_own() -> None:
    signal = load([{"name": "Mine", "query": "up # note", "samples": "up", "threshold": 1}])[-1]
    assert "# note\n)" in expression_of(signal)
