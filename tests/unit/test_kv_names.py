"""Names of blocks: equal exactly when the keys and values would be."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold_runtime.modes.kv_reuse import Scope, chain, tenant_salt

SCOPE = Scope("sha256:a", "chat", tenant_salt("ns", "policy", "alice"), 4, 2, 16, "float32", 8)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=60)


@given(TOKENS, TOKENS)
def test_blocks_share_a_name_exactly_as_far_as_their_tokens_are_equal_from_the_beginning(
    first: list[int], second: list[int]
) -> None:
    names, others = chain(SCOPE, first), chain(SCOPE, second)
    assert len(names) == len(first) // 8
    for index, (name, other) in enumerate(zip(names, others, strict=False)):
        assert (name == other) == (first[: (index + 1) * 8] == second[: (index + 1) * 8])


@given(TOKENS, st.integers(0, 60))
def test_a_longer_sequence_keeps_the_names_of_its_beginning(tokens: list[int], count: int) -> None:
    assert chain(SCOPE, tokens)[: len(tokens[:count]) // 8] == chain(SCOPE, tokens[:count])


@pytest.mark.parametrize("name", [one.name for one in fields(Scope) if not one.name.startswith("task")])
def test_every_part_of_the_scope_makes_other_names(name: str) -> None:
    value = getattr(SCOPE, name)
    other = replace(SCOPE, **{name: value + (1 if isinstance(value, int) else "x")})
    assert not set(chain(SCOPE, range(64))) & set(chain(other, range(64)))


def test_a_task_slice_makes_other_names_and_so_does_another_version_of_it() -> None:
    first = replace(SCOPE, task="triage", task_digest="1")
    second = replace(SCOPE, task="triage", task_digest="2")
    assert len({chain(one, range(8))[0] for one in (SCOPE, first, second)}) == 3


def test_parts_that_read_alike_together_are_told_apart() -> None:
    assert (
        replace(SCOPE, weights_digest="ab", variant="c").seed != replace(SCOPE, weights_digest="a", variant="bc").seed
    )
    assert tenant_salt("a", "b/c", "d") != tenant_salt("a/b", "c", "d") != tenant_salt("a", "b", "c/d")


def test_weights_without_a_digest_have_no_names() -> None:
    with pytest.raises(ValueError, match="digest"):
        replace(SCOPE, weights_digest="")
    with pytest.raises(ValueError, match="digest"):
        replace(SCOPE, task="triage")
