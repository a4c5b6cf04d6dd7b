"""Canaries through the reducer: mode by mode, widened, promoted, rejected, ended; and tuned values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from sixfold_api.control_status import TunedValue, Verdict
from sixfold_api.modes import Mode
from sixfold_operator.control.levels import active_modes, effective_inputs
from sixfold_operator.control.model import (
    Action,
    CanaryJudgement,
    CanaryPlan,
    Observed,
    Outcome,
    State,
    Timing,
    View,
)
from sixfold_operator.control.ramp import begin_tuned
from sixfold_operator.control.reducer import decide

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
PLAN = CanaryPlan((5, 50), step_seconds=90, min_samples=50)
MODES = frozenset({Mode.QUANTIZED, Mode.SPECULATIVE, Mode.KV_CACHE_REUSE, Mode.COMPRESSED_STREAMING})
TIMING = Timing(interval=30, initial_delay=0, failure_limit=3, cooldown=120, recover_after=300, reject_window=7200)
VIEW = View(ceiling=3, levels=(0, 1, 2, 3), modes=MODES, spec_hash="a", timing=TIMING, canary=PLAN, ready_since=NOW)
GOOD = CanaryJudgement(Verdict.OK, 60, "60 requests, no worse than the rest")
BAD = CanaryJudgement(Verdict.BREACH, 60, "9 % failed, against 1 %", "ErrorRate")
OK, BREACH = Verdict.OK, Verdict.BREACH
TUNED = TunedValue(path="/generation/speculative/numTokens", value="3", base="5", since="2030-01-01T12:00:00Z")


def latency(verdict: Verdict) -> Observed:
    return Observed("RequestP95", verdict, is_primary=True)


def acceptance(verdict: Verdict) -> Observed:
    return Observed("AcceptanceRate", verdict, action=Action.SUSPEND, blames=Mode.SPECULATIVE)


class Loop:
    def __init__(self, view: View = VIEW, *, ceiling: int = 0) -> None:
        """A policy that ran at `ceiling` before the view's was asked for."""
        self.view, self.now, self.told = view, NOW, list[str]()
        self.state = decide(State(), replace(view, ceiling=ceiling), (), None, NOW).state
        self.tick((), None)

    def take(self, outcome: Outcome) -> Loop:
        self.state = outcome.state
        self.told += [entry.decision for entry in outcome.decisions]
        return self

    def tick(self, observed: Sequence[Observed], canary: CanaryJudgement | None = GOOD, times: int = 1) -> Loop:
        for _ in range(times):
            self.now += timedelta(seconds=30)
            self.take(decide(self.state, self.view, observed, canary, self.now))
        return self

    def good(self, times: int) -> Loop:
        return self.tick([latency(OK)], GOOD, times)

    @property
    def trial(self) -> tuple[Mode | str | None, int] | None:
        canary = self.state.canary
        if canary is None:
            return None
        return canary.mode if canary.tuned is None else canary.tuned.path, canary.percent

    @property
    def on(self) -> set[Mode]:
        return set(active_modes(self.state, self.view))

    @property
    def target(self) -> int:
        assert self.state.level is not None
        return self.state.level.target


def test_a_human_s_way_up_goes_mode_by_mode_at_once() -> None:
    loop = Loop()
    assert (loop.target, loop.on, loop.trial) == (3, set(), (Mode.QUANTIZED, 5))
    stable, canary = effective_inputs(loop.state, VIEW)
    assert canary is not None and set(stable.suspended) == MODES
    assert set(canary.suspended) == MODES - {Mode.QUANTIZED} and canary.target == 3
    loop.good(2)
    assert loop.trial == (Mode.QUANTIZED, 5)
    loop.good(1)
    assert loop.trial == (Mode.QUANTIZED, 50)
    loop.good(3)
    assert (loop.on, loop.trial) == ({Mode.QUANTIZED}, None)
    loop.good(1)
    assert loop.trial == (Mode.SPECULATIVE, 5)
    loop.good(60)
    assert (loop.on, loop.trial) == (MODES, None)
    assert loop.state.suspended == ()
    assert loop.told.count("CanaryPromoted") == 4


def test_too_few_samples_unknown_and_ill_health_hold_the_canary() -> None:
    loop = Loop()
    loop.tick([latency(OK)], CanaryJudgement(OK, 49), 100)
    loop.tick([latency(OK)], CanaryJudgement(Verdict.UNKNOWN, 500), 100)
    loop.tick([latency(OK)], None, 100)
    loop.tick([latency(Verdict.UNKNOWN)], GOOD, 100)
    loop.tick([latency(BREACH)], GOOD, 2)
    assert loop.trial == (Mode.QUANTIZED, 5)


def test_a_worse_canary_is_rejected_at_once_and_the_others_go_on() -> None:
    loop = Loop().good(8)
    assert loop.trial == (Mode.SPECULATIVE, 5)
    loop.tick([latency(OK)], BAD)
    assert (loop.on, loop.trial) == ({Mode.QUANTIZED}, None)
    assert loop.state.level is not None and loop.state.level.rejected[0].mode is Mode.SPECULATIVE
    loop.good(500)
    assert loop.on == MODES - {Mode.SPECULATIVE}
    assert loop.told.count("CanaryRejected") == 1
    loop.view = replace(VIEW, spec_hash="b")
    loop.tick((), None)
    assert loop.trial == (Mode.SPECULATIVE, 5), "what ran goes on, what was rejected is tried anew"
    assert loop.on == MODES - {Mode.SPECULATIVE}


