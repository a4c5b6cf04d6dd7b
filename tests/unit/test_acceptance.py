"""Accepting drafted tokens: what comes out must be distributed as the target's own draws, or say that it isn't."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold_runtime.modes.acceptance import (
    Coherence,
    Distribution,
    Threshold,
    accept,
    accept_matching,
    accept_threshold,
    reach,
)

ROUNDS = 20_000
EXCEEDED_ONCE_IN_A_THOUSAND = {3: 16.27, 7: 24.32}
"""Quantiles of chi-square by degrees of freedom."""


def sparse(*pairs: tuple[int, float]) -> Distribution:
    ids, probabilities = zip(*sorted(pairs), strict=True)
    return Distribution(np.array(ids, dtype=np.int64), np.array(probabilities, dtype=np.float64))


P = sparse((0, 0.4), (1, 0.3), (2, 0.2), (5, 0.1))
Q = sparse((0, 0.1), (1, 0.2), (3, 0.2), (5, 0.5))
"""As a nucleus of another model is: token 2 is missing, token 3 is none of the target's."""


def chi_square(counts: dict[int, int], expected: dict[int, float]) -> float:
    total = sum(counts.values())
    assert set(counts) <= set(expected), "a token without probability was drawn"
    return sum((counts.get(x, 0) - total * p) ** 2 / (total * p) for x, p in expected.items())


def tally(tokens: Sequence[int]) -> dict[int, int]:
    return {int(token): int(count) for token, count in zip(*np.unique(tokens, return_counts=True), strict=True)}


def of(distribution: Distribution) -> dict[int, float]:
    return dict(zip(distribution.ids.tolist(), distribution.probabilities.tolist(), strict=True))


def test_rejection_sampling_gives_the_targets_distribution() -> None:
    """20,000 rounds, 3 degrees of freedom, a false alarm once in a thousand seeds (this one is fixed).

    Power: a rule that is off by 0.015 of probability (0.415, 0.3, 0.2, 0.085) has a non-centrality of
    20,000 (0.015²/0.4 + 0.015²/0.1) = 56 and is caught with a probability above 0.999.
    """
    random = np.random.Generator(np.random.PCG64(1))
    first = []
    for _ in range(ROUNDS):
        drafted = [Q.draw(random.random())]
        accepted, following = accept(lambda _: P, [Q], drafted, random.random)
        first.append([*drafted[:accepted], following][0])
    assert chi_square(tally(first), of(P)) < EXCEEDED_ONCE_IN_A_THOUSAND[3]


def test_every_position_of_a_longer_draft_is_distributed_as_the_targets() -> None:
    """Pairs of tokens of a target whose second token depends on its first, against the product of its
    probabilities: 20,000 rounds, 7 degrees of freedom, a false alarm once in a thousand seeds.

    Power: shifting 0.015 from the likeliest pair (0.28) to the least likely (0.04) has a non-centrality of
    20,000 (0.015²/0.28 + 0.015²/0.04) = 129: always caught.
    """
    start = sparse((0, 0.4), (1, 0.3), (2, 0.2), (5, 0.1))
    after = {0: sparse((0, 0.7), (1, 0.3)), 1: sparse((0, 0.2), (3, 0.8)), 2: sparse((1, 0.5), (2, 0.5))}
    after[5] = sparse((0, 0.6), (5, 0.4))
    random = np.random.Generator(np.random.PCG64(2))
    pairs = []
    for _ in range(ROUNDS):
        drafted = [Q.draw(random.random()), Q.draw(random.random())]
        accepted, following = accept(
            lambda i, drafted=drafted: start if i == 0 else after[drafted[0]] if i == 1 else P,
            [Q, Q],
            drafted,
            random.random,
        )
        tokens = [*drafted[:accepted], following]
        if len(tokens) == 1:  # rejected at once: the next round starts after this token
            tokens.append(after[tokens[0]].draw(random.random()))
        pairs.append(tokens[0] * 10 + tokens[1])
    expected = {10 * x + y: p * py for x, p in of(start).items() for y, py in of(after[x]).items()}
    assert chi_square(tally(pairs), expected) < EXCEEDED_ONCE_IN_A_THOUSAND[7]


def test_the_threshold_rule_does_not() -> None:
    """It is lossy: tokens that the target gives more than 0.1 come as often as the draft proposes them."""
    random = np.random.Generator(np.random.PCG64(3))
    draft = sparse((0, 0.1), (1, 0.1), (2, 0.8))
    first = []
    for _ in range(ROUNDS):
        drafted = [draft.draw(random.random())]
        accepted, following = accept_threshold(
            lambda _: P, drafted, lambda _: P.draw(random.random()), Threshold(minimum=0.1)
        )
        first.append([*drafted[:accepted], following][0])
    counts = tally(first)
    assert chi_square(counts, of(P)) > 1000 * EXCEEDED_ONCE_IN_A_THOUSAND[3]
    assert counts[2] / ROUNDS == pytest.approx(0.8, abs=0.01)


def test_the_threshold_rule_rejects_what_the_target_finds_unlikely() -> None:
    for minimum, kept in ((0.09, 1), (0.1, 0), (0.5, 0)):
        assert accept_threshold(lambda _: P, [5], lambda position: position, Threshold(minimum)) == (kept, kept)


EMBEDDINGS = np.array([[1, 0], [1, 0.1], [0, 1], [-1, 0], [0, 0]], dtype=np.float32)


