"""Two arms side by side: what is worse, what can't be told, and how often chance is taken for worse."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold_api.control_status import Verdict
from sixfold_operator.control.canary import ArmFigures, judge, least_difference, wilson

REST = ArmFigures(requests=1000, errors=10, p95_seconds=1.0)
TRIED = ArmFigures(requests=100, errors=1, p95_seconds=1.1)
COUNT = st.floats(0, 1e6)
FIGURES = st.builds(
    ArmFigures,
    requests=COUNT,
    errors=COUNT,
    p95_seconds=st.none() | st.floats(),
    shadowed=COUNT,
    differed=COUNT,
    shadow_tokens=COUNT,
    divergence_nats=st.none() | st.floats(),
)


def test_no_worse_is_ok() -> None:
    judgement = judge(REST, TRIED, 50)
    assert (judgement.verdict, judgement.samples, judgement.signal) == (Verdict.OK, 100, "")


@pytest.mark.parametrize(
    ("changes", "signal", "why"),
    [
        ({"errors": 9}, "ErrorRate", "9.0% of 100 requests failed, against 1.0% of 1000"),
        ({"p95_seconds": 1.26}, "RequestP95", "P95 of 1.26 s, against 1 s of the rest"),
        ({"shadowed": 100, "differed": 15}, "ShadowDisagreement", "15 of 100 answers differ"),
        ({"shadow_tokens": 500, "divergence_nats": 0.06}, "ShadowDivergence", "0.06 nats a token"),
    ],
)
def test_worse_is_a_breach_with_its_figures(changes: dict[str, float], signal: str, why: str) -> None:
    judgement = judge(REST, replace(TRIED, **changes), 50)
    assert (judgement.verdict, judgement.signal) == (Verdict.BREACH, signal)
    assert why in judgement.why


@pytest.mark.parametrize(
    ("rest", "tried"),
    [
        (REST, replace(TRIED, requests=49, errors=49)),
        (replace(REST, requests=49), TRIED),
        (REST, replace(TRIED, p95_seconds=None)),
        (REST, replace(TRIED, p95_seconds=math.nan)),
        (REST, ArmFigures()),
        (replace(REST, requests=math.nan), TRIED),
    ],
)
def test_what_can_t_be_told_is_unknown(rest: ArmFigures, tried: ArmFigures) -> None:
    judgement = judge(rest, tried, 50)
    assert judgement.verdict is Verdict.UNKNOWN
    assert judgement.why


def test_a_mode_may_differ_from_level_0_as_much_as_its_policy_allows() -> None:
    tried = replace(TRIED, shadowed=100, differed=15)
    assert judge(REST, tried, 50, max_disagreement=0.2).verdict is Verdict.OK
    assert judge(REST, replace(TRIED, shadowed=49, differed=49), 50).verdict is Verdict.OK


def test_disagreement_counts_before_there_are_requests_enough() -> None:
    tried = ArmFigures(requests=10, shadowed=60, differed=30)
    assert judge(REST, tried, 50).verdict is Verdict.BREACH


def test_bounds_are_newcombe_s() -> None:
    """Example (a) of Newcombe (1998), 56/70 against 48/80: his two-sided 95 % interval is 0.0524 to 0.3339."""
    assert wilson(56, 70, z=1.959964) == pytest.approx((0.6916, 0.8769), abs=5e-4)
    assert least_difference((48, 80), (56, 70)) == pytest.approx(0.0777, abs=2e-3)  # one-sided, so higher than 0.0524
    assert wilson(0, 0) == (0.0, 1.0)


@given(FIGURES, FIGURES)
def test_any_figures_are_judged(stable: ArmFigures, canary: ArmFigures) -> None:
    judgement = judge(stable, canary, 50)
    if judgement.verdict is Verdict.OK:
        assert judgement.samples >= 50


def test_chance_is_seldom_taken_for_worse_and_a_fault_is_found() -> None:
    """Ten looks at each of 500 canaries with 1 % of errors like the rest's, and at those with 6 %."""

    def is_rejected(share: float, rng: random.Random) -> bool:
        stable, canary, tried = 0.0, 0.0, 0
        for look in range(1, 11):
            stable += sum(rng.random() < 0.01 for _ in range(200))
            canary += sum(rng.random() < share for _ in range(40))
            tried += 40
            rest = ArmFigures(requests=200.0 * look, errors=stable, p95_seconds=1)
            if judge(rest, ArmFigures(requests=tried, errors=canary, p95_seconds=1), 50).verdict is Verdict.BREACH:
                return True
        return False

    rng = random.Random(7)
    false = sum(is_rejected(0.01, rng) for _ in range(500)) / 500
    found = sum(is_rejected(0.06, rng) for _ in range(500)) / 500
    print(f"rejected in ten looks: {false:.1%} of canaries that are no worse, {found:.1%} of those with 6 % of errors")
    assert false < 0.05
    assert found > 0.95
