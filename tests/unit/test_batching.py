"""Which requests go together, where and when: the decision is a pure function of queue, engines, clock and settings."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold_api.gateway import Priority
from sixfold_api.runtime_config import BatchingConfig
from sixfold_runtime.modes.batch_costs import Costs
from sixfold_runtime.modes.batching import (
    GRACE_BATCHES,
    LEAD_SECONDS,
    PATIENCE,
    Engine,
    Plan,
    Waiting,
    at_once,
    due_seconds,
    plan,
    window_seconds,
)
from sixfold_runtime.modes.fair_shares import Flow, Shares

CONFIG = BatchingConfig(
    max_batch_tokens=1024,
    short_wait_seconds=0.010,
    long_wait_seconds=0.005,
    max_wait_seconds=0.015,
    max_queued_requests=1000,
)
IDLE = Engine("a")
TOKENS = st.integers(1, 2500)
TIMES = st.floats(0, 10)
ENGINES = st.lists(
    st.builds(
        Engine[str],
        key=st.sampled_from("abc"),
        batches=st.integers(0, 3),
        free_at_seconds=st.none() | st.floats(0, 12),
        requests=st.integers(0, 50),
        overhead_tokens=st.floats(8, 256),
        token_seconds=st.floats(0, 0.001),
        is_last_choice=st.booleans(),
    ),
    max_size=3,
    unique_by=lambda engine: engine.key,
)
REQUESTS = st.lists(
    st.builds(
        Waiting[int, str],
        key=st.integers(),
        tokens=TOKENS,
        arrived_seconds=TIMES,
        tenant=st.sampled_from(["", "one", "two"]),
        priority=st.sampled_from(Priority),
        deadline_seconds=st.none() | TIMES,
        preferred=st.none() | st.sampled_from("abcd"),
        excluded=st.sets(st.sampled_from("abc"), max_size=2).map(tuple),
    ),
    max_size=30,
    unique_by=lambda request: request.key,
)
SERVED = st.dictionaries(st.tuples(st.sampled_from(["", "one", "two"]), st.sampled_from(Priority)), st.floats(0, 1e6))


def waiting(*tokens: int, **fields: Any) -> list[Waiting[int, str]]:
    return [Waiting(key, length, **{"arrived_seconds": 0.0, **fields}) for key, length in enumerate(tokens)]


def sent(decided: Plan[int, str]) -> list[list[int]]:
    return [sorted(batch.keys) for batch in decided.batches]


# What always holds


@given(REQUESTS, ENGINES, st.floats(0, 12), SERVED)
def test_nothing_is_sent_twice_and_nothing_is_both_sent_and_expired(
    requests: list[Waiting[int, str]], engines: list[Engine[str]], now: float, served: dict[Flow, float]
) -> None:
    decided = plan(requests, engines, now, CONFIG, served)
    by_key = {request.key: request for request in requests}
    keys = [key for batch in decided.batches for key in batch.keys] + list(decided.expired)
    assert len(keys) == len(set(keys)) and set(keys) <= by_key.keys()
    for request in requests:
        is_over = request.deadline_seconds is not None and request.deadline_seconds <= now
        assert (request.key in decided.expired) == is_over
    for batch in decided.batches:
        lengths = [by_key[key].tokens for key in batch.keys]
        assert batch.padded_tokens == max(lengths) * len(lengths) and batch.actual_tokens == sum(lengths)
        assert batch.padded_tokens <= CONFIG.max_batch_tokens or len(lengths) == 1
        assert all(batch.engine not in by_key[key].excluded for key in batch.keys)
        assert max(lengths) - min(lengths) <= 256, "padding that costs more than a batch of its own"
    for engine in engines:
        taken = sum(batch.engine == engine.key for batch in decided.batches)
        assert taken <= max(0, 2 - engine.batches)
    assert decided.wake_seconds is None or decided.wake_seconds > now


@given(REQUESTS, ENGINES, st.floats(0, 12), SERVED)
def test_an_idle_engine_gets_work_at_once(
    requests: list[Waiting[int, str]], engines: list[Engine[str]], now: float, served: dict[Flow, float]
) -> None:
    decided = plan(requests, engines, now, CONFIG, served)
    gone = {key for batch in decided.batches for key in batch.keys} | set(decided.expired)
    used = {batch.engine for batch in decided.batches}
    usable = [engine for engine in engines if not engine.is_last_choice]
    for engine in usable:
        if engine.batches == 0 and engine.key not in used:
            assert all(engine.key in request.excluded for request in requests if request.key not in gone)


@given(REQUESTS, ENGINES, st.floats(0, 12), SERVED)
def test_what_could_go_later_wakes_the_planner(
    requests: list[Waiting[int, str]], engines: list[Engine[str]], now: float, served: dict[Flow, float]
) -> None:
    """When the plan says nothing happens before then, nothing does; and it never forgets a deadline or a window."""
    decided = plan(requests, engines, now, CONFIG, served)
    gone = {key for batch in decided.batches for key in batch.keys} | set(decided.expired)
    rest = [request for request in requests if request.key not in gone]
    used = {batch.engine: batch for batch in decided.batches}
    engines = [
        replace(engine, batches=engine.batches + 1, free_at_seconds=math.inf) if engine.key in used else engine
        for engine in engines
    ]
    later = 1000.0 if decided.wake_seconds is None else (now + decided.wake_seconds) / 2
    if decided.wake_seconds is not None:
        again = plan(rest, engines, later, CONFIG, served)
        assert not again.batches and not again.expired
        after = plan(rest, engines, decided.wake_seconds, CONFIG, served)
        assert after.batches or after.expired or after.wake_seconds is None or after.wake_seconds > later
    else:
        assert all(request.deadline_seconds is None for request in rest)


@given(st.lists(TOKENS, min_size=1, max_size=60), st.integers(0, 2**32))
@settings(max_examples=50)
def test_waits_are_bounded(lengths: list[int], seed: int) -> None:
    """One engine: whoever waits is passed only by those that came at most its patience later, windows included."""
    random_ = random.Random(seed)
    token_seconds, batch_seconds = 1e-4, 0.005
    arrived = sorted(random_.uniform(0, 1.0) for _ in lengths)
    requests = [Waiting[int, str](i, n, t) for i, (n, t) in enumerate(zip(lengths, arrived, strict=True))]
    waits = served_alone(requests, token_seconds, batch_seconds)
    assert set(waits) == set(range(len(requests)))
    for request in requests:
        latest = request.arrived_seconds + CONFIG.max_wait_seconds + PATIENCE * token_seconds * request.tokens
        before = [other for other in requests if other.key != request.key and other.arrived_seconds <= latest]
        # Each of those before it takes a batch of its own at the worst, and one batch may be under way.
        most = sum(batch_seconds + token_seconds * max(CONFIG.max_batch_tokens, other.tokens) for other in before)
        running = batch_seconds + token_seconds * max(CONFIG.max_batch_tokens, *lengths)
        assert waits[request.key] <= most + running + CONFIG.max_wait_seconds + 1e-9


def served_alone(requests: Sequence[Waiting[int, str]], token_seconds: float, batch_seconds: float) -> dict[int, float]:
    """How long each waits before one engine begins with it."""
    now, todo, waits = 0.0, list(requests), dict[int, float]()
    engine = Engine("a", token_seconds=token_seconds, overhead_tokens=batch_seconds / token_seconds)
    while todo:
        here = [request for request in todo if request.arrived_seconds <= now]
        decided = plan(here, [engine], now, CONFIG, {})
        if not decided.batches:
            now = min(request.arrived_seconds for request in todo)
            continue
        [batch] = decided.batches[:1]
        for request in [request for request in todo if request.key in batch.keys]:
            waits[request.key] = now - request.arrived_seconds
            todo.remove(request)
        now += batch_seconds + token_seconds * batch.padded_tokens
    return waits


# What goes together


def test_requests_of_like_length_go_together() -> None:
    decided = plan(waiting(200, 10, 190, 500, 210), [IDLE], 0.0, CONFIG, {})
    assert sent(decided) == [[1]]
    engines = [IDLE, Engine("b"), Engine("c")]
    assert sorted(sent(plan(waiting(200, 10, 190, 800, 210), engines, 0.0, CONFIG, {}))) == [[0, 2, 4], [1], [3]]


def test_a_batch_is_within_the_budget() -> None:
    decided = plan(waiting(*[100] * 25), [IDLE], 1.0, CONFIG, {})
    assert [len(batch.keys) for batch in decided.batches] == [10]
    assert decided.batches[0].padded_tokens == 1000


def test_a_request_larger_than_the_budget_goes_alone() -> None:
    decided = plan(waiting(3000, 2990), [IDLE, Engine("b")], 1.0, CONFIG, {})
    assert sorted(sent(decided)) == [[0], [1]]


def test_padding_never_costs_more_than_a_batch_of_its_own() -> None:
    cheap, dear = replace(IDLE, overhead_tokens=20.0), replace(IDLE, overhead_tokens=200.0)
    assert sent(plan(waiting(100, 150), [cheap], 1.0, CONFIG, {})) == [[0]]
    assert sent(plan(waiting(100, 150), [dear], 1.0, CONFIG, {})) == [[0, 1]]


def test_a_full_batch_takes_those_that_are_padded_least() -> None:
    requests = waiting(*[480] * 3, *[500] * 3)
    [batch] = plan(requests, [replace(IDLE, overhead_tokens=64.0)], 1.0, CONFIG, {}).batches
    assert batch.actual_tokens == batch.padded_tokens


def test_short_ones_are_first_within_a_batch_and_urgent_ones_before_them() -> None:
    requests = waiting(60, 40, 50)
    requests.append(Waiting(3, 70, 0.0, priority=Priority.HIGH))
    [batch] = plan(requests, [IDLE], 1.0, CONFIG, {}).batches
    assert batch.keys == (3, 1, 2, 0)


# When


def test_a_lone_request_goes_at_once() -> None:
    decided = plan(waiting(50, arrived_seconds=7.0), [IDLE], 7.0, CONFIG, {})
    assert sent(decided) == [[0]] and decided.wake_seconds is None


@pytest.mark.parametrize(("tokens", "seconds"), [(99, 0.010), (100, 0.015), (500, 0.015), (501, 0.005)])
def test_windows_by_length(tokens: int, seconds: float) -> None:
    assert window_seconds(tokens, CONFIG) == seconds
    busy = Engine("a", batches=1)
    waiting_one = waiting(tokens, arrived_seconds=1.0)
    decided = plan(waiting_one, [busy], 1.0, CONFIG, {})
    assert not decided.batches and decided.wake_seconds == due_seconds(waiting_one[0], CONFIG)
    assert sent(plan(waiting_one, [busy], decided.wake_seconds, CONFIG, {})) == [[0]]


def test_a_batch_is_sent_ahead_only_when_the_engine_is_nearly_free() -> None:
    """Before that its order can still change."""
    busy = Engine("a", batches=1, free_at_seconds=2.0)
    decided = plan(waiting(50), [busy], 1.0, CONFIG, {})
    assert not decided.batches and decided.wake_seconds == 2.0 - LEAD_SECONDS
    assert sent(plan(waiting(50), [busy], 2.0 - LEAD_SECONDS, CONFIG, {})) == [[0]]


def test_an_engine_with_a_batch_behind_the_one_it_computes_gets_no_more() -> None:
    decided = plan(waiting(50), [Engine("a", batches=2, free_at_seconds=0.5)], 1.0, CONFIG, {})
    assert decided == Plan()


def test_a_deadline_is_kept() -> None:
    requests = waiting(50, deadline_seconds=3.0)
    full = [Engine("a", batches=2)]
    assert plan(requests, full, 2.0, CONFIG, {}) == Plan(wake_seconds=3.0)
    assert plan(requests, full, 3.0, CONFIG, {}) == Plan(expired=(0,))
    assert plan(requests, [], 3.0, CONFIG, {}) == Plan(expired=(0,))


# Who


def test_high_priority_joins_the_batch_that_is_being_built() -> None:
    requests = [*waiting(*[300] * 20), Waiting(99, 40, 0.9, priority=Priority.HIGH)]
    [batch] = plan(requests, [IDLE], 1.0, CONFIG, {}).batches
    assert batch.keys == (99,)
    requests[-1] = replace(requests[-1], tokens=310)
    [batch] = plan(requests, [IDLE], 1.0, CONFIG, {}).batches
    assert batch.keys[0] == 99 and len(batch.keys) == 3


def batches_until_sent(
    own: Waiting[int, str], rival: Waiting[int, str], shares: Shares, most_batches: int = 1000
) -> tuple[int, dict[str, int]]:
    """How many batches of an endless stream of `rival`s go first, and what each tenant got."""
    got: dict[str, int] = {}
    for count in range(most_batches):
        requests = [own, *(replace(rival, key=key) for key in range(1, 3))]
        shares.follow({request.flow for request in requests})
        [batch] = plan(requests, [IDLE], 100.0, CONFIG, shares).batches
        for request in requests:
            if request.key in batch.keys:
                shares.charge(request.flow, request.tokens)
                got[request.tenant] = got.get(request.tenant, 0) + request.tokens
        if own.key in batch.keys:
            return count, got
    raise AssertionError(f"not sent within {most_batches} batches")


@pytest.mark.parametrize(
    ("priority", "batches"),
    # Of a rival of High priority, tokens count an eighth towards what lower ones are owed.
    [(Priority.HIGH, GRACE_BATCHES), (Priority.NORMAL, GRACE_BATCHES * 8), (Priority.LOW, GRACE_BATCHES * 8)],
)
def test_an_endless_stream_of_high_priority_starves_nobody(priority: Priority, batches: int) -> None:
    rival = Waiting[int, str](1, 1000, 0.0, "rival", Priority.HIGH)
    own = Waiting[int, str](0, 500, 99.0, "own", priority)
    count, _ = batches_until_sent(own, rival, Shares())
    assert batches <= count <= batches * 1024 / 1000 + 1


def test_short_ones_don_t_starve_a_long_one() -> None:
    engine = replace(IDLE, token_seconds=1e-4)
    old = Waiting[int, str](0, 2000, 0.0)
    patience = PATIENCE * 1e-4 * 2000 + 0.015
    young = [Waiting[int, str](key, 20, patience + 0.001) for key in range(1, 50)]
    assert sent(plan([old, *young], [engine], patience + 0.001, CONFIG, {})) == [[0]]


def test_tenants_share_what_there_is() -> None:
    """One that floods the queue waits behind one that asks now and then, and both get on."""
    shares, order = Shares(), list[str]()
    flood = [Waiting[int, str](key, 1000, 0.0, "flood") for key in range(400)]
    modest = [Waiting[int, str](1000 + key, 1000, 50.0, "modest") for key in range(40)]
    todo = [*flood, *modest]
    while any(request.tenant == "modest" for request in todo):
        shares.follow({request.flow for request in todo})
        [batch] = plan(todo, [IDLE], 100.0, CONFIG, shares).batches
        [request] = [request for request in todo if request.key in batch.keys]
        shares.charge(request.flow, request.tokens)
        order.append(request.tenant)
        todo.remove(request)
    assert order.count("flood") <= 40 + 2 * GRACE_BATCHES
    assert order.count("flood") >= 30


def test_nobody_saves_up_a_claim() -> None:
    shares = Shares()
    for _ in range(100):
        shares.follow({("busy", Priority.NORMAL)})
        shares.charge(("busy", Priority.NORMAL), 10_000)
    shares.follow({("busy", Priority.NORMAL)})
    assert shares["late", Priority.NORMAL] == shares["busy", Priority.NORMAL]
    assert len(shares) == 0, "nothing is kept of those that got no more than others"


# Where


def test_the_least_loaded_engine_is_taken_and_one_that_exchanges_weights_last() -> None:
    engines = [Engine("a", requests=3), Engine("b", requests=2), Engine("c", is_last_choice=True)]
    assert [batch.engine for batch in plan(waiting(10), engines, 0.0, CONFIG, {}).batches] == ["b"]
    busy = [Engine("a", batches=2), Engine("c", is_last_choice=True)]
    assert not plan(waiting(10), busy, 1.0, CONFIG, {}).batches, "a busy engine is free sooner than weights are read"
    only = [Engine("c", is_last_choice=True)]
    assert [batch.engine for batch in plan(waiting(10), only, 0.0, CONFIG, {}).batches] == ["c"]


def test_idle_engines_work_side_by_side() -> None:
    decided = plan(waiting(1000, 1000, 1000), [IDLE, Engine("b")], 0.0, CONFIG, {})
    assert sorted(batch.engine for batch in decided.batches) == ["a", "b"]


def test_an_engine_with_the_prompts_keys_and_values_is_preferred_while_it_is_not_much_busier() -> None:
    [request] = waiting(100, preferred="b")
    for requests, engine in ((3, "b"), (5, "a")):
        engines = [Engine("a"), Engine("b", requests=requests)]
        assert [batch.engine for batch in plan([request], engines, 0.0, CONFIG, {}).batches] == [engine]
        assert at_once(request, engines) == engine
    busy = [Engine("a"), Engine("b", batches=1)]
    assert [batch.engine for batch in plan([request], busy, 1.0, CONFIG, {}).batches] == ["a"]


def test_requests_with_keys_and_values_elsewhere_don_t_join() -> None:
    requests = [Waiting(0, 100, 0.0, preferred="a"), Waiting(1, 100, 0.0, preferred="b")]
    decided = plan(requests, [IDLE, Engine("b")], 0.0, CONFIG, {})
    assert {batch.engine: batch.keys for batch in decided.batches} == {"a": (0,), "b": (1,)}
    assert sent(plan(requests, [IDLE], 0.0, CONFIG, {})) == [[0, 1]]


def test_without_batching_requests_go_at_once() -> None:
    [request] = waiting(100, excluded=("a",))
    assert at_once(request, [Engine("a"), Engine("b", batches=9)]) == "b"
    assert at_once(request, [Engine("a")]) is None


# How well


def heavy_tailed(count: int, seed: int) -> list[int]:
    random_ = random.Random(seed)
    return [min(2000, max(5, int(random_.lognormvariate(math.log(120), 1.2)))) for _ in range(count)]


class Served:
    """One engine, whose batches take a fixed time and a time for each padded token, replays a trace."""

    BATCH_SECONDS, TOKEN_SECONDS = 0.005, 1e-4

    def __init__(self, lengths: list[int], per_second: float, seed: int) -> None:
        random_, now = random.Random(seed), 0.0
        self.requests = list[Waiting[int, str]]()
        for key, tokens in enumerate(lengths):
            now += random_.expovariate(per_second)
            self.requests.append(Waiting(key, tokens, now))
        self.latencies = list[float]()
        self.actual = self.padded = 0

    def replay(self, policy: Any) -> Served:
        """`policy(waiting, now)` gives the keys of a batch, or else when to ask again."""
        now, coming, here = 0.0, list(reversed(self.requests)), dict[int, Waiting[int, str]]()
        while coming or here:
            while coming and coming[-1].arrived_seconds <= now:
                here[coming[-1].key] = coming[-1]
                coming.pop()
            keys, again = policy(list(here.values()), now)
            if keys:
                tokens = [here[key].tokens for key in keys]
                self.actual, self.padded = self.actual + sum(tokens), self.padded + max(tokens) * len(tokens)
                now += self.BATCH_SECONDS + self.TOKEN_SECONDS * max(tokens) * len(tokens)
                self.latencies += [now - here.pop(key).arrived_seconds for key in keys]
            else:
                now = min([seconds for seconds in (again, *(r.arrived_seconds for r in coming[-1:])) if seconds])
        return self

    def percentile(self, part: float) -> float:
        return sorted(self.latencies)[int(part * len(self.latencies))]


def fixed_batches(requests: list[Waiting[int, str]], now: float) -> tuple[list[int], float | None]:
    """Eight at a time, or what there is after 50 ms."""
    if not requests:
        return [], None
    due = requests[0].arrived_seconds + 0.05
    return ([request.key for request in requests[:8]], None) if len(requests) >= 8 or now >= due else ([], due)


def first_come(requests: list[Waiting[int, str]], now: float) -> tuple[list[int], float | None]:
    """text-embeddings-inference's queue: as they came, within a budget of padded tokens."""
    keys, longest = list[int](), 0
    for request in requests:
        longest = max(longest, request.tokens)
        if keys and longest * (len(keys) + 1) > CONFIG.max_batch_tokens:
            break
        keys.append(request.key)
    return keys, None


