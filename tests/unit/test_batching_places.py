"""Where requests go for their keys and values, and who gives way in a full queue."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from sixfold_api.gateway import Priority
from sixfold_runtime.gateway.affinity import conversation_key, nearest, prompt_key
from sixfold_runtime.modes.fair_shares import Shares, displaced

KEYS = [conversation_key("t", str(number)) for number in range(300)]
PODS = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=5, unique=True)
FLOWS = st.tuples(st.sampled_from(["one", "two", "three"]), st.sampled_from(Priority))


# Where


@given(PODS, st.randoms())
def test_every_gateway_comes_to_the_same_pod(pods: list[str], random: object) -> None:
    shuffled = pods.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert all(nearest(key, pods) == nearest(key, shuffled) for key in KEYS[:20])


@given(PODS)
def test_only_the_keys_of_a_pod_that_left_move(pods: list[str]) -> None:
    before = {key: nearest(key, pods) for key in KEYS}
    for key, pod in before.items():
        if pod != pods[0]:
            assert nearest(key, pods[1:]) == pod
    assert nearest(KEYS[0], []) is None


def test_pods_get_alike_many() -> None:
    counts = Counter(nearest(key, ["engine-0", "engine-1", "engine-2"]) for key in KEYS)
    assert min(counts.values()) > 70


def test_prompts_with_the_same_first_block_belong_together_and_tenants_do_not() -> None:
    ids = list(range(40))
    assert prompt_key("t", ids, 16) == prompt_key("t", [*ids[:16], 999], 16)
    assert prompt_key("t", ids, 16) != prompt_key("t", [1, *ids[1:]], 16)
    assert prompt_key("t", ids, 16) != prompt_key("u", ids, 16)
    assert prompt_key("t", ids[:15], 16) is None, "it has no whole block"
    assert prompt_key("t", ids, 0) is None, "nothing is kept"
    assert conversation_key("t", "x") != conversation_key("tx", "") != conversation_key("t", "y")


# A full queue


@given(st.lists(FLOWS, min_size=1, max_size=30), FLOWS)
def test_who_has_most_gives_way(waiting: list[tuple[str, Priority]], arriving: tuple[str, Priority]) -> None:
    index = displaced(waiting, arriving)
    flows = [*waiting, arriving]
    counts = Counter(tenant for tenant, _ in flows)
    tenant, priority = arriving if index is None else waiting[index]
    assert counts[tenant] == max(counts.values())
    own = [flow for flow in flows if flow[0] == tenant]
    assert priority.rank == min(flow[1].rank for flow in own)
    if index is None:
        return
    later = waiting[index + 1 :]
    assert (tenant, priority) not in later, "who came last gives way"
    assert arriving[0] != tenant or arriving[1].rank > priority.rank


def test_examples_of_a_full_queue() -> None:
    low, normal, high = (("one", priority) for priority in Priority)
    assert displaced([normal, normal], normal) is None
    assert displaced([normal, low, low], high) == 2
    assert displaced([normal, normal, ("two", Priority.LOW)], ("two", Priority.LOW)) is None
    assert displaced([normal, normal, normal, ("two", Priority.LOW)], ("two", Priority.LOW)) == 2


@given(st.lists(st.tuples(FLOWS, st.integers(1, 3000)), max_size=50))
def test_time_goes_on_and_nobody_is_behind_it(charges: list[tuple[tuple[str, Priority], int]]) -> None:
    shares = Shares()
    least = 0.0
    for flow, tokens in charges:
        before = shares[flow]
        shares.follow({flow})
        shares.charge(flow, tokens)
        assert shares[flow] > before or tokens == 0
        now = shares["nobody", Priority.NORMAL]
        assert now >= least
        least = now
    assert all(got >= least for got in shares.values())
