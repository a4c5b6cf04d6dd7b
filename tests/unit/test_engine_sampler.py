"""Drawing tokens from logits, against plain definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sixfold_runtime.engine.candidates import largest, noise, nucleus
from sixfold_runtime.engine.errors import RequestError
from sixfold_runtime.engine.protocol import Sampling
from sixfold_runtime.engine.sampler import Sampler, is_finite
from sixfold_runtime.engine.work import check_sampling

Array = npt.NDArray[np.float32]
LOGITS = hnp.arrays(np.float32, st.integers(1, 40), elements=st.integers(-960, 960).map(lambda x: x / 32))
WEIGHTS = hnp.arrays(
    np.float32, st.integers(1, 3000), elements=st.sampled_from([0.0, 1e-6, 0.001, 0.25, 0.5, 1.0])
) | hnp.arrays(np.float32, st.integers(1, 60), elements=st.floats(0, 1, width=32))


def sampler(
    prompt: tuple[int, ...] = (), answer: tuple[int, ...] = (), random_seed: int = 0, **settings: Any
) -> Sampler:
    made = Sampler(Sampling(**{"max_tokens": 1, **settings}), prompt, np.random.Generator(np.random.PCG64(random_seed)))
    for token in answer:
        made.observe(token)
    return made


def probabilities(logits: Array, **settings: Any) -> npt.NDArray[np.float64]:
    distribution = sampler(**settings).distribution(logits)
    dense = np.zeros(len(logits))
    dense[distribution.ids] = distribution.probabilities
    return dense


def row(seed: int, size: int, spread: float = 3.0) -> Array:
    return (np.random.Generator(np.random.PCG64(seed)).standard_normal(size) * spread).astype(np.float32)


# What can be drawn


@given(WEIGHTS.filter(lambda weights: weights.max() > 0), st.floats(0, 1))
@settings(deadline=None)
def test_the_nucleus_is_the_smallest_set_of_largest_that_reaches_top_p(weights: Array, top_p: float) -> None:
    ids = nucleus(weights, top_p)
    order = np.argsort(-weights, kind="stable")
    exact = weights[order].astype(np.float64)
    mass_before = np.cumsum(exact) - exact
    target = top_p * weights.sum(dtype=np.float64)
    counts = {
        max(1, int((mass_before < target + slack).sum())) for slack in (-1e-6 * exact.sum(), 0, 1e-6 * exact.sum())
    }
    assert (np.diff(ids) > 0).all()
    # One that is reached but for rounding may be there or not; and what has no weight doesn't matter.
    assert any(set(ids.tolist()) ^ set(order[:count].tolist()) <= set(np.flatnonzero(weights == 0)) for count in counts)


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999])
def test_the_nucleus_of_a_large_vocabulary(spread: float, top_p: float) -> None:
    weights = np.exp(row(1, 152_064, spread) - np.float32(spread * 4))
    ids = nucleus(weights, top_p)
    order = np.argsort(-weights, kind="stable")
    mass = np.cumsum(weights[order].astype(np.float64))
    count = 1 + int(mass.searchsorted(top_p * mass[-1]))
    assert abs(len(ids) - count) <= 1e-6 * len(weights)  # the sum is float32's
    assert set(ids.tolist()) == set(order[: len(ids)].tolist())


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.69, [2]), (0.71, [1, 2]), (0.89, [1, 2]), (0.95, [0, 1, 2]), (1e-9, [2])]
)
def test_the_nucleus_of_three(top_p: float, kept: list[int]) -> None:
    logits = np.log(np.array([0.1, 0.2, 0.7], dtype=np.float32))
    assert np.flatnonzero(probabilities(logits, top_p=top_p)).tolist() == kept


@given(hnp.arrays(np.float32, st.integers(1, 2000), elements=st.integers(-9, 9)), st.integers(1, 2100))
@settings(deadline=None)
def test_the_largest_are_those_of_a_stable_sort(values: Array, count: int) -> None:
    assert largest(values, count).tolist() == sorted(np.argsort(-values, kind="stable")[:count].tolist())


def test_the_largest_of_a_large_vocabulary() -> None:
    values = row(2, 152_064)
    for count in (1, 20, 500, 5000):
        assert largest(values, count).tolist() == sorted(np.argsort(-values, kind="stable")[:count].tolist())


def test_top_k_comes_before_top_p() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    assert probabilities(logits, top_k=2, top_p=0.6).tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert probabilities(logits, top_k=2, top_p=0.5).tolist() == [1, 0, 0, 0]
    assert probabilities(logits, top_k=9).tolist() == pytest.approx([0.4, 0.3, 0.2, 0.1])


# Penalties


def test_frequency_and_presence_penalty_leave_the_prompt_alone() -> None:
    logits = np.zeros(4, dtype=np.float32)
    assert probabilities(logits, prompt=(0, 1), frequency_penalty=1.0, presence_penalty=1.0).tolist() == [0.25] * 4
    assert probabilities(logits, prompt=(0, 1), repetition_penalty=2.0)[0] == 0.25  # 0 stays 0, however divided


def test_greedy_obeys_penalties_too() -> None:
    logits = np.array([5.0, 4.0, -3.0], dtype=np.float32)
    assert sampler(temperature=0).draw(logits) == 0
    assert sampler(temperature=0, prompt=(0,), repetition_penalty=1.5).draw(logits) == 1
    assert sampler(temperature=0, answer=(0, 1, 1), frequency_penalty=2.0).draw(logits) == 0
    assert sampler(temperature=0, answer=(0, 0, 0, 0), frequency_penalty=2.0).draw(logits) == 1


def test_the_logits_are_left_as_they_are() -> None:
    logits = row(4, 50)
    before = logits.copy()
    sampler(prompt=(1, 2), repetition_penalty=2.0, temperature=0.5, top_p=0.5).draw(logits)
    assert (logits == before).all()


@given(
    st.lists(st.integers(0, 99), max_size=90),
    st.lists(st.integers(0, 99), max_size=200),
    st.lists(st.integers(0, 99), max_size=8),
)
@settings(deadline=None)
def test_supposed_tokens_count_and_are_forgotten(prompt: list[int], answer: list[int], supposed: list[int]) -> None:
    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.5, "seed": 1}
    logits = row(5, 100)
    with_them = sampler(tuple(prompt), (*answer, *supposed), **penalties)
    without = sampler(tuple(prompt), tuple(answer), **penalties)
    expected = without.distribution(logits), without.draw(logits)
    with without.supposing(supposed):
        assert (
            without.distribution(logits).probabilities.tolist() == with_them.distribution(logits).probabilities.tolist()
        )
        assert without.draw(logits) == with_them.draw(logits)
    assert without.distribution(logits).probabilities.tolist() == expected[0].probabilities.tolist()
    assert without.draw(logits) == expected[1]


def test_a_shorter_vocabulary_than_the_history_has() -> None:
    """A draft's rows may lack tokens that the target knows."""
    penalised = sampler(prompt=(2, 7), answer=(9,), repetition_penalty=2.0, frequency_penalty=1.0)
    assert penalised.distribution(np.ones(4, dtype=np.float32)).ids.tolist() == [0, 1, 2, 3]


