"""remediation: AutoApply: one value at a time, within bounds, and kept only if the cost of a request falls. Pure.

The objective is engine seconds of a request. A value is tried where health is conclusive and nothing else is on its
way; after a cooldown, and the window of the cost, it is kept or taken back, and one that was taken back isn't tried
again for this spec. A breach takes it back at once, and leads to what it would have led to without the trial: breaches
go on counting, and no cooldown is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from sixfold_api.analysis import Remediation
from sixfold_api.conditions import timestamp
from sixfold_api.control_status import Rejection, TrialStatus, TunedValue, Verdict
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.tuning import spec_value
from sixfold_operator.control.figures import request_cost_seconds, request_samples
from sixfold_operator.control.memory import entry, is_cooling, is_judged, with_control, with_rejection
from sixfold_operator.control.model import Outcome, Snapshot, State, View
from sixfold_operator.control.moments import seconds_since
from sixfold_operator.control.ramp import begin_tuned
from sixfold_operator.control.recommendations import recommend
from sixfold_operator.control.settling import settle
from sixfold_operator.control.waste import Facts, Waste, is_seen

LEAST_GAIN = 0.01
"""A value that brings less isn't worth differing from the spec."""
MIN_SAMPLES = 20.0
MOST_TRIALS = 3.0
"""So many times a trial's length without a measurement, and the value is taken back."""


def step(
    state: State,
    view: View,
    spec: InferencePolicySpec,
    found: Sequence[Waste],
    facts: Facts,
    snapshot: Snapshot | None,
    now: datetime,
    verdict: Verdict | None,
) -> Outcome:
    """What tuning does after a look: begins a trial, ends one, or nothing.

    Args:
        verdict: health, as `recovery.health` gives it: a trial begins where it is Ok, and ends where it is Breach.
    """
    cost = _objective(snapshot)
    if state.control.trial is not None:
        looks_seconds = view.timing.failure_limit * view.timing.interval
        trial_seconds = max(view.timing.cooldown, looks_seconds, facts.cost_window_seconds)
        return _judge(state, view, state.control.trial, cost, verdict, trial_seconds, now)
    is_wanted = spec.remediation is Remediation.AUTO_APPLY and verdict is Verdict.OK
    if not is_wanted or cost is None or not _is_calm(state, view, now):
        return Outcome(state)
    for waste in found:
        if not is_seen(waste, view.timing.failure_limit):
            continue
        advice = recommend(waste.cause, spec, facts, waste.variant)
        base = None if advice.path is None else spec_value(spec, advice.path)
        if advice.path is not None and advice.value is not None and base is not None:
            tuned = TunedValue(path=advice.path, value=advice.value, base=base, since=timestamp(now))
            return _begin(state, view, tuned, cost, waste, now)
    return Outcome(state)


def _objective(snapshot: Snapshot | None) -> float | None:
    """Engine seconds of a request; None without requests enough."""
    if snapshot is None or request_samples(snapshot) < MIN_SAMPLES:
        return None
    cost = request_cost_seconds(snapshot)
    return cost if cost is not None and math.isfinite(cost) and cost > 0 else None


def _is_calm(state: State, view: View, now: datetime) -> bool:
    """Ready for long enough, everything on, and nothing under way."""
    is_idle = state.canary is None and _is_whole(state, view)
    return is_idle and is_judged(view, now) and not is_cooling(state, view, now)


def _is_whole(state: State, view: View) -> bool:
    """Whether nothing was rolled back."""
    return state.level is not None and state.level.target == view.ceiling and not state.suspended


def _begin(state: State, view: View, tuned: TunedValue, cost: float, waste: Waste, now: datetime) -> Outcome:
    previous = next((held.value for held in state.tuned if held.path == tuned.path), None)
    outcome = begin_tuned(state, view, tuned, now)
    if not outcome.decisions:
        return outcome
    after = settle(state, outcome.state, view, now)
    trial = TrialStatus(path=tuned.path, previous=previous, objective=f"{cost:.9g}", since=timestamp(now))
    before = previous or tuned.base
    message = f"{tuned.path} {before} -> {tuned.value}, on trial: {waste.signal} breaches ({waste.cause})"
    told = entry(now, "Tuned", waste.signal, message)
    decisions = tuple(told if item.decision == "Tuned" else item for item in outcome.decisions)
    return Outcome(with_control(after, trial=trial), decisions)


def _judge(
    state: State,
    view: View,
    trial: TrialStatus,
    cost: float | None,
    verdict: Verdict | None,
    trial_seconds: float,
    now: datetime,
) -> Outcome:
    """A running trial: kept, taken back, or given more time."""
    held = next((entry for entry in state.tuned if entry.path == trial.path), None)
    on_trial = state.canary is not None and state.canary.tuned is not None and state.canary.tuned.path == trial.path
    if on_trial:
        return Outcome(state)
    if held is None:  # the spec changed below it, or its canary ended
        return Outcome(with_control(state, trial=None))
    waited = seconds_since(held.since, now)
    if verdict is Verdict.BREACH:
        return _take_back(state, view, trial, held, "health suffered", now)
    if not _is_whole(state, view):
        return _take_back(state, view, trial, held, "not all is on any more", now)
    if waited < trial_seconds or (cost is None and waited < MOST_TRIALS * trial_seconds):
        return Outcome(state)
    if cost is None:
        return _take_back(state, view, trial, held, "its effect could not be measured", now)
    before = float(trial.objective)
    gain = 1 - cost / before
    figures = f"{before * 1000:.3g} -> {cost * 1000:.3g} ms of an engine a request ({-100 * gain:+.1f} %)"
    if gain < LEAST_GAIN:
        return _take_back(state, view, trial, held, figures, now)
    message = f"{trial.path} = {held.value} is kept: {figures}"
    return Outcome(with_control(state, trial=None), (entry(now, "TuningKept", "Objective", message),))


def _take_back(state: State, view: View, trial: TrialStatus, held: TunedValue, why: str, now: datetime) -> Outcome:
    """As it was before: no cooldown is left, and no window is waited for, so that a breach leads on to a step down."""
    others = tuple(item for item in state.tuned if item.path != trial.path)
    if trial.previous is not None:
        others += (held.model_copy(update={"value": trial.previous, "since": timestamp(now)}),)
    rejection = Rejection(path=trial.path, value=held.value, spec_hash=view.spec_hash, reason="Tuning")
    after = with_rejection(replace(state, tuned=others), rejection)
    message = f"{trial.path} = {held.value} is taken back: {why}"
    changes = {"trial": None} if not _is_whole(state, view) else {"trial": None, "changed_at": None}
    return Outcome(with_control(after, **changes), (entry(now, "TuningReverted", "Objective", message),))
