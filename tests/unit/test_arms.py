"""Which requests are the canary's."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from sixfold_api.analysis import HashBy
from sixfold_api.runtime_config import CANARY, STABLE, CanaryConfig
from sixfold_runtime.config import default_config
from sixfold_runtime.length_bucket import LENGTH_BUCKETS, length_bucket
from sixfold_runtime.modes.arms import arm_key, arm_of, chat_beginning, prompt_beginning

CONFIG = default_config(3).stable
KEYS = [str(number).encode() for number in range(20_000)]


def canary(percent: int) -> CanaryConfig:
    return CanaryConfig(percent=percent, config=CONFIG)


def share(percent: int, keys: list[bytes] = KEYS) -> float:
    return sum(arm_of(canary(percent), key) == CANARY for key in keys) / len(keys)


@given(st.binary(max_size=200))
def test_without_a_canary_all_is_stable(key: bytes) -> None:
    assert arm_of(None, key) == STABLE


@given(st.binary(max_size=200), st.integers(1, 99), st.integers(1, 99))
def test_what_is_in_stays_in_as_the_share_grows(key: bytes, one: int, other: int) -> None:
    arms = [arm_of(canary(percent), key) for percent in sorted((one, other))]
    assert arms in ([STABLE, STABLE], [STABLE, CANARY], [CANARY, CANARY])


def test_the_share_is_the_percentage() -> None:
    """The keys never change, so nothing here is left to chance; 4 standard deviations are more than enough."""
    for percent in (1, 5, 25, 50, 75, 99):
        expected = percent / 100
        spread = math.sqrt(expected * (1 - expected) / len(KEYS))
        assert abs(share(percent) - expected) < 4 * spread, percent


def test_every_step_of_one_percent_takes_its_part() -> None:
    """Chi-square over 100 cells: 160 is far beyond what even keys give (99 on average, 14 the standard deviation)."""
    first = [next((p for p in range(1, 100) if arm_of(canary(p), key) == CANARY), 100) for key in KEYS[:10_000]]
    expected = len(first) / 100
    assert sum((first.count(step) - expected) ** 2 / expected for step in range(1, 101)) < 160


def key(**changes: object) -> bytes:
    usual = {
        "hash_by": HashBy.CONVERSATION,
        "request_id": "r1",
        "tenant": "t",
        "conversation": "",
        "beginning": ["user", "hello"],
    }
    return arm_key(**{**usual, **changes})  # type: ignore[arg-type]


def test_a_conversation_is_told_by_its_name_else_by_its_beginning() -> None:
    assert key() == key(request_id="r2")
    assert key(conversation="c") == key(conversation="c", request_id="r2", beginning=["another"])
    different = [key(), key(tenant="u"), key(beginning=["user", "bye"]), key(conversation="c")]
    different += [key(conversation="c", tenant="u"), key(hash_by=HashBy.REQUEST), key(beginning=["userhello"])]
    assert len(set(different)) == len(different)


def test_requests_are_told_by_their_ids_alone() -> None:
    by_request = [key(hash_by=HashBy.REQUEST, conversation=conversation) for conversation in ("", "c")]
    assert by_request[0] == by_request[1] != key(hash_by=HashBy.REQUEST, request_id="r2")


@given(st.lists(st.text(max_size=5)), st.lists(st.text(max_size=5)))
def test_no_two_beginnings_share_a_key(one: list[str], other: list[str]) -> None:
    assert (key(beginning=one) == key(beginning=other)) == (one == other)


def test_later_turns_have_the_beginning_of_the_first() -> None:
    first = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    later = [*first, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "How are you?"}]
    other = [first[0], {"role": "user", "content": "Bye"}]
    assert chat_beginning(first) == chat_beginning(later) != chat_beginning(other)
    long = "word " * 100
    assert prompt_beginning(long) == prompt_beginning(long + "and more") != prompt_beginning("Other " + long)
    ids = list(range(100))
    assert prompt_beginning(ids) == prompt_beginning([*ids, 7]) != prompt_beginning([7, *ids])
    assert key(beginning=[prompt_beginning(ids)]) != key(beginning=[prompt_beginning(long)])


@given(st.integers(1, 100_000))
def test_every_length_has_a_bucket_and_longer_ones_no_earlier(tokens: int) -> None:
    places = [LENGTH_BUCKETS.index(length_bucket(count)) for count in (tokens, tokens + 1)]
    assert places == sorted(places)
    assert length_bucket(0) == ""
