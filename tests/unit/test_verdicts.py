"""Readings -> verdicts: hysteresis, what counts and what says nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold_api.control_status import SignalStatus, Verdict
from sixfold_api.modes import Mode
from sixfold_operator.control.model import Observed, Reading, Signal, SignalKind, Snapshot
from sixfold_operator.control.signals import BUILT_IN
from sixfold_operator.control.verdicts import judge, observe

NOW = datetime(2030, 1, 1, tzinfo=UTC)
SIGNALS = {signal.name: signal for signal in BUILT_IN}
LATENCY, ACCEPTANCE = SIGNALS["TTFTP95"], SIGNALS["AcceptanceRate"]


def reading(value: float, samples: float = 1000.0, **more: object) -> Reading:
    return replace(Reading(value, samples, NOW.timestamp(), level=2, arm="stable"), **more)


def verdict(signal: Signal, *readings: Reading, before: Verdict = Verdict.OK) -> Observed:
    return judge(signal, signal.threshold, readings, before, 2, NOW)


@pytest.mark.parametrize(
    ("signal", "value", "before", "after"),
    [
        (LATENCY, 2.1, Verdict.OK, Verdict.BREACH),
        (LATENCY, 2.0, Verdict.OK, Verdict.OK),
        (LATENCY, 1.9, Verdict.BREACH, Verdict.BREACH),
        (LATENCY, 1.9, Verdict.UNKNOWN, Verdict.OK),
        (LATENCY, 1.7, Verdict.BREACH, Verdict.OK),
        (ACCEPTANCE, 0.29, Verdict.OK, Verdict.BREACH),
        (ACCEPTANCE, 0.31, Verdict.BREACH, Verdict.BREACH),
        (ACCEPTANCE, 0.34, Verdict.BREACH, Verdict.OK),
    ],
)
def test_a_breach_begins_at_the_threshold_and_ends_clear_of_it(
    signal: Signal, value: float, before: Verdict, after: Verdict
) -> None:
    assert verdict(signal, reading(value), before=before).verdict is after


@given(st.lists(st.floats(1.81, 1.99), min_size=1, max_size=50), st.sampled_from([Verdict.OK, Verdict.BREACH]))
def test_nothing_flaps_within_the_hysteresis(values: list[float], before: Verdict) -> None:
    state = before
    for value in values:
        state = verdict(LATENCY, reading(value), before=state).verdict
    assert state is before


@given(
    st.lists(
        st.builds(
            Reading,
            value=st.floats(),
            samples=st.floats(),
            unix_seconds=st.floats(),
            level=st.none() | st.integers(0, 3),
            arm=st.sampled_from([None, "", "stable", "canary"]),
            variant=st.sampled_from([None, "a", "b"]),
        ),
        max_size=4,
    ),
    st.sampled_from([signal for signal in BUILT_IN if signal.kind is not SignalKind.FIGURE]),
    st.sampled_from(list(Verdict)),
)
def test_a_verdict_follows_from_any_readings_and_a_value_stands_behind_what_is_known(
    readings: list[Reading], signal: Signal, before: Verdict
) -> None:
    found = judge(signal, signal.threshold, readings, before, 2, NOW)
    assert found.why
    assert (found.verdict is Verdict.UNKNOWN) == (found.value is None)
    if found.value is not None:
        assert math.isfinite(found.value)


@pytest.mark.parametrize(
    ("readings", "says"),
    [
        ((), "no series"),
        ((reading(9, level=3),), "no series at level 2"),
        ((reading(9, arm="canary"),), "no series at level 2"),
        ((reading(9), reading(9)), "several series"),
        ((reading(9, samples=3),), "too few samples: 3 of 20"),
        ((reading(9, samples=math.nan),), "too few samples"),
        ((reading(math.nan),), "nan"),
        ((reading(math.inf),), "inf"),
        ((reading(-math.inf),), "-inf"),
        ((reading(9, unix_seconds=NOW.timestamp() - 600),), "600 s apart"),
        ((reading(9, unix_seconds=NOW.timestamp() + 600),), "600 s apart"),
    ],
)
def test_what_says_nothing_is_unknown_with_the_reason(readings: tuple[Reading, ...], says: str) -> None:
    found = verdict(LATENCY, *readings, before=Verdict.BREACH)
    assert found.verdict is Verdict.UNKNOWN
    assert says in found.why


def test_a_proportion_breaches_when_it_is_sure() -> None:
    signal = SIGNALS["ShadowDisagreement"]
    assert verdict(signal, reading(0.1, samples=40)).verdict is Verdict.OK, "4 of 40 may be chance"
    found = verdict(signal, reading(0.1, samples=1000))
    assert found.verdict is Verdict.BREACH
    assert "95 % confidence" in found.why


def test_the_worst_variant_counts() -> None:
    signal = SIGNALS["WastedFlops"]
    shares = [reading(0.2, variant="a"), reading(0.9, variant="b"), reading(0.99, variant="c", samples=1)]
    found = verdict(signal, *shares)
    assert (found.verdict, found.value) == (Verdict.BREACH, 0.9)
    assert "of b: 90.0%" in found.why


def test_the_sentence_has_the_figures() -> None:
    assert verdict(LATENCY, reading(3.14159)).why == (
        "95th percentile of the time to the first token: 3.14 s, 1000 samples in 60 s; over 2 s"
    )
    assert "not yet clear of the threshold 2 s" in verdict(LATENCY, reading(1.9), before=Verdict.BREACH).why
    assert "under 30.0%" in verdict(ACCEPTANCE, reading(0.2)).why


def _observe(
    snapshot: Snapshot | None, *remembered: SignalStatus, target: int = 2, off: tuple[Mode, ...] = ()
) -> dict[str, Observed]:
    thresholds = {"TTFTP95": 0.5}
    return {found.name: found for found in observe(BUILT_IN, snapshot, thresholds, remembered, target, NOW, off)}


def test_a_policy_s_own_threshold_counts() -> None:
    found = _observe(Snapshot(NOW, {"TTFTP95": (reading(0.6),)}))
    assert (found["TTFTP95"].verdict, found["TTFTP95"].threshold) == (Verdict.BREACH, 0.5)
    assert found["ErrorRate"].verdict is Verdict.UNKNOWN
    assert "RequestCost" not in found


def test_a_breach_goes_on_through_an_unknown() -> None:
    snapshot = Snapshot(NOW, {"TTFTP95": (reading(0.48),)})
    unknown = SignalStatus(name="TTFTP95", verdict=Verdict.UNKNOWN, failures=2)
    assert _observe(snapshot, unknown)["TTFTP95"].verdict is Verdict.BREACH
    assert _observe(snapshot, unknown.model_copy(update={"failures": 0}))["TTFTP95"].verdict is Verdict.OK


@pytest.mark.parametrize(
    ("snapshot", "says"),
    [
        (None, "hasn't been asked"),
        (Snapshot(NOW, {"TTFTP95": (reading(9),)}, reason="Stale", message="90 s old"), "90 s old"),
        (Snapshot(NOW, {"TTFTP95": (reading(9),)}, {"TTFTP95": "it answered 400"}), "it answered 400"),
    ],
)
def test_what_prometheus_did_not_say_is_unknown(snapshot: Snapshot | None, says: str) -> None:
    found = _observe(snapshot)["TTFTP95"]
    assert found.verdict is Verdict.UNKNOWN
    assert says in found.why


def test_a_mode_that_is_off_is_not_to_blame() -> None:
    snapshot = Snapshot(NOW, {"AcceptanceRate": (reading(0.1),), "ExitRate": (reading(0.0, level=None),)})
    assert _observe(snapshot)["AcceptanceRate"].verdict is Verdict.BREACH
    assert _observe(snapshot, off=(Mode.SPECULATIVE,))["AcceptanceRate"].verdict is Verdict.UNKNOWN
    assert _observe(snapshot)["ExitRate"].why == "EarlyExit is off below level 3"


def test_clock_jumps_say_nothing() -> None:
    for jump in (timedelta(days=1), timedelta(days=-1)):
        found = judge(LATENCY, 2.0, [reading(9)], Verdict.OK, 2, NOW + jump)
        assert found.verdict is Verdict.UNKNOWN
