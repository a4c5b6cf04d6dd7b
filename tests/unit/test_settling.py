"""Windows look back: what ran before a change is never held against what runs after it, and reactions stay in time."""

from __future__ import annotations

import sys
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from control_life import INTERVAL_SECONDS, Life, sound

from sixfold_api.control_status import Verdict
from sixfold_api.modes import Mode

WINDOW_SECONDS = {"ErrorRate": 60.0, "RequestP95": 60.0, "AcceptanceRate": 60.0, "ExitRate": 60.0}
SHADOW_SECONDS = 600.0
FAILURES_SECONDS = 3 * INTERVAL_SECONDS
SIGNALS = st.sampled_from([*WINDOW_SECONDS, "ShadowDisagreement"])


def window(signal: str) -> float:
    return WINDOW_SECONDS.get(signal, SHADOW_SECONDS)


@given(signal=SIGNALS, seconds=st.sampled_from([0, 10, 20, 30, 50, 70, 200, 650]), is_hash=st.booleans())
@settings(max_examples=12, deadline=None)
def test_what_was_before_a_humans_change_is_not_held_against_it(signal: str, seconds: int, is_hash: bool) -> None:
    """Whether the operator had acted already or not."""
    life = Life(analysis={"recoverAfter": "1h"}).rest()
    life.faulty = lambda _: {signal}
    life.run(seconds)
    life.faulty = sound
    change = {"batching": {}} if is_hash else {"retryToken": "again"}
    life.change(**change)
    before = len(life.downs)
    life.run(window(signal) + 2 * FAILURES_SECONDS)
    assert life.downs[before:] == []
    assert life.level == 3


@given(signal=SIGNALS, quiet=st.sampled_from([0, 10, 30, 50, 70, 200, 650]))
@settings(max_examples=12, deadline=None)
def test_a_true_fault_of_a_new_state_is_caught_in_time(signal: str, quiet: int) -> None:
    """Within the window and failureLimit intervals, however soon after the change it begins."""
    life = Life().rest()
    life.change(retryToken="again")
    life.run(quiet)
    life.faulty = lambda _: {signal}
    begun = life.seconds
    life.run(window(signal) + FAILURES_SECONDS + INTERVAL_SECONDS)
    assert life.downs
    assert life.downs[0][0] - begun <= window(signal) + FAILURES_SECONDS


@pytest.mark.parametrize("signal", [*WINDOW_SECONDS, "ShadowDisagreement"])
def test_a_policy_at_rest_waits_for_no_window(signal: str) -> None:
    life = Life().rest()
    life.faulty = lambda _: {signal}
    begun = life.seconds
    life.run(100)
    assert life.downs[0][0] - begun <= window(signal) / 10 + FAILURES_SECONDS, "a tenth of the window shows it"


def test_too_soon_is_said_in_words() -> None:
    life = Life().rest()
    life.change(retryToken="again")
    life.run(10)
    found = {item.name: item for item in life.decided.observed}
    assert found["ErrorRate"].verdict is Verdict.UNKNOWN
    assert found["ErrorRate"].why == (
        "too soon after the change: its window of 60 s reaches back before 2030-01-01T00:11:40Z"
    )
    life.run(60)
    assert next(item for item in life.decided.observed if item.name == "ErrorRate").verdict is Verdict.OK


def test_a_suspended_mode_is_not_followed_by_a_level_for_what_it_did() -> None:
    """Series of a level show, for a window, what the mode did to it."""
    life = Life(analysis={"recoverAfter": "1h"}).rest()
    life.faulty = lambda modes: {"AcceptanceRate", "RequestP95"} if Mode.SPECULATIVE in modes else set()
    life.run(700)
    assert [(what, why) for _, what, why in life.downs] == [("ModeSuspended", "AcceptanceRate")]


@given(recover_seconds=st.sampled_from([10, 60, 200]), lasts_seconds=st.integers(0, 20).map(lambda n: 10 * n))
@settings(max_examples=6, deadline=None)
def test_a_level_is_not_left_again_for_what_it_was_left_for(recover_seconds: int, lasts_seconds: int) -> None:
    """Its series still show it when the level is come back to sooner than a window after."""
    life = Life(analysis={"recoverAfter": f"{recover_seconds}s"}).rest()
    life.faulty = lambda modes: {"ShadowDisagreement"} if Mode.EARLY_EXIT in modes else set()
    while not life.downs:
        life.run(10)
    life.run(lasts_seconds if lasts_seconds < recover_seconds else 0)
    life.faulty = sound
    life.run(6 * recover_seconds + 600)
    assert len(life.downs) == 1
    assert life.level == 3


def test_a_lower_level_is_judged_at_once() -> None:
    """Its label tells it apart: a fault that goes on leads on."""
    life = Life(analysis={"recoverAfter": "1h"}).rest()
    life.faulty = lambda _: {"RequestP95"}
    life.run(150)
    steps = [seconds for seconds, what, _ in life.downs if what == "LevelChanged"]
    assert len(steps) == 3
    assert all(second - first == FAILURES_SECONDS for first, second in pairwise(steps))


def test_a_lower_ceiling_is_judged_at_once_and_a_policys_series_are_not() -> None:
    life = Life().rest()
    life.change(rollbackLevel=2)
    life.run(20)
    verdicts = {item.name: item.verdict for item in life.decided.observed}
    assert verdicts["ErrorRate"] is Verdict.OK
    assert verdicts["ShadowDisagreement"] is Verdict.OK
    life.change(rollbackLevel=3)
    life.run(20)
    assert life.why("ExitRate").startswith("too soon")


def test_after_a_restart_the_window_goes_on() -> None:
    life = Life().rest()
    life.faulty = lambda _: {"ErrorRate"}
    life.run(20)
    life.faulty = sound
    life.change(retryToken="again")
    life.run(10)
    life.restart()
    life.run(200)
    assert life.downs == []


@given(hours=st.integers(-48, 48))
@settings(max_examples=10, deadline=None)
def test_a_clock_that_jumps_holds_nothing_back_for_longer_than_a_window(hours: int) -> None:
    life = Life().rest()
    life.change(retryToken="again")
    life.now += timedelta(hours=hours)
    life.faulty = lambda _: {"ErrorRate"}
    life.run(60 + FAILURES_SECONDS + 2 * INTERVAL_SECONDS)
    assert hours < 0 or life.downs
