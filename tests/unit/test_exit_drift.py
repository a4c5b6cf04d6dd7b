"""How far texts are from those that exits were calibrated on."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold_runtime.modes.exit_drift import LEAST_TEXTS, WINDOW_TEXTS, ExitDrift, stability_index

LIKE_IMDB = [60, 100, 150, 180, 200, 220, 260, 300, 400, 500]


def test_there_is_no_figure_before_enough_texts() -> None:
    drift = ExitDrift(LIKE_IMDB, 0.4)
    for _ in range(LEAST_TEXTS - 1):
        drift.add(200, True)
    assert drift.current() is None
    drift.add(200, True)
    assert drift.current() is not None


def test_texts_like_the_calibrations_show_none() -> None:
    drift = ExitDrift(LIKE_IMDB * 20, 0.4)
    for turn in range(WINDOW_TEXTS):
        drift.add(LIKE_IMDB[turn % len(LIKE_IMDB)], exited=turn % 5 < 2)
    current = drift.current()
    assert current is not None
    assert current.length_index == pytest.approx(0, abs=1e-9)
    assert current.exit_rate_difference == pytest.approx(0, abs=1e-9)


def test_tweets_after_reviews_show_much_and_only_the_last_texts_count() -> None:
    drift = ExitDrift(LIKE_IMDB * 20, 0.4)
    for turn in range(3 * WINDOW_TEXTS):
        drift.add(LIKE_IMDB[turn % len(LIKE_IMDB)], exited=False)
    for turn in range(WINDOW_TEXTS):
        drift.add(10 + turn % 20, exited=turn % 10 < 9)
    current = drift.current()
    assert current is not None
    assert current.length_index > 0.25
    assert current.exit_rate_difference == pytest.approx(0.5)


def test_the_index_is_the_textbooks() -> None:
    expected = 0.3 * math.log(0.5 / 0.2) - 0.3 * math.log(0.5 / 0.8)
    assert stability_index([20, 80], [50, 50]) == pytest.approx(expected)


COUNTS = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), min_size=1, max_size=10)


@given(COUNTS)
def test_the_index_is_finite_symmetric_and_never_negative(counts: list[tuple[int, int]]) -> None:
    expected, actual = [e for e, _ in counts], [a for _, a in counts]
    index = stability_index(expected, actual)
    assert index >= -1e-12 and math.isfinite(index)
    assert index == pytest.approx(stability_index(actual, expected), abs=1e-9)
    assert stability_index(expected, expected) == 0