def by_length(requests: list[Waiting[int, str]], now: float) -> tuple[list[int], float | None]:
    engine = Engine("a", token_seconds=Served.TOKEN_SECONDS, overhead_tokens=50.0)
    decided = plan(requests, [engine], now, CONFIG, {})
    return (list(decided.batches[0].keys) if decided.batches else []), decided.wake_seconds


def test_latency_and_padding_under_a_heavy_tailed_load() -> None:
    """At 70% of what fixed batches of eight saturate at; the bench replays it with a real model."""
    lengths = heavy_tailed(6000, seed=7)
    eights = [lengths[start : start + 8] for start in range(0, len(lengths), 8)]
    seconds = sum(Served.BATCH_SECONDS + Served.TOKEN_SECONDS * max(eight) * len(eight) for eight in eights)
    ours, fixed, peer = (
        Served(lengths, 0.7 * len(lengths) / seconds, seed=8).replay(policy)
        for policy in (by_length, fixed_batches, first_come)
    )
    assert ours.percentile(0.95) <= 0.5 * fixed.percentile(0.95)
    assert ours.percentile(0.99) <= 0.6 * fixed.percentile(0.99)
    assert ours.percentile(0.95) <= peer.percentile(0.95)
    assert ours.percentile(0.99) < peer.percentile(0.99)
    assert ours.padded <= 1.15 * ours.actual


