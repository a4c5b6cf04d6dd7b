"""AutoApply: one value at a time, within bounds, and only what proves itself stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold_api.analysis import Remediation
from sixfold_api.conditions import timestamp
from sixfold_api.control_status import ControlStatus, LevelStatus, TunedValue, Verdict
from sixfold_api.modes import Mode
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.ticket import Cause
from sixfold_api.tuning import spec_value, tuned_spec, why_not_tunable
from sixfold_operator.control.model import Reading, Snapshot, State, Timing, View
from sixfold_operator.control.tuning import MOST_TRIALS, step
from sixfold_operator.control.view import spec_hash
from sixfold_operator.control.waste import Facts, Waste

START = datetime(2026, 1, 1, tzinfo=UTC)
TIMING = Timing(interval=30.0, initial_delay=0.0, failure_limit=3, cooldown=300.0)
PATH = "/generation/speculative/numTokens"


def spec(tokens: int = 8) -> InferencePolicySpec:
    draft = {"draftVariantRef": {"name": "tiny"}, "numTokens": tokens, "length": "Fixed"}
    return InferencePolicySpec.model_validate(
        {"generation": {"variantRef": {"name": "chat"}, "speculative": draft}, "remediation": "AutoApply"}
    )


def view(policy: InferencePolicySpec) -> View:
    return View(3, (0, 2, 3), frozenset({Mode.SPECULATIVE}), spec_hash(policy), timing=TIMING, ready_since=START)


def fresh() -> State:
    level = LevelStatus(target=3, reason="Spec", since=timestamp(START))
    return State(level=level, control=ControlStatus(ceiling=3))


def snapshot(seconds: float | None, now: datetime, samples: float = 500.0) -> Snapshot:
    readings = () if seconds is None else (Reading(seconds, samples, now.timestamp(), 3, "stable"),)
    return Snapshot(now, {"RequestCost": readings})


@dataclass
class Plant:
    """A service whose requests cost what `cost(numTokens)` says, and which wastes drafts above `best` tokens."""

    cost: Callable[[int], float]
    best: int
    acceptance: float = 0.3
    state: State = field(default_factory=fresh)
    now: datetime = START
    policy: InferencePolicySpec = field(default_factory=spec)
    health: Verdict | None = Verdict.OK
    cost_window_seconds: float = 0.0

    def tokens(self) -> int:
        return int(spec_value(tuned_spec(self.policy, self.state.tuned)[0], PATH) or 0)

    def look(self, cost: float | None = -1.0, breach: bool | None = None) -> list[str]:
        self.now += timedelta(seconds=30)
        tokens = self.tokens()
        breaches = tokens > self.best if breach is None else breach
        verdict = Verdict.BREACH if breaches else Verdict.OK
        wastes = [Waste("RejectedDrafts", Cause.REJECTED_DRAFT, verdict, "chat", 3 if breaches else 0, 0.8, 0.6)]
        rejected = () if self.state.level is None else self.state.level.rejected
        facts = Facts(
            namespace="shop",
            policy="bot",
            timing=TIMING,
            tuned=self.state.tuned,
            acceptance=self.acceptance,
            cost_window_seconds=self.cost_window_seconds,
            rejected=frozenset((entry.path or "", entry.value or "") for entry in rejected),
        )
        seen = snapshot(self.cost(tokens) if cost == -1.0 else cost, self.now)
        outcome = step(self.state, view(self.policy), self.policy, wastes, facts, seen, self.now, self.health)
        self.state = outcome.state
        return [decision.decision for decision in outcome.decisions]

    def run(self, looks: int, **given: Any) -> list[str]:
        return [decision for _ in range(looks) for decision in self.look(**given)]


def test_a_value_that_brings_something_is_kept() -> None:
    plant = Plant(cost=lambda tokens: 0.010 if tokens == 8 else 0.007, best=4)
    assert plant.run(40)[:2] == ["Tuned", "TuningKept"]
    assert plant.tokens() < 8
    assert plant.state.control.trial is None


def test_a_value_that_brings_nothing_is_taken_back_and_not_tried_again() -> None:
    plant = Plant(cost=lambda _: 0.010, best=0)
    decisions = plant.run(200)
    assert decisions[:2] == ["Tuned", "TuningReverted"]
    assert "TuningKept" not in decisions
    tried = [entry.value for entry in plant.state.level.rejected] if plant.state.level else []
    assert len(tried) == len(set(tried))
    assert plant.tokens() == 8


def test_health_that_suffers_takes_it_back_at_once() -> None:
    plant = Plant(cost=lambda tokens: tokens / 1000, best=4)
    assert plant.look() == ["Tuned"]
    plant.health = Verdict.BREACH
    assert plant.look() == ["TuningReverted"]
    assert plant.tokens() == 8
    assert plant.state.control.changed_at is None, "no cooldown holds back what follows from the breach"


def test_a_trial_during_which_something_was_rolled_back_ends() -> None:
    plant = Plant(cost=lambda tokens: tokens / 1000, best=4)
    assert plant.look() == ["Tuned"]
    lowered = timestamp(plant.now)
    control = plant.state.control.model_copy(update={"changed_at": lowered})
    plant.state = replace(plant.state, level=LevelStatus(target=2, reason="ErrorRate", since=lowered), control=control)
    assert plant.look() == ["TuningReverted"]
    assert plant.state.control.changed_at == lowered, "the cooldown of what was rolled back goes on"


def test_a_trial_is_judged_although_nothing_more_is_to_be_tried() -> None:
    plant = Plant(cost=lambda tokens: 0.010 if tokens == 8 else 0.007, best=4)
    assert plant.look() == ["Tuned"]
    plant.policy = plant.policy.model_copy(update={"remediation": Remediation.TICKET_ONLY})
    assert plant.run(30) == ["TuningKept"]


def test_a_trial_lasts_until_the_cost_is_its_own() -> None:
    plant = Plant(cost=lambda tokens: tokens / 1000, best=4, cost_window_seconds=600.0)
    assert plant.look() == ["Tuned"]
    assert plant.run(19) == []
    assert plant.look() == ["TuningKept"]


def test_what_cannot_be_measured_is_taken_back_in_the_end() -> None:
    plant = Plant(cost=lambda tokens: tokens / 1000, best=4)
    assert plant.look() == ["Tuned"]
    looks = int(MOST_TRIALS * TIMING.cooldown / 30) + 1
    assert plant.run(looks, cost=None) == ["TuningReverted"]


def test_nothing_is_tried_where_something_else_is_under_way() -> None:
    base = Plant(cost=lambda tokens: tokens / 1000, best=4)
    lower = LevelStatus(target=2, reason="RequestP95", since=timestamp(START))
    recent = ControlStatus(ceiling=3, changed_at=timestamp(START + timedelta(seconds=20)))
    for changes in ({"level": lower}, {"control": recent}):
        plant = replace(base, state=replace(fresh(), **changes))
        assert plant.look() == []
    assert replace(base).look(cost=None) == []
    for health in (Verdict.BREACH, Verdict.UNKNOWN, None):
        assert replace(base, health=health).look() == []


def test_a_humans_change_of_the_value_drops_the_trial() -> None:
    plant = Plant(cost=lambda tokens: tokens / 1000, best=4)
    assert plant.look() == ["Tuned"]
    plant.policy = spec(tokens=2)
    plant.state = replace(plant.state, tuned=tuned_spec(plant.policy, plant.state.tuned)[1])
    assert plant.look(breach=False) == []
    assert (plant.state.control.trial, plant.tokens()) == (None, 2)


@settings(max_examples=60, deadline=None)
@given(best=st.integers(1, 10), start=st.integers(1, 16), noise=st.lists(st.floats(0.97, 1.03), min_size=8, max_size=8))
def test_it_stays_within_bounds_and_comes_to_rest(best: int, start: int, noise: list[float]) -> None:
    """One value at a time, always a legal one, and no end of trying: at most one trial of each value."""
    plant = Plant(cost=lambda tokens: 0.005 + 0.001 * abs(tokens - best), best=best, policy=spec(start))
    begun, last = 0, 0
    for number in range(400):
        decisions = plant.look(cost=plant.cost(plant.tokens()) * noise[number % 8])
        assert len(plant.state.tuned) <= 1
        for held in plant.state.tuned:
            assert isinstance(held, TunedValue)
            assert why_not_tunable(plant.policy, held.path, held.value) == ""
        if "Tuned" in decisions:
            begun, last = begun + 1, number
    assert begun <= 16
    assert last < 390
