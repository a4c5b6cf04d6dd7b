"""What holds for every policy, whatever is observed and whatever humans and clocks do meanwhile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sixfold_api.control_status import HistoryEntry, TunedValue, Verdict
from sixfold_api.modes import Mode, ModeState
from sixfold_api.policy import InferencePolicyStatus, ModeStatus
from sixfold_operator.control.levels import active_modes, effective_inputs, rejections
from sixfold_operator.control.model import (
    Action,
    CanaryJudgement,
    CanaryPlan,
    Observed,
    SignalKind,
    State,
    Timing,
    View,
)
from sixfold_operator.control.ramp import begin_tuned
from sixfold_operator.control.reducer import decide
from sixfold_operator.control.view import remembered, state_of

START = datetime(2030, 1, 1, tzinfo=UTC)
SIGNALS = (
    Observed("ErrorRate", Verdict.OK, is_primary=True),
    Observed("RequestP95", Verdict.OK, is_primary=True),
    Observed("AcceptanceRate", Verdict.OK, action=Action.SUSPEND, blames=Mode.SPECULATIVE),
    Observed("ExitRate", Verdict.OK, action=Action.SUSPEND, blames=Mode.EARLY_EXIT),
    Observed("QueueWait", Verdict.OK, action=Action.SUSPEND, blames=Mode.DYNAMIC_BATCHING),
    Observed("ShadowDisagreement", Verdict.OK, action=Action.LEVEL_0),
    Observed("Alert/High5xx", Verdict.OK),
    Observed("WastedFlops", Verdict.OK, kind=SignalKind.WASTE),
)
VERDICTS = st.sampled_from(Verdict)


def all_but(index: int, verdict: Verdict) -> tuple[Verdict, ...]:
    return tuple(verdict if index == i else Verdict.OK for i in range(len(SIGNALS)))


INDICES = st.integers(0, len(SIGNALS) - 1)
LOOKS = st.one_of(
    st.just((Verdict.OK,) * len(SIGNALS)),
    st.builds(all_but, INDICES, st.just(Verdict.BREACH)),
    st.builds(all_but, INDICES, VERDICTS),
    st.just((Verdict.UNKNOWN,) * len(SIGNALS)),
    st.tuples(*(VERDICTS,) * len(SIGNALS)),
)
JUDGEMENTS = st.none() | st.builds(CanaryJudgement, VERDICTS, st.integers(0, 100), st.just("figures"))
TUNED = st.builds(
    TunedValue,
    path=st.sampled_from(("/generation/speculative/numTokens", "/batching/maxBatchTokens")),
    value=st.sampled_from(("2", "3")),
    base=st.just("5"),
    since=st.just("2030-01-01T00:00:00Z"),
)
VIEWS = st.builds(
    View,
    ceiling=st.integers(0, 3),
    levels=st.just((0, 1, 2, 3)) | st.sets(st.integers(0, 3)).map(lambda levels: tuple(sorted(levels))),
    modes=st.frozensets(st.sampled_from(Mode)) | st.just(frozenset(Mode)),
    spec_hash=st.sampled_from("ab"),
    enforce=st.booleans() | st.just(True),
    retry_token=st.sampled_from("xy"),
    timing=st.builds(
        Timing,
        interval=st.just(30.0),
        initial_delay=st.sampled_from((0.0, 60.0)),
        failure_limit=st.integers(1, 3),
        cooldown=st.sampled_from((0.0, 60.0, 300.0)),
        recover_after=st.sampled_from((0.0, 60.0, 240.0)),
        reject_window=st.sampled_from((0.0, 3600.0)),
    ),
    canary=st.none() | st.just(CanaryPlan((5, 50), 60, 50)),
    ready_since=st.none() | st.just(START) | st.just(START),
)


def seen(verdicts: Sequence[Verdict]) -> list[Observed]:
    return [replace(signal, verdict=verdict) for signal, verdict in zip(SIGNALS, verdicts, strict=True)]


def restarted(state: State, decisions: Sequence[HistoryEntry] = ()) -> State:
    """The state out of the status that a new operator reads."""
    status = InferencePolicyStatus() if state.active is None else _with_modes(state.active)
    written = json.dumps(remembered(status, state, decisions).to_dict())
    return state_of(InferencePolicyStatus.model_validate(json.loads(written)))


def _with_modes(active: frozenset[Mode]) -> InferencePolicyStatus:
    states = [ModeStatus(name=m, state=ModeState.ACTIVE if m in active else ModeState.OFF) for m in Mode]
    return InferencePolicyStatus(modes=states)


def stable(state: State, view: View) -> tuple[int, frozenset[Mode], tuple[TunedValue, ...]]:
    """What all requests get."""
    return (-1 if state.level is None else state.level.target, active_modes(state, view), state.tuned)


class Policy(RuleBasedStateMachine):
    """One policy's life: looks, changed specs, tuned values, clocks that jump, operators that restart."""

    @initialize(view=VIEWS)
    def begin(self, view: View) -> None:
        self.view, self.state, self.now = view, State(), START
        self.changed_at: datetime | None = None
        self.runs = dict.fromkeys((signal.name for signal in SIGNALS), 0)
        self.look((Verdict.OK,) * len(SIGNALS), None, False)

    @rule(verdicts=LOOKS, judgement=JUDGEMENTS, restart=st.booleans())
    def look(self, verdicts: Sequence[Verdict], judgement: CanaryJudgement | None, restart: bool) -> None:
        self.now += timedelta(seconds=self.view.timing.interval)
        observed = seen(verdicts)
        before, is_first = self.state, self.state.level is None
        outcome = decide(before, self.view, observed, judgement, self.now)
        assert decide(restarted(before), self.view, observed, judgement, self.now) == outcome
        self.state = restarted(outcome.state, outcome.decisions) if restart else outcome.state
        if is_first:
            return
        self.count(observed)
        old, new = stable(before, self.view), stable(self.state, self.view)
        if old[1] - new[1] or old[0] > new[0]:  # downwards: a run of breaches, and a breach now
            full = [name for name, run in self.runs.items() if run >= self.view.timing.failure_limit]
            assert any(item.name in full and item.verdict is Verdict.BREACH for item in observed)
        if old != new:
            self.check_change(old, new, outcome.decisions)
        if all(verdict is Verdict.UNKNOWN for verdict in verdicts) and (
            judgement is None or judgement.verdict is Verdict.UNKNOWN
        ):
            assert old == new and before.canary == self.state.canary and outcome.decisions == ()

    def count(self, observed: Sequence[Observed]) -> None:
        """Breaches since the last Ok: Unknown is neither."""
        for item in observed:
            if item.verdict is not Verdict.UNKNOWN:
                self.runs[item.name] = self.runs[item.name] + 1 if item.verdict is Verdict.BREACH else 0

    def check_change(
        self,
        old: tuple[int, frozenset[Mode], tuple[TunedValue, ...]],
        new: tuple[int, frozenset[Mode], tuple[TunedValue, ...]],
        decisions: Sequence[HistoryEntry],
    ) -> None:
        assert decisions, "every change is told"
        assert self.view.enforce and self.view.ready_since is not None
        is_drop = new[0] == 0 and decisions[0].reason == "ShadowDisagreement"
        if self.changed_at is not None and not is_drop:
            assert (self.now - self.changed_at).total_seconds() >= self.view.timing.cooldown
        self.changed_at = self.now
        gained = new[1] - old[1]
        if gained:  # upwards: one level without a canary, one mode with one; never what was rejected
            assert not new[1] & {entry.mode for entry in rejections(self.state, self.view)}
            assert new[0] >= old[0]
            assert self.view.canary is None or len(gained) == 1
            rejected = [entry.level for entry in rejections(self.state, self.view) if entry.level is not None]
            assert new[0] == old[0] or all(level > new[0] for level in rejected)

    @rule(verdicts=LOOKS, times=st.integers(2, 12))
    def stay(self, verdicts: Sequence[Verdict], times: int) -> None:
        """The same for a while: the runs that matter are longer than chance makes them."""
        for _ in range(times):
            self.look(verdicts, CanaryJudgement(Verdict.OK, 100, "figures"), False)

    @rule(view=VIEWS)
    def human(self, view: View) -> None:
        """A changed ceiling, hash or token wins at once; other changes of the spec change nothing by themselves."""
        is_same_modes = view.spec_hash == self.view.spec_hash
        if is_same_modes:  # the hash is of what decides modes and levels
            view = replace(view, modes=self.view.modes, levels=self.view.levels)
        control, ran = self.state.control, active_modes(self.state, self.view)
        is_change = (control.ceiling, control.spec_hash, control.retry_token) != (
            view.ceiling,
            view.spec_hash,
            view.retry_token,
        )
        if not is_change and (view.canary is None) != (self.view.canary is None):
            view = replace(view, canary=self.view.canary)
        self.state = replace(self.state, active=ran)
        self.view = view
        outcome = decide(self.state, view, (), None, self.now)
        before, self.state = self.state, replace(outcome.state, active=None)
        if not is_change:
            assert stable(before, view) == stable(self.state, view)
            return
        assert self.state.level is not None and self.state.level.target == view.ceiling
        assert self.state.level.rejected == [] and self.state.control.breaches == []
        assert all(signal.failures == 0 for signal in self.state.signals)
        if view.canary is None:
            assert self.state.suspended == () and self.state.canary is None
        self.changed_at = self.now if self.state.control.changed_at is not None else None

    @precondition(lambda self: self.state.control.changed_at is None)
    @rule(hours=st.integers(-48, 48))
    def clock_jumps(self, hours: int) -> None:
        self.now += timedelta(hours=hours)

    @rule(tuned=TUNED)
    def tune(self, tuned: TunedValue) -> None:
        outcome = begin_tuned(self.state, self.view, tuned, self.now)
        if outcome.state.tuned != self.state.tuned:
            self.changed_at = self.now
        self.state = outcome.state

    @invariant()
    def within_bounds(self) -> None:
        level = getattr(self, "state", State()).level
        if level is None:
            return
        assert 0 <= level.target <= self.view.ceiling
        everyone, some = effective_inputs(self.state, self.view)
        assert 0 <= everyone.target <= self.view.ceiling
        canary = self.state.canary
        assert (some is None) == (canary is None)
        if canary is not None and canary.mode is not None:
            assert canary.mode in everyone.suspended and some is not None and canary.mode not in some.suspended


