"""From which length on it pays to look for keys and values."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sixfold_runtime.modes.kv_reuse import NEVER_TOKENS, ReuseCosts

POSITIVE = st.floats(1e-6, 10, allow_nan=False)


def measured(prefill_token: float, fixed: float, token: float) -> ReuseCosts:
    costs = ReuseCosts()
    for tokens in (0, 64, 640, 0, 128, 320) * 10:
        costs.observe_prefill(100, 100 * prefill_token)
        costs.observe_lookup(tokens, fixed + token * tokens)
    return costs


def test_before_anything_is_measured_every_prompt_with_a_whole_block_is_looked_up() -> None:
    costs = ReuseCosts()
    assert costs.least_tokens(32) == 33
    costs.observe_lookup(0, 0.1)
    assert costs.least_tokens(32) == 33
    assert costs.wants(33, 32) and not costs.wants(32, 32)


def test_the_least_length_is_where_computing_takes_longer_than_finding() -> None:
    # 20 ms + 0.1 ms a token against 0.5 ms a token: 50 tokens, so two blocks, and one token that is always computed.
    assert measured(0.0005, 0.02, 0.0001).least_tokens(32) == 65


def test_finding_that_takes_longer_a_token_than_computing_never_pays_but_is_tried_now_and_then() -> None:
    costs = measured(0.0001, 0.02, 0.0005)
    assert costs.least_tokens(32) == NEVER_TOKENS
    assert sum(costs.wants(2000, 32) for _ in range(320)) == 10
    for _ in range(100):
        costs.observe_lookup(2000, 0.01)
        costs.observe_lookup(0, 0.001)
    assert costs.wants(2000, 32)


def test_a_chosen_length_counts_and_nothing_else() -> None:
    costs = measured(0.0001, 0.02, 0.0005)
    assert costs.wants(100, 32, 100) and not costs.wants(99, 32, 100)
    assert not costs.wants(32, 32, 1)


@given(
    st.lists(st.tuples(st.integers(0, 4096), POSITIVE), max_size=30),
    st.lists(POSITIVE, max_size=5),
    st.integers(8, 512),
)
def test_the_least_length_always_has_a_block_and_a_token(
    lookups: list[tuple[int, float]], prefills: list[float], block: int
) -> None:
    costs = ReuseCosts()
    for seconds in prefills:
        costs.observe_prefill(64, seconds)
    for tokens, seconds in lookups:
        costs.observe_lookup(tokens, seconds)
    assert block < costs.least_tokens(block) <= NEVER_TOKENS