def test_a_signal_that_blames_the_mode_on_trial_rejects_it() -> None:
    loop = Loop().good(8).tick([latency(OK), acceptance(BREACH)], CanaryJudgement(Verdict.UNKNOWN, 0), 3)
    assert (loop.on, loop.trial) == ({Mode.QUANTIZED}, None)
    assert loop.told[-1] == "CanaryRejected"


def test_a_breach_of_what_runs_for_all_ends_the_canary_unblamed() -> None:
    loop = Loop().good(8)
    assert loop.trial == (Mode.SPECULATIVE, 5)
    loop.tick([latency(BREACH)], CanaryJudgement(Verdict.UNKNOWN, 0), 3)
    assert (loop.on, loop.trial) == (set(), None)
    assert loop.target == 0, "quantised weights ran for all: they are what was left"
    assert loop.told[-2:] == ["LevelChanged", "CanaryEnded"]
    assert loop.state.level is not None and loop.state.level.rejected == []
    assert [record.subject for record in loop.state.control.breaches] == ["Level/1"]
    loop.good(10)
    assert loop.trial is None, "first there must be health for long enough"
    loop.good(2)
    assert (loop.target, loop.trial) == (1, (Mode.QUANTIZED, 5))


def test_recovery_goes_through_the_canary() -> None:
    loop = Loop(ceiling=3).tick([latency(OK), acceptance(BREACH)], None, 3)
    assert loop.on == MODES - {Mode.SPECULATIVE}
    loop.good(11)
    assert loop.trial == (Mode.SPECULATIVE, 5)
    stable, canary = effective_inputs(loop.state, VIEW)
    assert set(stable.suspended) == {Mode.SPECULATIVE} and canary is not None and not canary.suspended
    loop.good(6)
    assert (loop.on, loop.trial) == (MODES, None)


def test_a_level_down_by_the_operator_is_immediate_for_all_in_spite_of_a_canary() -> None:
    loop = Loop(ceiling=3).tick([latency(BREACH)], None, 3)
    assert (loop.target, loop.on) == (2, {Mode.QUANTIZED, Mode.SPECULATIVE})


def test_modes_of_a_whole_process_take_their_turn_without_a_canary() -> None:
    modes = frozenset({Mode.QUANTIZED, Mode.SUBGRAPHS, Mode.DYNAMIC_BATCHING})
    loop = Loop(replace(VIEW, modes=modes, unsplittable=VIEW.unsplittable | {Mode.QUANTIZED}))
    assert (loop.on, loop.trial) == ({Mode.QUANTIZED}, None)
    loop.good(1)
    assert loop.on == {Mode.QUANTIZED}, "one change a cooldown"
    loop.good(3)
    assert loop.on == {Mode.QUANTIZED, Mode.SUBGRAPHS}
    loop.good(4)
    assert loop.on == modes
    assert "CanaryStarted" not in loop.told


def test_a_mode_that_the_spec_adds_is_tried_and_what_ran_goes_on() -> None:
    loop = Loop(replace(VIEW, modes=MODES - {Mode.KV_CACHE_REUSE}), ceiling=3)
    loop.state = replace(loop.state, active=frozenset(loop.on))
    loop.view = replace(VIEW, spec_hash="b")
    loop.tick((), None)
    assert (loop.on, loop.trial) == (MODES - {Mode.KV_CACHE_REUSE}, (Mode.KV_CACHE_REUSE, 5))


def test_without_the_plan_nothing_waits() -> None:
    loop = Loop()
    loop.view = replace(VIEW, canary=None)
    loop.good(1)
    assert (loop.on, loop.trial, loop.state.suspended) == (MODES, None, ())


def test_observe_leaves_a_canary_as_it_is() -> None:
    loop = Loop()
    loop.view = replace(VIEW, enforce=False)
    loop.good(100).tick([latency(OK)], BAD, 10)
    assert (loop.on, loop.trial) == (set(), (Mode.QUANTIZED, 5))
    loop.view = replace(VIEW, enforce=False, ceiling=2)
    loop.tick((), None)
    assert (loop.on, loop.trial) == ({Mode.QUANTIZED, Mode.SPECULATIVE}, None)


def test_a_tuned_value_goes_through_the_canary() -> None:
    loop = Loop(ceiling=3)
    loop.take(begin_tuned(loop.state, VIEW, TUNED, loop.now))
    assert loop.trial == (TUNED.path, 5)
    stable, canary = effective_inputs(loop.state, VIEW)
    assert stable.tuned == () and canary is not None and canary.tuned == (TUNED,)
    loop.good(6)
    assert (loop.trial, loop.state.tuned) == (None, (TUNED,))


def test_a_rejected_value_is_not_begun_again() -> None:
    loop = Loop(ceiling=3)
    loop.take(begin_tuned(loop.state, VIEW, TUNED, loop.now)).tick([latency(OK)], BAD)
    assert (loop.trial, loop.state.tuned) == (None, ())
    assert begin_tuned(loop.state, VIEW, TUNED, loop.now) == Outcome(loop.state)
    other = TUNED.model_copy(update={"value": "4"})
    assert begin_tuned(loop.state, VIEW, other, loop.now).state.canary is not None


def test_a_value_of_a_whole_process_holds_for_all_at_once() -> None:
    loop = Loop(ceiling=3)
    value = TUNED.model_copy(update={"path": "/batching/maxBatchTokens"})
    loop.take(begin_tuned(loop.state, VIEW, value, loop.now))
    assert (loop.trial, loop.state.tuned) == (None, (value,))


def test_a_tuned_value_waits_while_modes_are_tried() -> None:
    loop = Loop()
    assert begin_tuned(loop.state, VIEW, TUNED, loop.now) == Outcome(loop.state)