TestPolicy = Policy.TestCase
TestPolicy.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


@given(st.lists(st.tuples(LOOKS, st.integers(-86400, 86400)), max_size=30), VIEWS)
@settings(max_examples=60, deadline=None)
def test_clocks_that_jump_break_nothing(steps: list[tuple[Sequence[Verdict], int]], view: View) -> None:
    """Levels stay within bounds, and down goes only what breached failureLimit times."""
    state, now = decide(State(), view, (), None, START).state, START
    breaches = 0
    for verdicts, seconds in steps:
        now += timedelta(seconds=seconds)
        before = state
        state = decide(state, view, seen(verdicts), None, now).state
        breaches += Verdict.BREACH in verdicts
        assert state.level is not None and before.level is not None and 0 <= state.level.target <= view.ceiling
        if state.level.target < before.level.target:
            assert breaches >= view.timing.failure_limit


@given(st.lists(LOOKS, max_size=40), VIEWS)
@settings(max_examples=60, deadline=None)
def test_observe_changes_nothing(looks: list[Sequence[Verdict]], view: View) -> None:
    view = replace(view, enforce=False)
    first = state = decide(State(), view, (), None, START).state
    for index, verdicts in enumerate(looks):
        outcome = decide(state, view, seen(verdicts), None, START + timedelta(seconds=30 * index))
        state = outcome.state
        assert {entry.decision for entry in outcome.decisions} <= {"Observed"}
    assert (state.level, state.suspended, state.canary) == (first.level, first.suspended, first.canary)


@given(st.lists(LOOKS, min_size=10, max_size=60), VIEWS)
@settings(max_examples=100, deadline=None)
def test_no_subject_is_left_a_third_time_within_the_window(looks: list[Sequence[Verdict]], view: View) -> None:
    """The bound of flapping: twice within rejectWindow, whatever is observed."""
    timing = replace(view.timing, cooldown=0, recover_after=0, reject_window=1e6, failure_limit=1, initial_delay=0)
    view = replace(view, timing=timing, enforce=True, ready_since=START, canary=None)
    state = decide(State(), view, (), None, START).state
    left: dict[str, int] = {}
    for index, verdicts in enumerate(looks * 4):
        outcome = decide(state, view, seen(verdicts), None, START + timedelta(seconds=30 * index))
        new = [record.subject for record in outcome.state.control.breaches[len(state.control.breaches) :]]
        for subject in new:
            left[subject] = left.get(subject, 0) + 1
        state = outcome.state
    assert all(times <= 2 for times in left.values()), left
