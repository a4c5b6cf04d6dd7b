"""How many tokens are drafted: bounds for every strategy, and the cost model against brute force on known tables."""

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sixfold_api.generation import MAX_DRAFT_TOKENS, DraftLength
from sixfold_runtime.modes.draft_acceptance import bucket_of
from sixfold_runtime.modes.draft_length import CostModel, DraftLengths, Fixed, Row, StepDown, make

Acceptance = Callable[[int, int], float]
"""(position from 0, context tokens) -> probability, given that all before were accepted."""
Cost = Callable[[int], tuple[float, float]]
"""Drafted tokens -> seconds of drafting and of the rest."""
PLENTY = 1_000_000


def cost_of(draft: float, token: float) -> Cost:
    """A plain step takes 1 second; a drafted token costs `draft`, and verifying it `token`."""
    return lambda drafted: (draft * drafted, 1.0 + token * drafted)


class World:
    """Decodes with a strategy where acceptance and times are known."""

    def __init__(self, strategy: DraftLengths, acceptance: Acceptance, cost: Cost, *, rows: int = 1, seed: int = 0):
        self.strategy, self.acceptance, self.cost = strategy, acceptance, cost
        self.draw = random.Random(seed)
        self.contexts, self.lags = [100] * rows, [0] * rows
        self.lag_token_seconds = 0.0
        self.noise = 0.1
        self.seconds, self.tokens, self.history = 0.0, 0, list[int]()

    def step(self, grow: bool = False) -> list[int]:
        rows = [Row(i, context, PLENTY, self.lags[i]) for i, context in enumerate(self.contexts)]
        lengths = self.strategy.lengths(rows)
        read = sum(lag for lag, length in zip(self.lags, lengths, strict=True) if length)
        draft, rest = (seconds * self.draw.lognormvariate(0, self.noise) for seconds in self.cost(max(lengths)))
        draft += read * self.lag_token_seconds
        for i, length in enumerate(lengths):
            accepted = 0
            while accepted < length and self.draw.random() < self.acceptance(accepted, self.contexts[i]):
                accepted += 1
            self.strategy.observe(i, self.contexts[i], length, accepted)
            self.tokens += accepted + 1
            self.lags[i] = 1 if length else self.lags[i] + 1
            self.contexts[i] += (accepted + 1) * grow
        self.strategy.measured(len(rows), max(lengths), draft, rest)
        self.seconds += draft + rest
        self.history.append(max(lengths))
        return lengths

    def run(self, steps: int, grow: bool = False) -> float:
        """Tokens a second over so many steps."""
        self.seconds, self.tokens = 0.0, 0
        for _ in range(steps):
            self.step(grow)
        return self.tokens / self.seconds


def rates(acceptance: Acceptance, cost: Cost, most: int, context: int = 100) -> list[float]:
    """True tokens a second of a row by drafted tokens, 0 to `most`."""
    survivals = list(itertools.accumulate((acceptance(i, context) for i in range(most)), lambda a, b: a * b))
    return [(1 + sum(survivals[:drafted])) / sum(cost(drafted)) for drafted in range(most + 1)]


rows_ = st.lists(
    st.builds(
        Row,
        key=st.integers(0, 5),
        context_tokens=st.integers(1, 40_000),
        room_tokens=st.integers(0, 20),
        draft_lag_tokens=st.integers(0, 5_000),
    ),
    max_size=9,
    unique_by=lambda row: row.key,
)


@given(
    strategy=st.sampled_from(DraftLength),
    most=st.integers(1, MAX_DRAFT_TOKENS),
    steps=st.lists(st.tuples(rows_, st.floats(0, 1), st.floats(0, 0.1), st.floats(0, 10)), max_size=30),
)
def test_no_row_gets_more_than_the_most_or_its_room(
    strategy: DraftLength, most: int, steps: list[tuple[list[Row], float, float, float]]
) -> None:
    rule = make(strategy, most)
    for rows, share, draft_seconds, rest_seconds in steps:
        lengths = rule.lengths(rows)
        assert len(lengths) == len(rows)
        for row, length in zip(rows, lengths, strict=True):
            assert 0 <= length <= min(most, row.room_tokens)
            rule.observe(row.key, row.context_tokens, length, int(length * share))
        rule.measured(len(rows), max(lengths, default=0), draft_seconds, rest_seconds)


