"""The FLOPs model, a request's account and the memory of seen blocks, as pure functions."""

from __future__ import annotations

import math
import random
from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from sixfold_runtime.modes.kv_reuse import Scope, chain
from sixfold_runtime.waste import Cause, ModelFlops, wasted_flops_ratio
from sixfold_runtime.waste_account import Account
from sixfold_runtime.waste_blocks import SeenBlocks

SHAPES = st.builds(
    ModelFlops,
    layers=st.integers(1, 8),
    layer_weights=st.integers(1, 1000),
    attention_width=st.integers(1, 100),
    output_weights=st.integers(0, 1000),
)


def test_one_layer_by_hand() -> None:
    """Two tokens through a layer with 10 weights, attention of width 3, and 5 weights behind it."""
    flops = ModelFlops(layers=1, layer_weights=10, attention_width=3, output_weights=5)
    assert flops.text(2) == 2 * 2 * 10 + 2 * (2 * 2 * 2 * 3)
    assert flops.forward(0, 0, 1) == 10
    assert flops.unit_costs == (20, 12, 10)


@given(SHAPES, st.integers(0, 50), st.integers(0, 50), st.integers(0, 8))
def test_layers_add_up_and_longer_texts_never_cost_less(flops: ModelFlops, tokens: int, more: int, k: int) -> None:
    k = min(k, flops.layers)
    assert flops.text(tokens, k) + flops.text(tokens, flops.layers - k) == flops.text(tokens)
    assert flops.text(tokens + more) >= flops.text(tokens) + flops.text(more)


@given(st.floats(0, 1e20), st.floats(0, 1e20))
def test_the_ratio_is_a_share(useful: float, wasted: float) -> None:
    ratio = wasted_flops_ratio(useful, wasted)
    assert 0 <= ratio <= 1 if useful + wasted else math.isnan(ratio)


@given(
    flops=SHAPES,
    prompt=st.integers(1, 60),
    piece=st.integers(1, 60),
    seen=st.integers(0, 59),
    steps=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 1000), st.integers(0, 9)), max_size=8
    ),
)
def test_an_account_holds_all_that_was_spent(
    flops: ModelFlops, prompt: int, piece: int, seen: int, steps: list[tuple[int, int, int, int]]
) -> None:
    """Whatever becomes of it, nothing is lost and nothing is negative."""
    token, pair, output = flops.unit_costs
    account, spent = Account(seen_tokens=min(seen, prompt - 1)), 0
    for start in range(0, prompt, piece):
        count = min(piece, prompt - start)
        own = flops.forward(count, count * (start + count), 1)
        account.prefill(token, pair, output, start, count, own + 7)
        spent += own + 7
    recomputed = account.recomputed
    assert recomputed >= flops.forward(account.seen_tokens, account.seen_tokens**2 if piece >= prompt else 0)
    context = prompt + 1
    for drafted, accepted, draft_flops, padding in steps:
        accepted = min(accepted, drafted)
        account.draft()
        account.drafted += [draft_flops] * drafted
        own = flops.forward(1 + drafted, (1 + drafted) * (context + drafted), 1 + drafted)
        account.decode(token + output, pair, context, drafted, own + padding)
        account.settle(token + output, pair, context, drafted, accepted)
        spent += own + padding + draft_flops * drafted
        context += accepted + 1
    totals = list(account.totals(is_cancelled=False))
    assert sum(total for total, _, _ in totals) == spent
    assert min(total for total, _, _ in totals) >= 0
    assert account.recomputed == recomputed, "decoding repeats nothing"
    if all(drafted == accepted for drafted, accepted, _, _ in steps):
        assert account.rejected == 0
    assert list(account.totals(is_cancelled=True)) == [(spent, Cause.CANCELLED, False)]


def test_what_was_drafted_and_never_verified_is_lost() -> None:
    account = Account()
    account.drafted += [5, 5]
    assert next(account.totals(is_cancelled=False)) == (10, None, False), "as long as it is on its way"
    account.draft()
    assert (account.rejected, account.drafted) == (10, [])


def names(prompt: list[int]) -> list[bytes]:
    scope = Scope("weights", "chat", "salt", 1, 1, 1, "float32", block_tokens=4)
    return chain(scope, prompt)


def test_only_beginnings_are_seen() -> None:
    seen = SeenBlocks()
    prompt = list(range(20))
    seen.remember(names(prompt), "tenant")
    assert seen.leading(names(prompt)) == 5
    assert seen.leading(names([*prompt[:10], 99, *prompt[11:]])) == 2
    assert seen.leading(names(prompt[1:])) == 0


def test_a_tenant_is_forgotten_alone() -> None:
    seen = SeenBlocks()
    seen.remember(names([1] * 8), "one")
    seen.remember(names([2] * 8), "two")
    seen.forget("one")
    assert (seen.leading(names([1] * 8)), seen.leading(names([2] * 8))) == (0, 2)


def test_memory_is_bounded_and_drops_the_longest_unused() -> None:
    seen, model = SeenBlocks(most_blocks=16), OrderedDict[bytes, None]()
    random.seed(3)
    for _ in range(500):
        asked = names([random.randrange(2) for _ in range(random.randrange(24))])
        found = 0
        for name in asked:
            if name not in model:
                break
            model.move_to_end(name)
            found += 1
        assert seen.leading(asked) == found
        seen.remember(asked, "tenant")
        for name in asked:
            model[name] = None
            model.move_to_end(name)
        while len(model) > 16:
            model.popitem(last=False)
        assert len(seen) == len(model) <= 16
