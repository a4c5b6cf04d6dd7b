"""What a breach of a health signal leads to: level 0, a mode off, or one level down. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from sixfold_api.conditions import timestamp
from sixfold_api.control_status import HistoryEntry, Rejection, Suspension, Verdict
from sixfold_api.modes import Mode
from sixfold_operator.control.levels import active_modes, level_below, running_level, target
from sixfold_operator.control.memory import (
    changed,
    entry,
    is_cooling,
    is_second,
    with_breach,
    with_level,
    with_rejection,
)
from sixfold_operator.control.model import Action, Observed, Outcome, SignalKind, State, View
from sixfold_operator.control.ramp import interrupt, reject

ORDER = (Action.LEVEL_0, Action.SUSPEND, Action.STEP_DOWN)
"""The most careful first; a blamed mode before a level."""


def due(state: State, view: View, observed: Sequence[Observed]) -> list[Observed]:
    """Health signals that breach now, for at least the failureLimit-th time in a row, in the order of acting."""
    full = {signal.name for signal in state.signals if signal.failures >= view.timing.failure_limit}
    breaching = [
        item
        for item in observed
        if item.kind is SignalKind.HEALTH and item.verdict is Verdict.BREACH and item.name in full
    ]
    return sorted(breaching, key=lambda item: ORDER.index(item.action))


def respond(state: State, view: View, breaching: Sequence[Observed], now: datetime) -> Outcome:
    """Acts on the first of the signals that leads to something.

    One that blames the mode on trial rejects the canary. Any other that is about what runs for all ends it unblamed.
    """
    outcome = _respond(state, view, breaching, now)
    ended, decisions = state.canary, outcome.decisions
    if ended is None or outcome.state.canary is not None or any(d.decision == "CanaryRejected" for d in decisions):
        return outcome
    told = entry(now, "CanaryEnded", breaching[0].name, f"The canary ended unblamed: {_why(breaching[0])}")
    return Outcome(outcome.state, (*decisions, told))


def _respond(state: State, view: View, breaching: Sequence[Observed], now: datetime) -> Outcome:
    for item in breaching:
        if item.action is Action.SUSPEND and item.blames not in active_modes(state, view):
            if state.canary is not None and item.blames is not None and item.blames is state.canary.mode:
                return reject(state, view, item.name, item.why, now)
            continue
        outcome = _act(state, view, item, now)
        if outcome.decisions:
            return outcome
        state = interrupt(state, item.name, target(state, view))
    return Outcome(state)


def _act(state: State, view: View, item: Observed, now: datetime) -> Outcome:
    """One signal's action, unless there is nothing to turn off or the last change is too fresh: a trial never is, since
    it is taken back when something breaches."""
    if item.action is Action.LEVEL_0:
        return _lower(state, view, 0, item, now) if target(state, view) > 0 else Outcome(state)
    if state.control.trial is None and is_cooling(state, view, now):
        return Outcome(state)
    if item.action is Action.SUSPEND:
        return Outcome(state) if item.blames is None else _suspend(state, view, item.blames, item, now)
    below = level_below(state, view)
    return Outcome(state) if below is None else _lower(state, view, below, item, now)


def _lower(state: State, view: View, level: int, item: Observed, now: datetime) -> Outcome:
    running = running_level(state, view)
    after = changed(with_level(interrupt(state, item.name, level), level, item.name, now), now)
    told = entry(now, "LevelChanged", item.name, f"Level {target(state, view)} -> {level}: {_why(item)}")
    if running == 0:  # nothing was on: there is nothing to blame
        return Outcome(after, (told,))
    return _remembered(
        after, view, Rejection(level=running, spec_hash=view.spec_hash, reason=item.name[:64]), told, now
    )


def _suspend(state: State, view: View, mode: Mode, item: Observed, now: datetime) -> Outcome:
    after = interrupt(state, item.name, target(state, view))
    suspension = Suspension(mode=mode, reason=item.name[:64], since=timestamp(now))
    after = changed(replace(after, suspended=(*after.suspended, suspension)), now)
    told = entry(now, "ModeSuspended", item.name, f"{mode} is off: {_why(item)}")
    return _remembered(after, view, Rejection(mode=mode, spec_hash=view.spec_hash, reason=item.name[:64]), told, now)


def _remembered(state: State, view: View, blamed: Rejection, told: HistoryEntry, now: datetime) -> Outcome:
    """The breach is remembered; the second one of the same within rejectWindow rejects it."""
    subject = f"Level/{blamed.level}" if blamed.mode is None else f"Mode/{blamed.mode}"
    again = is_second(state, view, subject, now)
    state = with_breach(state, view, subject, now)
    if not again:
        return Outcome(state, (told,))
    what = f"Level {blamed.level}" if blamed.mode is None else str(blamed.mode)
    message = f"{what} failed twice within rejectWindow: it is not tried again until the spec or retryToken changes"
    return Outcome(with_rejection(state, blamed), (told, entry(now, "Rejected", blamed.reason, message)))


def _why(item: Observed) -> str:
    return item.why or f"{item.name} breaches"
