"""The books of a slice pool, driven by any sequence of requests, loads, failures and configurations."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sixfold_runtime.modes.subgraphs import PATIENCE_SECONDS, RETRY_SECONDS, Offer, Plan, Residency

TASKS = ("ner", "sentiment", "triage", "topic")


def books(budget_bytes: int | None = None, **sizes: int) -> Residency:
    """Offered tasks of these sizes; a negative one is pinned."""
    residency = Residency()
    residency.offer({name: Offer(abs(size), size < 0) for name, size in sizes.items()}, budget_bytes)
    return residency


def load(residency: Residency, *names: str, now: float = 0.0) -> None:
    """Ask for these, one after the other, and give each reference back."""
    for name in names:
        assert not residency.acquire(name, now)
        assert residency.plan(now).load == (name,)
        assert residency.loaded(name, residency.size_bytes(name), now)
        assert residency.acquire(name, now)
        residency.release(name, now)


def test_pinned_slices_are_loaded_at_once_and_never_unloaded() -> None:
    residency = books(30, ner=-10, sentiment=20, topic=20)
    assert residency.plan(0) == Plan(load=("ner",))
    assert residency.loaded("ner", 10, 0)
    load(residency, "sentiment", now=1)
    assert not residency.acquire("topic", 2)
    assert residency.plan(2) == Plan(unload=("sentiment",), load=("topic",))


def test_a_load_is_started_once_however_many_ask() -> None:
    residency = books(ner=10)
    assert [residency.acquire("ner", now) for now in range(5)] == [False] * 5
    assert residency.plan(5).load == ("ner",)
    assert not residency.acquire("ner", 6)
    assert residency.plan(6) == Plan()


def test_the_longest_unused_goes() -> None:
    residency = books(30, ner=10, sentiment=10, triage=10, topic=10)
    load(residency, "ner", now=0)
    load(residency, "sentiment", now=1)
    load(residency, "triage", now=2)
    assert residency.acquire("ner", 3)
    residency.release("ner", 4)
    assert not residency.acquire("topic", 5)
    assert residency.plan(5) == Plan(unload=("sentiment",), load=("topic",))


def test_what_is_in_use_stays_and_the_newcomer_waits() -> None:
    residency = books(10, ner=10, topic=10)
    load(residency, "ner")
    assert residency.acquire("ner", 1)
    assert not residency.acquire("topic", 1)
    assert residency.plan(1) == Plan()
    residency.release("ner", 1.1)
    assert residency.plan(1.1) == Plan(unload=("ner",), load=("topic",))


def test_steady_traffic_on_one_task_does_not_keep_another_out() -> None:
    residency = books(10, ner=10, topic=10)
    load(residency, "ner")
    assert residency.acquire("ner", 1)
    assert not residency.acquire("topic", 1)
    assert residency.acquire("ner", 1 + PATIENCE_SECONDS / 2), "for a moment nothing changes"
    late = 1 + PATIENCE_SECONDS
    assert not residency.acquire("ner", late), "then the other one's turn comes"
    residency.release("ner", late)
    assert residency.plan(late) == Plan()
    residency.release("ner", late)
    assert residency.plan(late) == Plan(unload=("ner",), load=("topic",))
    assert residency.loaded("topic", 10, late)
    assert residency.acquire("topic", late), "and whoever was turned away comes after it"
    residency.release("topic", late)
    assert residency.plan(late) == Plan(unload=("topic",), load=("ner",))


def test_what_just_came_is_kept_for_those_who_asked() -> None:
    residency = books(10, ner=10, topic=10)
    assert not residency.acquire("ner", 0) and not residency.acquire("topic", 0)
    assert residency.plan(0).load == ("ner",)
    assert residency.loaded("ner", 10, 1)
    assert residency.plan(1) == Plan()
    assert residency.reminder_seconds(1) == PATIENCE_SECONDS, "if those who asked are gone, the next one gets its turn"
    assert residency.plan(1 + PATIENCE_SECONDS) == Plan(unload=("ner",), load=("topic",))


def test_a_slice_that_never_fits_is_refused_with_the_reason() -> None:
    residency = books(25, ner=-10, sentiment=-20, topic=16, triage=15)
    assert residency.plan(0).load == ("ner",)
    assert "20 bytes; cacheSize is 25" in residency.problem("sentiment", 0)
    assert "pinned slices take 10" in residency.problem("topic", 0)
    assert residency.problem("triage", 0) == ""
    assert set(residency.failures) == {"sentiment", "topic"}


def test_a_slice_larger_than_its_header_said_is_given_back() -> None:
    residency = books(15, ner=10)
    assert not residency.acquire("ner", 0)
    residency.plan(0)
    assert not residency.loaded("ner", 20, 1)
    assert "20 bytes" in residency.problem("ner", 1)
    assert residency.used_bytes == 0


def test_a_failed_load_is_tried_again_after_a_while_and_only_if_asked_for() -> None:
    residency = books(ner=-10)
    residency.plan(0)
    residency.failed("ner", "the file is damaged", 1)
    assert residency.problem("ner", 1) == "the file is damaged"
    assert residency.plan(2) == Plan()
    assert residency.problem("ner", 1 + RETRY_SECONDS) == ""
    assert residency.plan(1 + RETRY_SECONDS) == Plan()
    assert not residency.acquire("ner", 1 + RETRY_SECONDS)
    assert residency.plan(1 + RETRY_SECONDS) == Plan(load=("ner",))
    assert residency.failures == {"ner": "the file is damaged"}
    assert residency.loaded("ner", 10, 7)
    assert residency.failures == {}


def test_a_task_that_is_not_offered_any_more_goes_when_its_requests_are_done() -> None:
    residency = books(ner=10, topic=10)
    load(residency, "ner", "topic")
    assert residency.acquire("ner", 1)
    residency.offer({"topic": Offer(10)}, None)
    assert "ner" not in residency
    assert residency.plan(1) == Plan()
    residency.release("ner", 2)
    assert residency.plan(2) == Plan(unload=("ner",))
    assert residency.used_bytes == 10


def test_a_task_that_is_not_offered_any_more_is_dropped_when_its_load_ends() -> None:
    residency = books(ner=10)
    assert not residency.acquire("ner", 0)
    residency.plan(0)
    residency.offer({}, None)
    assert not residency.loaded("ner", 10, 1)
    assert residency.used_bytes == 0


def test_a_smaller_budget_and_fewer_pins_take_effect_at_once() -> None:
    residency = books(None, ner=-10, sentiment=-10, topic=-10)
    assert residency.plan(0).load == ("ner", "sentiment", "topic")
    for now, name in enumerate(("ner", "sentiment", "topic")):
        assert residency.loaded(name, 10, now)
    residency.offer({"ner": Offer(10, True), "sentiment": Offer(10), "topic": Offer(10)}, 20)
    assert residency.plan(10) == Plan(unload=("sentiment",))


class Pool(RuleBasedStateMachine):
    """What must hold whatever happens, and that everybody who waits gets an answer once the others let go."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.residency = Residency()
        self.offers: dict[str, Offer] = {}
        self.resident: set[str] = set()
        self.loading: list[str] = []
        self.references: dict[str, int] = {}

    def follow(self) -> None:
        plan = self.residency.plan(self.now)
        for name in plan.unload:
            assert not self.references.get(name), "what is in use is never unloaded"
            assert not (self.is_pinned(name) and name not in self.residency.failures), "nor what is pinned"
            self.resident.remove(name)
        for name in plan.load:
            assert name in self.offers and name not in self.resident and name not in self.loading, "single flight"
            self.loading.append(name)

    def is_pinned(self, name: str) -> bool:
        return name in self.offers and self.offers[name].pinned

    @rule(
        sizes=st.dictionaries(st.sampled_from(TASKS), st.tuples(st.integers(0, 12), st.booleans())),
        budget=st.none() | st.integers(0, 30),
    )
    def configure(self, sizes: dict[str, tuple[int, bool]], budget: int | None) -> None:
        self.offers = {name: Offer(*offer) for name, offer in sizes.items()}
        self.residency.offer(self.offers, budget)
        self.follow()

    @rule(name=st.sampled_from(TASKS))
    def ask(self, name: str) -> None:
        if name not in self.residency or self.residency.problem(name, self.now):
            return
        if self.residency.acquire(name, self.now):
            assert name in self.resident
            self.references[name] = self.references.get(name, 0) + 1
        self.follow()

    @precondition(lambda self: any(self.references.values()))
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, count in self.references.items() if count)))
        self.references[name] -= 1
        self.residency.release(name, self.now)
        self.follow()

    @precondition(lambda self: self.loading)
    @rule(size=st.none() | st.integers(0, 12))
    def arrive(self, size: int | None) -> None:
        name = self.loading.pop(0)
        if self.residency.loaded(name, self.residency.size_bytes(name) if size is None else size, self.now):
            self.resident.add(name)
        self.follow()

    @precondition(lambda self: self.loading)
    @rule()
    def fail(self) -> None:
        self.residency.failed(self.loading.pop(0), "damaged", self.now)
        self.follow()

    @rule(seconds=st.sampled_from([0.01, PATIENCE_SECONDS, RETRY_SECONDS]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.follow()

    @invariant()
    def books_are_right(self) -> None:
        assert set(self.residency.resident) == self.resident

    @invariant()
    def a_plan_that_was_followed_leaves_nothing_to_do(self) -> None:
        assert self.residency.plan(self.now) == Plan()

    def teardown(self) -> None:
        """Once all references are given back, whoever asks gets the slice, or a reason."""
        for name, count in self.references.items():
            for _ in range(count):
                self.residency.release(name, self.now)
        self.references.clear()
        for name in TASKS:
            for _ in range(20):
                self.now += RETRY_SECONDS
                while self.loading:
                    self.arrive(None)
                if name not in self.residency or self.residency.problem(name, self.now):
                    break
                if self.residency.acquire(name, self.now):
                    self.residency.release(name, self.now)
                    break
                self.follow()
            else:
                raise AssertionError(f"{name} never came")
        if self.residency.budget_bytes is not None:
            self.follow()
            assert self.residency.used_bytes <= self.residency.budget_bytes


Pool.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPool = Pool.TestCase