# What engines cost


@given(st.lists(st.integers(10, 1024), min_size=8, max_size=100), st.floats(1e-6, 1e-3), st.floats(8, 256))
def test_costs_are_learned(sizes: list[int], token_seconds: float, overhead_tokens: float) -> None:
    costs = Costs()
    assert costs.seconds(100) is None and costs.token_seconds == 0
    for size in sizes:
        costs.observe(size, token_seconds * (size + overhead_tokens))
    if max(sizes) > 2 * min(sizes):
        assert costs.overhead_tokens == pytest.approx(overhead_tokens, rel=0.2, abs=8)
    expected = costs.seconds(sizes[-1])
    assert expected is not None and expected > 0
    assert costs.token_seconds > 0


def test_one_hold_up_changes_little() -> None:
    costs = Costs()
    for size in range(100, 1000, 30):
        costs.observe(size, size * 1e-4 + 0.01)
    costs.observe(500, 60.0)
    expected = costs.seconds(500)
    assert expected is not None and expected < 0.09


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 100)), max_size=60))
def test_costs_are_never_nonsense(observed: list[tuple[int, float]]) -> None:
    costs = Costs()
    for tokens, seconds in observed:
        costs.observe(tokens, seconds)
    assert 8 <= costs.overhead_tokens <= 256
    assert costs.token_seconds >= 0 and (costs.seconds(100) or 0.0) >= 0
