"""The way back: after conclusive health one mode, or one level, and then the clock starts again. Pure.

Suspended modes come back before levels do: one mode is the smallest step there is, and a level would bring several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from sixfold_api.conditions import timestamp
from sixfold_api.control_status import Suspension, Verdict
from sixfold_api.modes import Mode
from sixfold_operator.control.levels import (
    AWAITS_CANARY,
    awaiting_canary,
    in_order,
    is_rejected,
    level_above,
    modes_at,
    target,
)
from sixfold_operator.control.memory import ALERT_PREFIX, changed, entry, is_cooling, with_control, with_level
from sixfold_operator.control.model import Observed, Outcome, SignalKind, State, View
from sixfold_operator.control.moments import seconds_since
from sixfold_operator.control.ramp import begin_mode, begin_next

PARTS = 4
"""Health is written down in so many parts of recoverAfter: of a time in which nobody looked (the operator was away, the
clock jumped) no more than one part counts."""


def health(state: State, observed: Sequence[Observed]) -> Verdict | None:
    """Ok while it is conclusive: every primary signal is Ok and no health signal breaches. None where nobody looked.

    Args:
        state: with the verdicts of this look.
        observed: what was looked at.
    """
    looked = {item.name: item for item in observed if item.kind is SignalKind.HEALTH}
    primary = []
    for signal in state.signals:
        item = looked.get(signal.name)
        is_health = item is not None or signal.name.startswith(ALERT_PREFIX)
        if is_health and signal.verdict is Verdict.BREACH:
            return Verdict.BREACH
        if item is not None and item.is_primary:
            primary.append(signal.verdict)
    if not primary:
        return None
    return Verdict.OK if all(verdict is Verdict.OK for verdict in primary) else Verdict.UNKNOWN


def recover(state: State, view: View, verdict: Verdict | None, now: datetime) -> Outcome:
    """Health goes on counting, pauses or starts again; when it has been long enough, one step."""
    step = next_step(state, view)
    if step is None or state.canary is not None or verdict is Verdict.BREACH:
        return Outcome(with_control(state, healthy_since=None, healthy_seconds=0))
    if verdict is None:
        return Outcome(state)
    state, healthy_seconds = _counted(state, view, verdict, now)
    is_due = verdict is Verdict.OK and healthy_seconds >= view.timing.recover_after
    if not is_due or is_cooling(state, view, now):
        return Outcome(state)
    state = with_control(state, healthy_since=None, healthy_seconds=0)
    if isinstance(step, Mode):
        return begin_mode(state, view, step, "Recovered", now)
    return _raise(state, view, step, now)


def next_step(state: State, view: View) -> Mode | int | None:
    """The mode that was suspended first, else the next level; None where nothing is left, or canaries come first."""
    if awaiting_canary(state, view):
        return None
    on = modes_at(target(state, view), view)
    back = [
        item
        for item in state.suspended
        if item.mode in on and item.reason != AWAITS_CANARY and not is_rejected(item.mode, state, view)
    ]
    if back:
        return min(back, key=lambda item: item.since).mode
    return level_above(state, view)


def _counted(state: State, view: View, verdict: Verdict, now: datetime) -> tuple[State, float]:
    """Seconds of conclusive health up to now, written down where it begins, pauses or completes a part."""
    control = state.control
    before = control.healthy_seconds
    if control.healthy_since is None:
        since = timestamp(now) if verdict is Verdict.OK else None
        return with_control(state, healthy_since=since), before
    part = view.timing.recover_after / PARTS
    passed = seconds_since(control.healthy_since, now)
    credited = before + min(passed, part + 2 * view.timing.interval)
    if verdict is Verdict.UNKNOWN:
        return with_control(state, healthy_since=None, healthy_seconds=int(credited)), credited
    if passed >= part and credited < view.timing.recover_after:
        return with_control(state, healthy_since=timestamp(now), healthy_seconds=int(credited)), credited
    return state, credited


def _raise(state: State, view: View, level: int, now: datetime) -> Outcome:
    """One level up. With a canary its modes are tried one by one; a first one that can't be split is on at once."""
    old = target(state, view)
    told = entry(
        now, "LevelChanged", "Recovered", f"Level {old} -> {level}: healthy for {view.timing.recover_after:.0f} s"
    )
    gained = modes_at(level, view) - modes_at(old, view) - {item.mode for item in state.suspended}
    after = changed(with_level(state, level, "Recovered", now), now)
    if view.canary is None:
        return Outcome(after, (told,))
    waiting = in_order(gained)
    if waiting and waiting[0] in view.unsplittable:
        waiting = waiting[1:]
    queue = tuple(Suspension(mode=mode, reason=AWAITS_CANARY, since=timestamp(now)) for mode in waiting)
    started = begin_next(replace(after, suspended=(*after.suspended, *queue)), view, now)
    return Outcome(started.state, (told, *started.decisions))
