"""Drawing tokens from logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sixfold_runtime.engine.protocol import Sampling
from sixfold_runtime.engine.sampler import Sampler, probabilities, sample

LOGITS = hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(-30, 30, width=32))


def sampler(temperature: float = 1.0, top_p: float = 1.0, seed: int | None = None) -> Sampler:
    return Sampler(Sampling(max_tokens=1, temperature=temperature, top_p=top_p, seed=seed))


def test_greedy_takes_the_most_likely() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 2.0, 1.0]])
    assert sample(logits, [sampler(0), sampler(0)]) == [1, 0]


def test_softmax_and_temperature() -> None:
    logits = np.log(np.array([0.1, 0.2, 0.7], dtype=np.float32))
    assert probabilities(logits, 1.0, 1.0) == pytest.approx([0.1, 0.2, 0.7], abs=1e-6)
    assert probabilities(logits, 0.5, 1.0) == pytest.approx(np.array([0.01, 0.04, 0.49]) / 0.54, abs=1e-6)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.69, [2]), (0.71, [1, 2]), (0.89, [1, 2]), (0.95, [0, 1, 2]), (0.0, [2])]
)
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(top_p: float, kept: list[int]) -> None:
    logits = np.log(np.array([0.1, 0.2, 0.7], dtype=np.float32))
    assert np.flatnonzero(probabilities(logits, 1.0, top_p)).tolist() == kept


@given(LOGITS, st.floats(0.01, 5), st.floats(0.01, 1))
@settings(deadline=None)
def test_it_is_a_distribution_over_the_most_likely(logits: np.ndarray, temperature: float, top_p: float) -> None:
    weights = probabilities(logits, temperature, top_p)
    assert weights.sum() == pytest.approx(1)
    assert (weights >= 0).all() and weights[logits.argmax()] > 0
    kept, cut = logits[weights > 0], logits[weights == 0]
    if top_p < 1 and cut.size:
        assert kept.min() >= cut.max()


def test_extreme_temperatures_do_not_overflow() -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0]])
    assert sample(logits, [sampler(1e-30, seed=1)]) == [0]
    assert sample(torch.zeros(1, 3), [sampler(1e30, seed=1)])[0] in (0, 1, 2)


def test_draws_follow_the_distribution() -> None:
    """Chi-square with 3 degrees of freedom: 16.27 is exceeded once in a thousand; the seed is fixed."""
    weights, drawer = np.array([0.5, 0.25, 0.15, 0.1]), sampler(seed=3)
    logits = np.log(weights).astype(np.float32)
    counts = np.bincount([drawer.draw(logits) for _ in range(4000)], minlength=4)
    assert ((counts - 4000 * weights) ** 2 / (4000 * weights)).sum() < 16.27


def test_a_seed_gives_the_same_draws_in_any_company() -> None:
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(1))
    alone, accompanied, other = sampler(seed=7), sampler(seed=7), sampler(seed=8)
    expected = [sample(row[None], [alone])[0] for row in logits]
    mixed = [sample(torch.stack([row * 2, row]), [other, accompanied])[1] for row in logits]
    assert mixed == expected
    assert expected != [sample(row[None], [other])[0] for row in logits]


@pytest.mark.parametrize("seed", [0, -1, 2**64 - 1, -(2**63)])
def test_any_integer_is_a_seed(seed: int) -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    assert sample(logits, [sampler(seed=seed)]) == sample(logits, [sampler(seed=seed)])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_only_the_row_with_non_finite_logits_fails(value: float) -> None:
    logits = torch.tensor([[0.0, 1.0], [value, 1.0], [2.0, 1.0]])
    assert sample(logits, [sampler(0), sampler(1), sampler(0)]) == [1, None, 0]
