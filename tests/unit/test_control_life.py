"""Whole looks at a policy: trials and canaries that end, alerts that alone tell of health, modes that can't run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from control_life import INTERVAL_SECONDS, Life

from sixfold_api.conditions import timestamp
from sixfold_api.control_status import TrialStatus, TunedValue
from sixfold_api.modes import Mode, ModeState
from sixfold_api.policy import ModeStatus
from sixfold_operator.alerts import Heard
from sixfold_operator.reconcile.loop_conditions import ALERTS_ONLY, NOT_CONFIGURED

PATH = "/generation/speculative/numTokens"
GENERATION = {"variantRef": {"name": "chat"}, "speculative": {"draftVariantRef": {"name": "tiny"}}}
CANARY = {"canary": {"steps": [50], "stepDuration": "60s", "minSamples": 20}}
ALERTS = {"alerts": [{"alertName": "High5xx", "action": "StepDown"}], "recoverAfter": "60s"}


def fires(life: Life, is_firing: bool = True) -> None:
    life.alerts = {"High5xx": Heard(is_firing, life.now)}


def test_an_alert_alone_lowers_and_its_end_brings_the_level_back() -> None:
    life = Life(analysis=ALERTS, watches=False, hears=True).run(60)
    fires(life)
    life.look(1)
    assert (life.level, life.decided.decisions[0].reason) == (2, "Alert/High5xx")
    life.run(600)
    lowered = life.level
    assert lowered < 3, "it goes on firing"
    fires(life, False)
    life.run(50)
    assert life.level == lowered
    life.run(30 + 3 * 80)
    assert life.level == 3


def test_where_prometheus_is_configured_and_says_nothing_no_alert_s_end_brings_anything_back() -> None:
    life = Life(analysis=ALERTS, hears=True).run(60)
    fires(life)
    life.look(1)
    life.down = "can't be reached"
    fires(life, False)
    life.run(1000)
    assert life.level == 2
    life.down = ""
    life.run(200)
    assert life.level == 3


def test_without_a_receiver_nothing_tells_of_health() -> None:
    life = Life(analysis=ALERTS, hears=True, watches=False).run(60)
    fires(life)
    life.look(1)
    life.alerts, life.hears = {}, False
    life.restart()
    life.run(1000)
    assert life.level == 2


def test_after_a_restart_an_alert_that_fired_holds_the_level() -> None:
    life = Life(analysis=ALERTS, hears=True, watches=False).run(60)
    fires(life)
    life.look(1)
    life.alerts = {}
    life.restart()
    life.run(1000)
    assert life.level == 2, "whether it still fires isn't known yet"
    fires(life, False)
    life.run(80)
    assert life.level == 3


def test_a_policy_without_alerts_is_told_that_nothing_is_watched() -> None:
    assert "alerts" in ALERTS_ONLY and "nothing is watched" in NOT_CONFIGURED
    life = Life(hears=True, watches=False).run(60)
    assert not life.decided.watches and life.decided.hears and life.decided.observed == ()


def test_a_mode_on_trial_that_pods_cannot_run_is_not_promoted() -> None:
    life = Life(spec={**CANARY, "rollbackLevel": 0}).rest()
    life.change(rollbackLevel=2)
    assert life.decided.state.canary is not None and life.decided.state.canary.mode is Mode.QUANTIZED
    why = "pod bot-engine-0: the weights have no fast kernel here"
    told = ModeStatus(name=Mode.QUANTIZED, state=ModeState.UNSUPPORTED, reason=why)
    life.status = life.status.model_copy(update={"modes": [told]})
    life.run(20)
    assert ("CanaryRejected", "Unsupported") in [(what, because) for _, what, because in life.told]
    assert why in next(entry.message for entry in life.status.history if entry.decision == "CanaryRejected")
    life.status = life.status.model_copy(update={"modes": []})
    life.run(2000)
    assert life.on == {Mode.SPECULATIVE}, "the next one has its turn"
    assert {entry.mode: entry.reason for entry in life.decided.state.suspended} == {Mode.QUANTIZED: "Unsupported"}
    life.change(retryToken="again")
    assert life.decided.state.canary is not None and life.decided.state.canary.mode is Mode.QUANTIZED


def test_a_signal_that_blames_the_mode_on_trial_ends_it() -> None:
    """The signal tells no arms apart: only the canary drafts."""
    life = Life(spec={**CANARY, "rollbackLevel": 0, "generation": GENERATION}).rest()
    life.faulty = lambda modes: {"AcceptanceRate"} if Mode.SPECULATIVE in modes else set()
    life.change(rollbackLevel=2)
    assert life.decided.state.canary is not None and life.decided.state.canary.mode is Mode.SPECULATIVE
    life.run(60 + 4 * INTERVAL_SECONDS)
    assert ("CanaryRejected", "AcceptanceRate") in [(what, because) for _, what, because in life.told]


def test_a_canary_is_not_held_to_what_the_one_before_it_did() -> None:
    """Their series have the same labels."""
    life = Life(spec={**CANARY, "rollbackLevel": 0}).run(400)
    life.faulty = lambda modes: {"ArmErrorRate"} if Mode.QUANTIZED in modes else set()
    life.change(rollbackLevel=2)
    begun = life.seconds
    life.run(1500)
    rejected = [(seconds, because) for seconds, what, because in life.told if what == "CanaryRejected"]
    assert [because for _, because in rejected] == ["ErrorRate"]
    assert rejected[0][0] - begun <= 3 * INTERVAL_SECONDS, "no canary ran before the first: it is judged at once"
    assert life.on == {Mode.SPECULATIVE}


def test_old_figures_promote_no_canary() -> None:
    life = Life(spec={**CANARY, "rollbackLevel": 0}).run(400)
    life.change(rollbackLevel=2)
    life.down = "can't be reached"
    life.run(2000)
    assert life.on == frozenset() and life.decided.state.canary is not None


def in_trial(failure_limit: int) -> Life:
    """A value has just been set, which begins a cooldown of an hour."""
    analysis = {"cooldown": "1h", "recoverAfter": "2h", "failureLimit": failure_limit}
    life = Life(analysis=analysis, spec={"remediation": "AutoApply"}).rest()
    began = timestamp(life.now)
    value = TunedValue(path=PATH, value="3", base="5", since=began)
    trial = TrialStatus(path=PATH, objective="0.01", since=began)
    control = life.decided.state.control.model_copy(update={"trial": trial, "changed_at": began})
    life.status = life.status.model_copy(update={"tuned": [value], "control": control})
    return life.run(20)


@pytest.mark.parametrize("failure_limit", [1, 3])
def test_a_breach_ends_a_trial_and_leads_on_without_a_wait(failure_limit: int) -> None:
    life = in_trial(failure_limit)
    assert life.status.tuned and life.downs == []
    life.faulty = lambda _: {"RequestP95"}
    begun = life.seconds
    life.run(60)
    ended = [seconds for seconds, what, _ in life.told if what == "TuningReverted"]
    assert ended == [begun + INTERVAL_SECONDS]
    assert life.downs[0] == (begun + failure_limit * INTERVAL_SECONDS, "LevelChanged", "RequestP95")
    assert (life.level, life.status.tuned, life.decided.state.control.trial) == (2, [], None)
    assert life.decided.state.level is not None
    assert [(entry.path, entry.value) for entry in life.decided.state.level.rejected] == [(PATH, "3")]
    life.run(600)
    assert len(life.downs) == 1, "the step down has a cooldown of its own"


def test_a_blamed_mode_is_suspended_during_a_trial_without_a_wait() -> None:
    life = in_trial(3)
    life.faulty = lambda modes: {"AcceptanceRate"} if Mode.SPECULATIVE in modes else set()
    begun = life.seconds
    life.run(60)
    assert life.downs == [(begun + 3 * INTERVAL_SECONDS, "ModeSuspended", "AcceptanceRate")]
    assert life.decided.state.control.trial is None


def test_a_sound_policy_is_left_alone() -> None:
    assert Life(hears=True).run(3000).downs == []