@settings(max_examples=40, deadline=None)
@example(chance=0.875, decay=1.0, draft=0.375, token=0.0, most=2, rows=2, seed=127)  # unlucky at first, and far behind
@given(
    chance=st.floats(0.02, 0.98),
    decay=st.floats(0.8, 1.0),
    draft=st.floats(0.02, 0.5),
    token=st.floats(0.0, 0.3),
    most=st.integers(2, 10),
    rows=st.integers(1, 3),
    seed=st.integers(0, 1_000),
)
def test_the_cost_model_converges_to_a_length_about_as_good_as_the_best(
    chance: float, decay: float, draft: float, token: float, most: int, rows: int, seed: int
) -> None:
    def acceptance(position: int, context: int) -> float:
        return float(chance * decay**position)

    cost = cost_of(draft, token)
    world = World(CostModel(most), acceptance, cost, rows=rows, seed=seed)
    world.run(400)
    truth = rates(acceptance, cost, most)
    later = [truth[world.step()[0]] for _ in range(300)]
    assert sum(later) / len(later) >= 0.75 * max(truth)


def test_measuring_a_plain_step_again_is_no_reason_to_probe() -> None:
    """Else the probe takes its place, the plain step stays unmeasured, and every other step drafts too little."""
    world = World(CostModel(5), lambda position, context: 0.875, cost_of(0.0625, 0.0), rows=3)
    world.run(700)
    assert world.history[300:].count(5) >= 350


def test_a_fresh_engine_drafts_at_once_and_converges_in_a_handful_of_steps() -> None:
    world = World(CostModel(5), lambda position, context: 0.93, cost_of(0.06, 0.06))
    world.run(30)
    assert world.history[0] == 5
    assert min(world.history[6:]) >= 3


@pytest.mark.parametrize("rows", [1, 4])
def test_a_useless_draft_costs_little(rows: int) -> None:
    world = World(CostModel(5), lambda position, context: 0.001, cost_of(0.06, 0.06), rows=rows)
    assert world.run(500) >= 0.95 * rows
    assert world.run(4_000) >= 0.985 * rows
    assert sum(1 for length in world.history[-1000:] if length) <= 10, "probes get rare"


def test_reading_up_is_counted_in() -> None:
    """A draft that reads at half of the target's speed isn't probed at all: the lag would cost half of each probe."""
    world = World(CostModel(5), lambda position, context: 0.001, cost_of(0.06, 0.06))
    world.lag_token_seconds = 0.5
    world.run(500)
    world.history.clear()
    assert world.run(2_000) >= 0.97


def test_contexts_beyond_the_drafts_reach_are_decoded_plainly_and_short_ones_still_drafted() -> None:
    world = World(CostModel(5), lambda position, context: 0.93 if context < 1536 else 0.02, cost_of(0.06, 0.06))
    world.run(400)
    world.contexts[0] = 1600
    assert world.run(400) >= 0.95
    assert world.run(400) >= 0.98
    world.contexts[0] = 100
    assert world.run(200) >= 2.5


def test_a_batch_leaves_out_the_row_that_no_draft_helps() -> None:
    world = World(
        CostModel(5), lambda position, context: 0.95 if context < 1536 else 0.01, cost_of(0.2, 0.2), rows=4, seed=3
    )
    world.contexts[3] = 9_000
    world.run(300)
    later = [world.step() for _ in range(100)]
    assert sum(1 for lengths in later if lengths[3]) <= 10
    assert sum(1 for lengths in later if min(lengths[:3]) > 0) >= 90


def test_a_draft_that_becomes_useful_is_noticed() -> None:
    chance = 0.0
    world = World(CostModel(5), lambda position, context: chance, cost_of(0.06, 0.06))
    world.run(600)
    assert world.history[-1] == 0
    chance = 0.95
    world.run(1_000)
    assert sum(world.history[-100:]) >= 300


def test_nothing_is_drafted_where_drafting_costs_more_than_it_can_bring() -> None:
    world = World(CostModel(4), lambda position, context: 1.0, cost_of(1.1, 0.2))
    world.run(60)
    assert sum(world.history[-40:]) <= 2


def test_the_length_does_not_flap_between_lengths_that_are_about_as_good() -> None:
    """Under noise in the times of 10%, and of 0."""
    for noise in (0.0, 0.1):
        world = World(CostModel(8), lambda position, context: 0.7, cost_of(0.06, 0.06))
        world.noise = noise
        world.run(600)
        later = world.history[-400:]
        # Twice for each length that is measured again after 256 steps, and a few for what was learnt meanwhile.
        assert sum(a != b for a, b in itertools.pairwise(later)) <= 60