# Draws


def test_softmax_and_temperature() -> None:
    logits = np.log(np.array([0.1, 0.2, 0.7], dtype=np.float32))
    assert probabilities(logits) == pytest.approx([0.1, 0.2, 0.7], abs=1e-6)
    assert probabilities(logits, temperature=0.5) == pytest.approx(np.array([0.01, 0.04, 0.49]) / 0.54, abs=1e-6)


@given(LOGITS, st.floats(0.01, 5), st.floats(0.01, 1), st.integers(0, 45))
@settings(deadline=None)
def test_it_is_a_distribution_over_the_most_likely(logits: Array, temperature: float, top_p: float, top_k: int) -> None:
    weights = probabilities(logits, temperature=temperature, top_p=top_p, top_k=top_k)
    assert weights.sum() == pytest.approx(1)
    assert (weights >= 0).all() and weights[logits.argmax()] > 0
    kept, cut = logits[weights > 0], logits[weights == 0]
    if cut.size:
        assert kept.min() >= cut.max()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("settings", [{}, {"top_p": 0.5}, {"top_k": 2}, {"seed": 1}])
def test_extremes_neither_overflow_nor_warn(settings: dict[str, Any]) -> None:
    extreme = np.array([3e38, -3e38, 0.0], dtype=np.float32)
    for temperature in (5e-324, 1e-30, 1.0):
        assert sampler(temperature=temperature, **settings).draw(extreme) == 0
    assert sampler(temperature=1e30, **settings).draw(np.zeros(3, dtype=np.float32)) in (0, 1, 2)


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.999999}, {"top_k": 4}])
@pytest.mark.parametrize("seeded", [False, True])
def test_draws_follow_the_distribution(seeded: bool, settings: dict[str, Any]) -> None:
    """Chi-square with 3 degrees of freedom: 16.27 is exceeded once in a thousand; the seed is fixed. With 4,000 draws,
    probabilities that are off by 0.03 have a non-centrality of 43 or more: caught with a probability above 0.99.
    """
    weights, size = np.array([0.5, 0.25, 0.15, 0.1]), 700
    logits = np.full(size, -80, dtype=np.float32)
    logits[[3, 90, 300, 699]] = np.log(weights)
    drawer = sampler(random_seed=3, seed=11 if seeded else None, **settings)
    counts = dict.fromkeys([3, 90, 300, 699], 0)
    for _ in range(4000):
        token = drawer.draw(logits)
        counts[token] += 1
        drawer.observe(token)
    assert ((np.array(list(counts.values())) - 4000 * weights) ** 2 / (4000 * weights)).sum() < 16.27


