"""The reducer, case by case: breaches, suspensions, recovery, rejections, a human's change, Observe, odd clocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from sixfold_api.control_status import CanaryStatus, ControlStatus, LevelStatus, SignalStatus, Suspension, Verdict
from sixfold_api.modes import Mode
from sixfold_operator.control.levels import active_modes, effective_inputs
from sixfold_operator.control.model import Action, Observed, Outcome, SignalKind, State, Timing, View
from sixfold_operator.control.reducer import decide

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
ALL = frozenset(Mode)
TIMING = Timing(interval=30, initial_delay=60, failure_limit=3, cooldown=300, recover_after=600, reject_window=7200)
VIEW = View(
    ceiling=3, levels=(0, 1, 2, 3), modes=ALL, spec_hash="a", timing=TIMING, ready_since=NOW - timedelta(hours=1)
)
OK, BREACH, UNKNOWN = Verdict.OK, Verdict.BREACH, Verdict.UNKNOWN


def latency(verdict: Verdict) -> Observed:
    return Observed("RequestP95", verdict, is_primary=True, why="P95 31 s, over 30 s")


def acceptance(verdict: Verdict) -> Observed:
    return Observed("AcceptanceRate", verdict, action=Action.SUSPEND, blames=Mode.SPECULATIVE, why="0.1, under 0.3")


def disagreement(verdict: Verdict) -> Observed:
    return Observed("ShadowDisagreement", verdict, action=Action.LEVEL_0, why="at least 9 %, over 5 %")


class Loop:
    """Calls the reducer once an interval."""

    def __init__(self, view: View = VIEW) -> None:
        self.view, self.now = view, NOW
        self.state = State()
        self.decisions: list[str] = []
        self.tick()

    def tick(self, *observed: Observed, times: int = 1) -> Loop:
        for _ in range(times):
            self.now += timedelta(seconds=self.view.timing.interval)
            outcome = decide(self.state, self.view, observed, None, self.now)
            self.state = outcome.state
            self.decisions += [entry.decision for entry in outcome.decisions]
        return self

    def spec(self, view: View) -> Outcome:
        """A changed spec, decided on at once."""
        self.view = view
        outcome = decide(self.state, view, (), None, self.now)
        self.state = outcome.state
        return outcome

    def healthy(self, seconds: float) -> Loop:
        return self.tick(latency(OK), times=int(seconds / self.view.timing.interval))

    @property
    def target(self) -> int:
        assert self.state.level is not None
        return self.state.level.target

    @property
    def suspended(self) -> dict[Mode, str]:
        return {entry.mode: entry.reason for entry in self.state.suspended}


def test_the_first_decision_is_the_ceiling() -> None:
    outcome = decide(State(), VIEW, (latency(BREACH),), None, NOW)
    assert outcome.state.level == LevelStatus(target=3, reason="Spec", since="2030-01-01T12:00:00Z")
    assert [entry.decision for entry in outcome.decisions] == ["LevelChanged"]


def test_a_breach_that_nothing_is_blamed_for_steps_down_once_it_lasted() -> None:
    loop = Loop().tick(latency(BREACH), times=2)
    assert loop.target == 3
    loop.tick(latency(BREACH))
    assert loop.target == 2
    assert loop.state.level is not None and loop.state.level.reason == "RequestP95"
    assert loop.state.signals[0].failures == 0


def test_unknown_keeps_the_count_and_ok_ends_it() -> None:
    loop = Loop().tick(latency(BREACH), times=2).tick(latency(UNKNOWN), times=50)
    assert loop.target == 3
    loop.tick(latency(BREACH))
    assert loop.target == 2
    loop = Loop().tick(latency(BREACH)).tick(latency(UNKNOWN), times=50).tick(latency(BREACH))
    assert loop.target == 3
    loop = Loop().tick(latency(BREACH), times=2).tick(latency(OK)).tick(latency(BREACH), times=2)
    assert loop.target == 3


def test_a_look_without_a_signal_keeps_its_verdict() -> None:
    loop = Loop().tick(latency(BREACH), times=2)
    loop.tick(times=5)
    assert loop.state.signals == (SignalStatus(name="RequestP95", verdict=BREACH, failures=2),)
    loop.tick(latency(BREACH))
    assert loop.target == 2


def test_signals_that_are_gone_are_forgotten_and_alerts_are_not() -> None:
    alert = Observed("Alert/High5xx", BREACH)
    loop = Loop().tick(latency(OK), acceptance(BREACH), alert).tick(latency(OK))
    assert {signal.name for signal in loop.state.signals} == {"RequestP95", "Alert/High5xx"}


def test_a_change_ends_the_hysteresis_of_the_breach_that_led_to_it() -> None:
    """At another level a value just under the threshold is healthy."""
    loop = Loop().tick(latency(BREACH), Observed("Alert/High5xx", BREACH), times=3)
    assert {signal.name: signal.verdict for signal in loop.state.signals} == {
        "RequestP95": UNKNOWN,
        "Alert/High5xx": BREACH,
    }


def test_cooldown_holds_back_the_next_step_but_not_a_drop() -> None:
    loop = Loop().tick(latency(BREACH), times=3)
    assert loop.target == 2
    loop.tick(latency(BREACH), times=9)
    assert loop.target == 2
    loop.tick(latency(BREACH))
    assert loop.target == 1
    loop.tick(disagreement(BREACH), latency(OK), times=3)
    assert loop.target == 0
    assert loop.state.control.changed_at is not None


def test_a_blamed_mode_is_suspended_and_comes_back() -> None:
    loop = Loop().tick(latency(OK), acceptance(BREACH), times=3)
    assert (loop.target, loop.suspended) == (3, {Mode.SPECULATIVE: "AcceptanceRate"})
    assert Mode.SPECULATIVE not in active_modes(loop.state, VIEW)
    loop.healthy(630)
    assert (loop.target, loop.suspended) == (3, {})
    assert loop.decisions == ["LevelChanged", "ModeSuspended", "ModeRestored"]


def test_a_blamed_mode_that_does_not_run_is_left_alone() -> None:
    loop = Loop(replace(VIEW, ceiling=1)).tick(acceptance(BREACH), latency(OK), times=20)
    assert (loop.target, loop.suspended, loop.decisions) == (1, {}, ["LevelChanged"])


def test_level_0_comes_before_a_suspension_and_that_before_a_step() -> None:
    loop = Loop().tick(latency(BREACH), acceptance(BREACH), disagreement(BREACH), times=3)
    assert (loop.target, loop.suspended) == (0, {})
    loop = Loop().tick(latency(BREACH), acceptance(BREACH), times=3)
    assert (loop.target, loop.suspended) == (3, {Mode.SPECULATIVE: "AcceptanceRate"})


def test_levels_that_change_nothing_are_skipped_both_ways() -> None:
    view = replace(VIEW, levels=(0, 1, 3), modes=frozenset({Mode.QUANTIZED}))
    loop = Loop(view).tick(latency(BREACH), times=3)
    assert loop.target == 0
    loop.healthy(630)
    assert loop.target == 3, "nothing above level 1 differs, so that the ceiling is reached"


def exits(verdict: Verdict) -> Observed:
    return Observed("ExitRate", verdict, action=Action.SUSPEND, blames=Mode.EARLY_EXIT)


def test_recovery_is_stepwise_and_modes_come_before_levels() -> None:
    loop = Loop().tick(latency(OK), acceptance(BREACH), times=3).healthy(300).tick(latency(BREACH), times=3)
    assert (loop.target, list(loop.suspended)) == (2, [Mode.SPECULATIVE])
    loop.healthy(630)
    assert (loop.target, loop.suspended) == (2, {})
    loop.healthy(630)
    assert loop.target == 3
    assert loop.state.control.healthy_since is None


def test_a_mode_above_the_level_stays_away_until_the_level_is_back() -> None:
    loop = Loop().tick(latency(OK), exits(BREACH), times=3).healthy(300).tick(latency(BREACH), times=3)
    assert (loop.target, list(loop.suspended)) == (2, [Mode.EARLY_EXIT])
    loop.healthy(630)
    assert (loop.target, list(loop.suspended)) == (3, [Mode.EARLY_EXIT])
    loop.healthy(630)
    assert (loop.target, loop.suspended) == (3, {})


def test_a_step_down_passes_levels_whose_modes_are_suspended() -> None:
    loop = Loop(replace(VIEW, ceiling=2)).tick(latency(OK), acceptance(BREACH), times=3).healthy(300)
    loop.tick(latency(BREACH), times=3)
    assert loop.target == 0, "without speculation level 2 runs what level 1 runs"
    assert [record.subject for record in loop.state.control.breaches] == ["Mode/Speculative", "Level/1"]


def test_health_pauses_on_unknown_and_starts_again_on_a_breach() -> None:
    loop = Loop().tick(latency(BREACH), times=3).healthy(450)
    loop.tick(latency(UNKNOWN), times=100)
    assert loop.target == 2
    loop.healthy(240)
    assert loop.target == 3
    loop = Loop().tick(latency(BREACH), times=3).healthy(570).tick(latency(BREACH)).healthy(570)
    assert loop.target == 2


def test_a_firing_alert_is_no_health() -> None:
    loop = Loop().tick(latency(BREACH), times=3).tick(Observed("Alert/High5xx", BREACH))
    loop.healthy(3000)
    assert loop.target == 2
    loop.tick(Observed("Alert/High5xx", OK)).healthy(660)
    assert loop.target == 3


def test_waste_neither_rolls_back_nor_is_ill_health() -> None:
    waste = Observed("WastedFlops", BREACH, kind=SignalKind.WASTE)
    loop = Loop().tick(latency(BREACH), waste, times=3)
    loop.tick(latency(OK), waste, times=22)
    assert loop.target == 3


def test_the_second_breach_within_the_window_rejects_until_the_spec_changes() -> None:
    loop = Loop().tick(latency(BREACH), times=3).healthy(630)
    assert loop.target == 3
    loop.healthy(300).tick(latency(BREACH), times=3)
    assert loop.state.level is not None
    assert [(entry.level, entry.spec_hash, entry.reason) for entry in loop.state.level.rejected] == [
        (3, "a", "RequestP95")
    ]
    assert loop.decisions[-2:] == ["LevelChanged", "Rejected"]
    loop.healthy(36000)
    assert loop.target == 2
    loop.spec(replace(VIEW, spec_hash="b"))
    assert loop.target == 3 and loop.state.level.rejected == []


def test_a_second_breach_after_the_window_does_not_reject() -> None:
    loop = Loop().tick(latency(BREACH), times=3).healthy(8000).tick(latency(BREACH), times=3)
    assert loop.target == 2
    assert loop.healthy(630).target == 3


def test_a_rejected_mode_stays_away_and_the_level_goes_on() -> None:
    loop = Loop()
    for _ in range(2):
        loop.healthy(300).tick(latency(OK), acceptance(BREACH), times=3).healthy(630)
    assert list(loop.suspended) == [Mode.SPECULATIVE]
    loop.healthy(36000)
    assert list(loop.suspended) == [Mode.SPECULATIVE]
    outcome = loop.spec(replace(VIEW, retry_token="again"))
    assert loop.suspended == {}
    assert [entry.reason for entry in outcome.decisions] == ["RetryToken"]


def test_a_rejected_level_blocks_those_above_and_not_those_below() -> None:
    loop = Loop(replace(VIEW, ceiling=2))
    for _ in range(2):
        loop.healthy(300).tick(latency(BREACH), times=3).healthy(630)
    assert loop.target == 1
    loop.tick(latency(OK), disagreement(BREACH), times=3)
    assert loop.target == 0
    loop.healthy(6000)
    assert loop.target == 1


def test_a_human_wins_at_once() -> None:
    loop = Loop().tick(disagreement(BREACH), latency(OK), times=3)
    assert loop.target == 0
    loop.spec(replace(VIEW, ceiling=2))
    assert loop.target == 2
    assert loop.state.level is not None and loop.state.level.reason == "Spec"
    loop.spec(replace(VIEW, ceiling=1))
    assert loop.target == 1
    assert loop.state.control.breaches == []


def test_nothing_is_judged_before_the_delay_and_while_not_ready() -> None:
    slow = replace(TIMING, initial_delay=7200)
    for view in (replace(VIEW, ready_since=None), replace(VIEW, ready_since=NOW, timing=slow)):
        loop = Loop(view).tick(latency(BREACH), disagreement(BREACH), times=20)
        assert loop.target == 3
        assert {signal.verdict for signal in loop.state.signals} == {UNKNOWN}


def test_observe_only_tells_once_a_run() -> None:
    view = replace(VIEW, enforce=False)
    loop = Loop(view).tick(latency(BREACH), times=40)
    assert (loop.target, loop.decisions) == (3, ["LevelChanged", "Observed"])
    loop.tick(latency(OK)).tick(latency(BREACH), times=40)
    assert (loop.target, loop.decisions) == (3, ["LevelChanged", "Observed", "Observed"])


def test_decisions_say_why_in_words() -> None:
    state: State = Loop().tick(latency(BREACH), times=2).state
    outcome = decide(state, VIEW, (latency(BREACH),), None, NOW + timedelta(minutes=5))
    assert [(entry.reason, entry.message) for entry in outcome.decisions] == [
        ("RequestP95", "Level 3 -> 2: P95 31 s, over 30 s")
    ]


def test_a_clock_that_went_back_holds_the_cooldown_for_one_cooldown_at_most() -> None:
    loop = Loop().tick(latency(BREACH), times=3)
    loop.now -= timedelta(days=1)
    loop.view = replace(VIEW, ready_since=NOW - timedelta(days=2))
    loop.tick(latency(BREACH), times=10)
    assert loop.target == 2
    loop.tick(latency(BREACH), times=2)
    assert loop.target == 1


def test_a_clock_that_went_back_behind_the_ready_policy_still_judges() -> None:
    loop = Loop(replace(VIEW, ready_since=NOW + timedelta(days=1))).tick(latency(BREACH), times=3)
    assert loop.target == 2


def test_a_clock_that_leapt_ahead_is_not_taken_for_health() -> None:
    loop = Loop().tick(latency(BREACH), times=3).tick(latency(OK), times=2)
    loop.now += timedelta(days=1)
    loop.tick(latency(OK), times=8)
    assert loop.target == 2


def mangled(target: int, since: str) -> State:
    return State(
        level=LevelStatus.model_construct(target=target, reason="?", since=since, rejected=[]),
        suspended=(Suspension(mode=Mode.SPECULATIVE, reason="x", since=since),) * 2,
        canary=CanaryStatus(level=3, mode=Mode.EARLY_EXIT, percent=5, since=since),
        control=ControlStatus(spec_hash="a", ceiling=2, changed_at=since, healthy_since=since, healthy_seconds=10**9),
    )


@pytest.mark.parametrize("target", [-7, 0, 2, 9])
@pytest.mark.parametrize("since", ["", "yesterday", "9999-12-31T23:59:59Z", "2030-01-01T00:00:00"])
def test_a_mangled_status_stays_within_bounds(target: int, since: str) -> None:
    view = replace(VIEW, ceiling=2)
    state = mangled(target, since)
    observed: Sequence[Observed]
    for observed in ((), (latency(OK),), (latency(BREACH),) * 3, (disagreement(BREACH),)):
        outcome = decide(state, view, observed, None, NOW)
        assert outcome.state.level is not None and 0 <= outcome.state.level.target <= 2
        stable, canary = effective_inputs(outcome.state, view)
        assert 0 <= stable.target <= 2 and canary is None
        state = outcome.state