def test_a_machine_that_gets_slower_confuses_for_a_moment_only() -> None:
    """Three times slower: the length in use looks slow and the others quick, until they are measured again."""
    slow = 1.0
    world = World(CostModel(5), lambda position, context: 0.9, lambda k: (0.06 * k * slow, (1 + 0.06 * k) * slow))
    world.run(300)
    slow = 3.0
    assert world.run(200) >= 0.85 * max(rates(world.acceptance, world.cost, 5))
    world.run(100)
    assert sum(length < 4 for length in world.history[-100:]) <= 10


@pytest.mark.parametrize("seed", range(3))
def test_a_useless_draft_is_seen_as_such_on_a_busy_machine(seed: int) -> None:
    """Steps take up to three times as long in bursts, and half of them any time longer."""
    draw, burst = random.Random(seed), [1.0]

    def busy(drafted: int) -> tuple[float, float]:
        if draw.random() < 0.05:
            burst[0] = draw.choice([1, 1, 1.3, 2, 3])
        factor = burst[0] * (1 + draw.expovariate(1.5) * (draw.random() < 0.5))
        return 0.1 * drafted * factor, (1 + 0.07 * drafted) * factor

    world = World(CostModel(8), lambda position, context: 0.002, busy, seed=seed)
    world.run(600)
    assert sum(length > 0 for length in world.history) <= 45


def test_the_end_of_an_answer_shortens_one_step_only() -> None:
    model = CostModel(5)
    world = World(model, lambda position, context: 0.95, cost_of(0.05, 0.05))
    world.run(100)
    assert model.lengths([Row(0, 100, 2)]) == [2]
    assert model.lengths([Row(0, 100, 1)]) == [1]
    assert model.lengths([Row(0, 100, 0)]) == [0]
    assert model.lengths([Row(0, 100, PLENTY)])[0] >= 4


@pytest.mark.parametrize("strategy", [CostModel(5), StepDown(5)])
def test_forget_frees_a_sequence_and_late_words_bring_none_back(strategy: CostModel | StepDown) -> None:
    def held() -> int:
        return len(strategy._sequences if isinstance(strategy, CostModel) else strategy._streaks)

    for key in range(1_000):
        strategy.measured(1, *((0, 0.0) if not strategy.lengths([Row(key, key * 50, 9, key)])[0] else (5, 0.3)), 1.0)
        strategy.observe(key, key * 50, 5, 3)
        strategy.forget(key)
        strategy.observe(key, key * 50, 5, 3)
    strategy.forget("unknown")
    assert held() == 0
    if isinstance(strategy, CostModel):
        assert len(strategy._buckets) <= 16
        assert len(strategy._lags) <= 6


def test_contexts_of_any_length_fall_into_few_buckets() -> None:
    assert [bucket_of(tokens) for tokens in (0, 511, 512, 1535, 1536, 4095, 4096, 8192, 131_072)] == [
        0, 0, 1, 2, 3, 7, 8, 9, 13,
    ]  # fmt: skip


def test_fixed_is_fixed() -> None:
    assert Fixed(5).lengths([Row("a", 10, 9), Row("b", 5_000, 3), Row("c", 5_000, 0)]) == [5, 3, 0]


class TestStepDown:
    """The source's rules."""

    @pytest.fixture
    def rule(self) -> StepDown:
        return StepDown(5)

    @staticmethod
    def length(rule: StepDown, context: int = 100, key: str = "a") -> int:
        return rule.lengths([Row(key, context, 9)])[0]

    def step(self, rule: StepDown, success: bool, context: int = 100) -> int:
        drafted = self.length(rule, context)
        rule.observe("a", context, drafted, drafted if success else drafted - 1)
        return self.length(rule, context)

    def test_one_less_after_a_failure(self, rule: StepDown) -> None:
        assert self.length(rule) == 5
        assert [self.step(rule, False), self.step(rule, True), self.step(rule, False)] == [4, 4, 3]

    def test_three_failures_in_a_row_leave_one_until_five_successes_in_a_row(self, rule: StepDown) -> None:
        assert [self.step(rule, False) for _ in range(3)] == [4, 3, 1]
        assert [self.step(rule, True) for _ in range(4)] == [1, 1, 1, 1]
        assert self.step(rule, False) == 1
        assert [self.step(rule, True) for _ in range(5)] == [1, 1, 1, 1, 5]

    def test_two_beyond_2048_tokens(self, rule: StepDown) -> None:
        assert [self.length(rule, context) for context in (2048, 2049)] == [5, 2]

    def test_each_sequence_by_itself(self, rule: StepDown) -> None:
        self.step(rule, False)
        assert (self.length(rule), self.length(rule, key="b")) == (4, 5)