def test_a_seed_decides_the_token_at_a_position() -> None:
    """Whatever was drawn in between, by whom, and how often."""
    rows = [row(seed, 50) for seed in range(20)]

    def answer(seed: int, tries: int) -> list[int]:
        drawer, tokens = sampler(seed=seed, random_seed=tries), []
        for position, logits in enumerate(rows):
            for ahead in range(tries):
                with drawer.supposing([0] * ahead):
                    drawer.draw(rows[(position + ahead) % 20])
            tokens.append(drawer.draw(logits))
            drawer.observe(tokens[-1])
        return tokens

    assert answer(7, tries=0) == answer(7, tries=3)
    assert answer(7, tries=0) != answer(8, tries=0)


def test_without_a_seed_no_two_answers_are_alike() -> None:
    logits = np.zeros(1000, dtype=np.float32)
    first, second = (Sampler(Sampling(max_tokens=1)) for _ in range(2))
    assert [first.draw(logits) for _ in range(9)] != [second.draw(logits) for _ in range(9)]


@pytest.mark.parametrize("seed", [0, -1, 2**64 - 1, -(2**63)])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert sampler(seed=seed).draw(row(1, 50)) == sampler(seed=seed).draw(row(1, 50))


def test_noise_differs_in_each_of_its_arguments_and_is_exponential() -> None:
    """Mean 1 within 5 standard errors of 100,000 numbers; no correlation between neighbouring positions and seeds."""
    ids = np.arange(100_000)
    values = noise(1, 1, ids)
    assert abs(values.mean() - 1) < 5 / np.sqrt(len(ids)) and abs(values.std() - 1) < 0.03
    for other in (noise(1, 2, ids), noise(2, 1, ids), noise(1, 1, ids + 1)):
        assert abs(np.corrcoef(values, other)[0, 1]) < 5 / np.sqrt(len(ids))


def test_ties_go_to_the_lowest_id() -> None:
    logits = np.array([1.0, 3.0, 3.0, 3.0], dtype=np.float32)
    assert sampler(temperature=0).draw(logits) == 1
    assert probabilities(logits, top_k=2).tolist() == [0, 0.5, 0.5, 0]
    assert probabilities(logits, top_p=0.3).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("position", [0, 1, 599])
def test_non_finite_logits_are_seen(value: float, position: int) -> None:
    logits = np.full(600, 3e38, dtype=np.float32)
    assert is_finite(logits)
    logits[position] = value
    assert not is_finite(logits)


# Settings


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"top_k": -1}, "invalid_top_k"),
        ({"repetition_penalty": 0.0}, "invalid_repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "invalid_repetition_penalty"),
        ({"frequency_penalty": float("nan")}, "invalid_frequency_penalty"),
        ({"presence_penalty": float("inf")}, "invalid_presence_penalty"),
        ({"logprobs": -1}, "invalid_logprobs"),
        ({"top_p": 0.0}, "invalid_top_p"),
        ({"temperature": float("nan")}, "invalid_temperature"),
        ({"max_tokens": 0}, "invalid_max_tokens"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, Any], code: str) -> None:
    check_sampling(Sampling(max_tokens=1, top_k=5, repetition_penalty=0.5, frequency_penalty=-2.0, logprobs=0))
    with pytest.raises(RequestError) as refused:
        check_sampling(Sampling(**{"max_tokens": 1, **settings}))
    assert refused.value.status == 400 and refused.value.code == code