@pytest.mark.parametrize(
    ("token", "before", "admitted"),
    [
        (1, [0, 0, 0], True),
        (2, [0, 0, 0], False),
        (3, [0, 0, 0], False),
        (2, [0, 2, 2, 2], True),  # only the last three count
        (2, [0, 2], True),  # mean (0.5, 0.5): cosine 0.71
        (2, [], True),
        (4, [0, 0, 0], False),  # no direction: no coherence
    ],
)
def test_the_coherence_guard_compares_with_the_last_three_tokens(token: int, before: list[int], admitted: bool) -> None:
    guard = Coherence(lambda ids: EMBEDDINGS[list(ids)], min_cosine=0.6)
    assert guard.admits(token, before) is admitted


def test_an_accepted_token_belongs_to_the_context_of_the_next() -> None:
    guard = Coherence(lambda ids: EMBEDDINGS[list(ids)], min_cosine=0.6)
    likely = sparse((0, 0.3), (1, 0.3), (2, 0.4))
    rule = Threshold(0.1, guard)
    assert accept_threshold(lambda _: likely, [1, 0, 2], lambda _: 9, rule, before=[0]) == (2, 9)
    assert accept_threshold(lambda _: likely, [2], lambda _: 9, rule, before=[0, 0, 0]) == (0, 9)
    assert accept_threshold(lambda _: likely, [2], lambda _: 9, Threshold(0.1), before=[0, 0, 0]) == (1, 9)


def test_the_same_distribution_is_always_accepted() -> None:
    random = np.random.Generator(np.random.PCG64(4))
    for _ in range(200):
        drafted = [P.draw(random.random()) for _ in range(4)]
        assert accept(lambda _: P, [P] * 4, drafted, random.random)[0] == 4


def test_where_the_residual_is_nothing_but_rounding_the_target_is_drawn_from() -> None:
    nearly = Distribution(P.ids, P.probabilities * (1 - 1e-15))
    accepted, following = accept(lambda _: nearly, [P], [0], iter([0.9999999999999999, 0.99]).__next__)
    assert (accepted, following) == (0, 5)


@given(
    st.dictionaries(st.integers(0, 6), st.floats(0.01, 1), min_size=1),
    st.dictionaries(st.integers(0, 9), st.floats(0.01, 1), min_size=1),
    st.floats(0.001, 0.999),
)
def test_after_a_rejection_the_residual_is_drawn_from(p: dict[int, float], q: dict[int, float], uniform: float) -> None:
    """Of dense and sparse distributions alike, over vocabularies of different sizes."""
    p_of = {x: mass / sum(p.values()) for x, mass in p.items()}
    q_of = {x: mass / sum(q.values()) for x, mass in q.items()}
    rejected = [x for x in q_of if q_of[x] > p_of.get(x, 0) + 1e-6]
    rest = {x: max(0.0, p_of[x] - q_of.get(x, 0)) for x in sorted(p_of)}
    if not rejected or sum(rest.values()) < 1e-6:
        return
    target, draft = sparse(*p_of.items()), sparse(*q_of.items())
    accepted, following = accept(
        lambda _: target, [draft], rejected[:1], iter([np.nextafter(1.0, 0.0), uniform]).__next__
    )
    below = sum(mass for x, mass in rest.items() if x < following) / sum(rest.values())
    assert accepted == 0
    assert below - 1e-9 <= uniform <= below + rest[following] / sum(rest.values()) + 1e-9


def test_a_token_unknown_to_the_target_is_rejected() -> None:
    """A draft's padded vocabulary may be longer than the target's."""
    accepted, following = accept(lambda _: P, [sparse((900, 1.0))], [900], iter([0.0, 0.0]).__next__)
    assert (accepted, following) == (0, 0)


def test_the_target_is_not_asked_beyond_a_rejection() -> None:
    asked = []

    def target(position: int) -> Distribution:
        asked.append(position)
        return sparse((position, 1.0))

    point = [sparse((0, 1.0)), sparse((7, 1.0)), sparse((2, 1.0))]
    assert accept(target, point, [0, 7, 2], lambda: 0.5) == (1, 1)
    assert asked == [0, 1]
    assert accept_matching(lambda position: [0, 1, 2][position], [0, 7]) == (1, 1)
    assert accept_matching(lambda position: [0, 1, 2][position], [0, 1]) == (2, 2)


def test_a_draft_without_its_distributions_is_an_error() -> None:
    with pytest.raises(ValueError):
        accept(lambda _: P, [], [0], lambda: 0.5)


@given(
    st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1)), min_size=1, max_size=40).filter(any),
    st.integers(1, 100),
    st.floats(0, 1, exclude_max=True),
)
def test_a_draw_by_blocks_is_the_draw_by_one_running_sum(weights: list[float], times: int, uniform: float) -> None:
    probabilities = np.repeat(weights, times) / sum(weights) / times
    running = np.cumsum(probabilities)
    index = reach(probabilities, uniform)
    assert probabilities[index] > 0
    assert running[index] >= uniform - 1e-12
    assert index == 0 or running[index - 1] <= uniform + 1e-12


@pytest.mark.parametrize("size", [3, 600, 4096, 4100])
def test_rounding_never_leads_to_a_token_without_probability(size: int) -> None:
    probabilities = np.zeros(size)
    probabilities[: size // 2 + 1] = 1 / (size // 2 + 1)
    assert reach(probabilities, 1.5) == size // 2


@pytest.mark.parametrize("dense", [True, False])
def test_probabilities_of_single_tokens(dense: bool) -> None:
    distribution = sparse((0, 0.5), (1, 0.25), (2, 0.25)) if dense else sparse((3, 0.5), (9, 0.5))
    assert distribution.is_dense is dense
    assert [distribution.of(token) for token in (0, 3, 9, 10)] == ([0.5, 0, 0, 0] if dense else [0, 0.5, 0.5, 0])
