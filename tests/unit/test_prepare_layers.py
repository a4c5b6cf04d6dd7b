"""Which precision each linear gets: overrides, what can't be packed, and who gets more bits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold_api.precision import Precision
from sixfold_runtime.prepare.failures import PreparationError
from sixfold_runtime.prepare.layers import Grid, LinearShape, base_grid, describe, dynamic, gptq_plan, widened, worst

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LINEARS = {
    f"model.layers.{layer}.{block}.{name}": LinearShape(256 if name == "down_proj" else 128, 128)
    for layer in range(2)
    for block, names in (("self_attn", ATTENTION), ("mlp", MLP))
    for name in names
}


def plan(**precision):
    return gptq_plan(LINEARS, Precision.model_validate({"scheme": "GPTQ", **precision}))


def test_four_bits_in_groups_of_128_are_the_default():
    assert set(plan().values()) == {Grid(4, 128)}


def test_the_first_override_that_matches_counts():
    made = plan(
        modules=[
            {"match": "layers.0.self_attn.*", "bits": 8},
            {"match": "o_proj", "full": True},
            {"match": "self_attn.q_proj", "bits": 2, "groupSize": 64},
        ]
    )
    assert made["model.layers.0.self_attn.o_proj"] == Grid(8, 128)
    assert made["model.layers.1.self_attn.o_proj"] is None
    assert made["model.layers.1.self_attn.q_proj"] == Grid(2, 64)
    assert made["model.layers.1.mlp.up_proj"] == Grid(4, 128)


def test_a_name_matches_from_a_dot_on():
    assert plan(modules=[{"match": "up_proj", "bits": 8}])["model.layers.0.mlp.up_proj"] == Grid(8, 128)
    with pytest.raises(PreparationError, match="'p_proj' matches no linear"):
        plan(modules=[{"match": "p_proj", "bits": 8}])


def test_groups_must_divide_the_inputs():
    with pytest.raises(PreparationError, match=r"groups of 256 don't divide the 128 inputs of .*q_proj: use 128"):
        plan(groupSize=256)
    assert plan(groupSize=-1)["model.layers.0.mlp.down_proj"] == Grid(4, -1)


def test_what_cannot_be_packed_is_named():
    with pytest.raises(PreparationError, match=r"layers\.0\.head has 128 inputs and 10 outputs"):
        gptq_plan({"layers.0.head": LinearShape(128, 10)}, Precision.model_validate({"scheme": "GPTQ"}))


def test_nothing_left_to_quantise():
    with pytest.raises(PreparationError, match="every linear in full precision"):
        plan(modules=[{"match": "*", "full": True}])


def test_linears_of_one_call_get_more_bits_together():
    losses = dict.fromkeys(LINEARS, 0.0) | {"model.layers.1.self_attn.k_proj": 3.0, "model.layers.0.mlp.down_proj": 2.0}
    assert worst(losses, 0.25) == {
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.k_proj",
        "model.layers.1.self_attn.v_proj",
        "model.layers.0.mlp.down_proj",
    }


@given(st.lists(st.floats(0, 10), min_size=14, max_size=14), st.floats(0.01, 1))
def test_a_larger_share_contains_the_smaller_one(values, share):
    losses = dict(zip(LINEARS, values, strict=True))
    some = worst(losses, share)
    assert len(some) >= share * len(LINEARS)
    assert some <= worst(losses, 1.0) == set(LINEARS)
    left = [losses[name] for name in losses if name not in some]
    assert not left or max(left) <= max(losses[name] for name in some)


def test_overrides_are_written_by_exact_name():
    made = plan(modules=[{"match": "o_proj", "full": True}, {"match": "down_proj", "bits": 8}])
    base = base_grid(made)
    assert base == Grid(4, 128)
    assert dynamic(made, base) == {
        r"-:^model\.layers\.0\.self_attn\.o_proj$": {},
        r"-:^model\.layers\.1\.self_attn\.o_proj$": {},
        r"+:^model\.layers\.0\.mlp\.down_proj$": {"bits": 8, "group_size": 128},
        r"+:^model\.layers\.1\.mlp\.down_proj$": {"bits": 8, "group_size": 128},
    }
    assert describe(made) == "10 linears at 4 bits, 2 linears at 8 bits, 2 linears in full precision"


def test_more_bits_leave_full_precision_alone():
    made = widened(plan(modules=[{"match": "o_proj", "full": True}]))
    assert made["model.layers.0.self_attn.o_proj"] is None
    assert made["model.layers.0.self_attn.q_proj"] == Grid(8, 128)
