"""Statistics of two answers to the same texts."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e" / "models"))

from paired import accuracy, calibration_error, difference, macro_f1, mcnemar

LABELS = st.sampled_from("ab")


def test_difference_counts_won_and_lost_texts() -> None:
    truth = list("aaaaaaaaaa")
    first = list("aaaaaaaabb")
    second = list("aaaaaaabab")
    change = difference(truth, first, second)
    assert change.accuracy == 0
    assert change.disagreement == pytest.approx(0.2)
    assert change.high == -change.low == pytest.approx(1.959964 * math.sqrt(0.2 / 10))
    assert change.p == 1


@given(st.lists(st.tuples(LABELS, LABELS, LABELS), min_size=1, max_size=60))
def test_difference_is_that_of_the_accuracies(rows: list[tuple[str, str, str]]) -> None:
    truth, first, second = (list(column) for column in zip(*rows, strict=True))
    change = difference(truth, first, second)
    assert change.accuracy == pytest.approx(accuracy(truth, second) - accuracy(truth, first))
    assert change.low <= change.accuracy <= change.high
    assert abs(change.accuracy) <= change.disagreement
    assert 0 < change.p <= 1


def test_mcnemar_is_the_sign_test() -> None:
    assert mcnemar(0, 0) == 1
    assert mcnemar(10, 0) == pytest.approx(2 / 1024)
    assert mcnemar(2, 8) == mcnemar(8, 2) == pytest.approx(2 * (1 + 10 + 45) / 1024)


def test_calibration_error_of_honest_and_of_boastful_confidences() -> None:
    assert calibration_error([0.75] * 4, [True, True, True, False]) == 0
    assert calibration_error([1.0] * 4, [True, False, True, False]) == 0.5


def test_macro_f1_weighs_labels_alike() -> None:
    truth = list("aaaaaaaab")
    assert macro_f1(truth, truth) == 1
    assert macro_f1(truth, list("aaaaaaaaa")) == pytest.approx((16 / 17 + 0) / 2)
    assert macro_f1(list("aa"), list("ac")) == pytest.approx(2 / 3)
