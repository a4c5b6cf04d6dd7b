"""Exit thresholds: the bound against exact binomials, its promise on simulated texts, what every choice keeps to."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold_api.classification import ExitRule
from sixfold_runtime.modes.early_exit import (
    Calibration,
    Choice,
    Exits,
    choose,
    disagreement_bound,
    exit_depths,
    measure,
    most_wrong,
)

LAYERS = 6
BUDGETS = [0.0, 0.01, 0.03, 0.05, 0.1, 0.3, 1.0]


def calibration(confidences: Any, agrees: Any, lengths: Any = None, **fields: Any) -> Calibration:
    """Depths 1, 2, ... by the columns; texts of one token where nothing is said."""
    confidences = np.asarray(confidences, np.float64)
    defaults = {"max_disagreement": 0.03, "length_relaxation": 0.0, "layers": LAYERS}
    return Calibration(
        depths=tuple(range(1, confidences.shape[1] + 1)),
        confidences=confidences,
        agrees=np.asarray(agrees, bool),
        lengths=np.ones(len(confidences), np.int64) if lengths is None else np.asarray(lengths),
        **defaults | fields,
    )


def world(random: np.random.Generator, texts: int, **fields: Any) -> Calibration:
    """Texts whose confidences grow with depth, and tell how likely a head agrees; short and long ones."""
    ease = random.beta(2, 1.2, texts)[:, None]
    depth = np.arange(1, LAYERS)[None, :]
    agreeing = np.clip(0.5 + 0.5 * ease ** (2 / depth) - 0.05 / depth, 0, 1)
    lengths = random.integers(1, 200, texts)
    return calibration(
        np.clip(agreeing + random.normal(0, 0.03, agreeing.shape), 0.5, 1.0),
        random.random(agreeing.shape) < agreeing,
        lengths,
        **{"length_relaxation": 0.01} | fields,
    )


def binomial(wrong: int, texts: int, share: float) -> float:
    """P(at most so many wrong), summed term by term."""
    return sum(math.comb(texts, k) * share**k * (1 - share) ** (texts - k) for k in range(wrong + 1))


@pytest.mark.parametrize(
    ("wrong", "texts", "bound"),
    [(0, 100, 0.029513), (5, 100, 0.102253), (30, 600, 0.067210), (1, 1, 1.0), (0, 1, 0.95)],
    ids=["none", "few", "hundreds", "all of one", "none of one"],
)
def test_the_bound_is_clopper_and_pearsons(wrong: int, texts: int, bound: float) -> None:
    assert disagreement_bound(wrong, texts) == pytest.approx(bound, abs=1e-6)


@given(texts=st.integers(1, 200), share=st.integers(0, 200), budget=st.sampled_from(BUDGETS))
def test_bound_and_allowance_tell_the_same(texts: int, share: int, budget: float) -> None:
    wrong = texts * share // 200
    assert (disagreement_bound(wrong, texts) <= budget + 1e-9) == (wrong <= most_wrong(texts, budget))
    if wrong < texts:
        assert binomial(wrong, texts, disagreement_bound(wrong, texts)) == pytest.approx(0.05, rel=1e-6)


def test_the_budget_is_kept_as_often_as_promised() -> None:
    """400 calibrations of 300 texts, each judged on 20,000 others: the true share exceeds the budget in 5% at most."""
    random = np.random.default_rng(1)
    population = world(random, 20_000)
    broken, saved = 0, []
    for _ in range(400):
        drawn = random.choice(len(population.lengths), 300, replace=False)
        sample = Calibration(
            population.depths, LAYERS, population.confidences[drawn], population.agrees[drawn],
            population.lengths[drawn], 0.05, 0.01,
        )  # fmt: skip
        leaves = exit_depths(population, choose(sample, ExitRule.CALIBRATED).exits)
        early = leaves < LAYERS
        broken += (~population.agrees[early, leaves[early] - 1]).sum() > 0.05 * len(leaves)
        saved.append(early.mean())
    assert broken <= 30  # 20 are expected at the most, and 30 are rarer than 1 in 50 then
    assert np.mean(saved) > 0.2


confidence = st.one_of(st.floats(0.01, 1.0), st.sampled_from([0.5, 0.9, 1.0]))


@st.composite
def calibrations(draw: st.DrawFn) -> Calibration:
    texts, depths = draw(st.integers(1, 60)), draw(st.integers(0, 3))
    rows = draw(st.lists(st.lists(confidence, min_size=depths, max_size=depths), min_size=texts, max_size=texts))
    always = draw(st.sampled_from([None, True, False]))
    flags = st.lists(st.booleans() if always is None else st.just(always), min_size=depths, max_size=depths)
    return calibration(
        np.array(rows).reshape(texts, depths),
        np.array(draw(st.lists(flags, min_size=texts, max_size=texts))).reshape(texts, depths),
        draw(st.lists(st.integers(1, 4096), min_size=texts, max_size=texts)),
        length_relaxation=draw(st.sampled_from([0.0, 0.01, 0.2])),
        sharpness=tuple(draw(st.lists(st.floats(0.1, 10), min_size=depths, max_size=depths))),
    )


@settings(deadline=None, max_examples=60)
@given(calibrations(), st.sampled_from(BUDGETS), st.sampled_from(list(ExitRule)))
def test_every_choice_is_what_it_says(given_: Calibration, budget: float, rule: ExitRule) -> None:
    arguments: dict[str, Any] = {"threshold": 0.9} if rule is ExitRule.FIXED else {"max_disagreement": budget}
    choice = choose(given_, rule, **arguments)
    assert choose(given_, rule, **arguments) == choice
    assert set(choice.exits.thresholds) <= set(given_.depths)
    assert choice == measure(given_, choice.exits)
    leaves = [leave(given_, text, choice.exits) for text in range(len(given_.lengths))]
    assert exit_depths(given_, choice.exits).tolist() == leaves
    assert choice.mean_layers == pytest.approx(np.mean(leaves))
    assert choice.exit_rate == pytest.approx(np.mean([depth < LAYERS for depth in leaves]))
    if rule is ExitRule.CALIBRATED and choice.exits.thresholds:
        assert choice.disagreement_bound <= budget + 1e-9


def leave(given_: Calibration, text: int, exits: Exits) -> int:
    """One text, as the engine decides."""
    for index, depth in enumerate(given_.depths):
        if depth in exits.thresholds:
            least = exits.least_confidence(depth, int(given_.lengths[text]))
            if given_.confidences[text, index] >= least:
                return depth
    return given_.layers


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.integers(20, 400))
def test_a_larger_budget_never_runs_more_layers(seed: int, texts: int) -> None:
    given_ = world(np.random.default_rng(seed), texts)
    thresholds = [choose(given_, ExitRule.CALIBRATED, max_disagreement=b).exits.thresholds.get(1, 9.0) for b in BUDGETS]
    layers = [choose(given_, ExitRule.CALIBRATED, max_disagreement=budget).mean_layers for budget in BUDGETS]
    assert thresholds == sorted(thresholds, reverse=True)
    assert layers == sorted(layers, reverse=True)


def calibrated(given_: Calibration, budget: float) -> Choice:
    return choose(given_, ExitRule.CALIBRATED, max_disagreement=budget)


def test_where_all_agree_all_leave_at_the_first_exit() -> None:
    choice = calibrated(calibration(np.full((200, 3), 0.4), np.ones((200, 3))), 0.03)
    assert (choice.exit_rate, choice.mean_layers, choice.disagreement) == (1.0, 1.0, 0.0)


def test_where_none_agree_none_leave() -> None:
    choice = calibrated(calibration(np.full((200, 3), 0.99), np.zeros((200, 3))), 0.03)
    assert (choice.exit_rate, choice.mean_layers, choice.disagreement) == (0.0, LAYERS, 0.0)


@pytest.mark.parametrize(("texts", "leave"), [(98, False), (99, True)])
def test_too_few_texts_prove_nothing(texts: int, leave: bool) -> None:
    """Without a single disagreement 99 texts are what 3% takes: 0.97**99 < 0.05."""
    choice = calibrated(calibration(np.ones((texts, 1)), np.ones((texts, 1))), 0.03)
    assert bool(choice.exits.thresholds) == leave


def test_ties_leave_together_or_not_at_all() -> None:
    confidences = np.full((300, 1), 0.9)
    agrees = np.ones((300, 1))
    agrees[:100] = 0
    assert calibrated(calibration(confidences, agrees), 0.03).exit_rate == 0
    confidences[100:] = 0.91
    choice = calibrated(calibration(confidences, agrees), 0.03)
    assert choice.exit_rate == pytest.approx(2 / 3)
    assert 0.9 < choice.exits.thresholds[1] <= 0.91


def test_depths_where_a_confidence_means_more_have_lower_thresholds() -> None:
    given_ = world(np.random.default_rng(3), 500, sharpness=(1.0, 1.0, 2.0, 2.0, 4.0))
    thresholds = calibrated(given_, 0.05).exits.thresholds
    assert thresholds[1] == thresholds[2] > thresholds[3] == thresholds[4] > thresholds[5]


def test_a_relaxation_by_length_is_calibrated_with() -> None:
    """Long texts that reach a threshold only thanks to the relaxation are wrong: the threshold rises above 1."""
    lengths = np.array([1] * 300 + [1000] * 300)
    confidences = np.where(lengths == 1, 1.0, 0.97)[:, None]
    given_ = calibration(confidences, (lengths == 1)[:, None], lengths, length_relaxation=0.01)
    assert choose(given_, ExitRule.CALIBRATED).exit_rate == 0
    assert choose(given_, ExitRule.CALIBRATED, length_relaxation=0.0).exit_rate == 0.5
    right = calibration(confidences, (lengths == 1000)[:, None], lengths, length_relaxation=0.01)
    choice = choose(right, ExitRule.CALIBRATED)
    assert choice.exit_rate == 0.5
    assert 1 < choice.exits.thresholds[1] <= 0.97 + 0.01 * math.log(1000) + 1e-12


def test_quantile_takes_the_tenth_of_the_surest_in_the_middle() -> None:
    confidences = np.stack([np.linspace(0.5, 1, 101)] * 5, axis=1)
    choice = choose(calibration(confidences, np.zeros((101, 5))), ExitRule.QUANTILE)
    assert choice.exits.thresholds == {3: 0.95}
    assert choice.exit_rate == pytest.approx(11 / 101)
    assert choice.disagreement == pytest.approx(11 / 101)


def test_fixed_takes_what_is_given_and_asks_for_it() -> None:
    given_ = calibration([[0.9, 0.96]], [[1, 1]])
    assert choose(given_, ExitRule.FIXED, threshold=0.95).exits.thresholds == {1: 0.95, 2: 0.95}
    assert choose(given_, ExitRule.FIXED, threshold=0.95).mean_layers == 2
    with pytest.raises(ValueError, match="needs a threshold"):
        choose(given_, ExitRule.FIXED)


def test_the_least_confidence_falls_with_the_length() -> None:
    exits = Exits({3: 0.95}, 0.01)
    assert exits.least_confidence(3, 1) == 0.95
    assert exits.least_confidence(3, 100) == pytest.approx(0.95 - 0.01 * math.log(100))
    with pytest.raises(KeyError):
        exits.least_confidence(2, 10)
