"""Queries look back over a window: what a change makes of series that still show what was before it. Pure.

A series speaks of what runs now once its signal's window has passed since the last change that its labels don't tell
apart. What that was is noted with each change, as `status.control.settling`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from sixfold_api.conditions import timestamp
from sixfold_api.control_status import SettlingStatus
from sixfold_api.modes import MAX_LEVEL, Mode
from sixfold_operator.control.levels import ArmInputs, effective_inputs, modes_at
from sixfold_operator.control.model import Reading, Signal, SignalKind, Snapshot, State, View
from sixfold_operator.control.moments import later, seconds_since

Runs = tuple[frozenset[Mode], frozenset[tuple[str, str]]]
"""Modes that are on, and path and value of what is tuned."""


def all_new(before: State, now: datetime) -> SettlingStatus:
    """After a human's change of what levels run: no label tells what was before from what is now."""
    moment = timestamp(now)
    canary = before.control.settling.canary if before.canary is None else moment
    return SettlingStatus(by_policy=moment, by_level=moment, by_arm=moment, canary=canary)


def settle(before: State, after: State, view: View, now: datetime) -> State:
    """`after`, with what its difference from `before` makes of the series noted in it.

    A lower level's series are told apart by their label. So are a higher level's, but for what that level showed when
    it was left: no later than the level in between began.
    """
    if before.level is None or after.level is None:
        return after
    (stable, canary), (new_stable, new_canary) = _arms(before, view), _arms(after, view)
    old_level, level = before.level.target, after.level.target
    if (old_level, stable, canary) == (level, new_stable, new_canary):
        return after
    moment, noted = timestamp(now), after.control.settling
    changes: dict[str, str | None] = {"by_policy": moment}
    if level > old_level:
        left = before.level.since
        changes |= {"by_level": later(noted.by_level, left, now), "by_arm": later(noted.by_arm, left, now)}
    elif level == old_level:
        changes |= {"by_level": moment} if new_stable == stable else {"by_level": moment, "by_arm": moment}
    if canary is not None and new_canary != canary:
        changes["canary"] = moment
    control = after.control.model_copy(update={"settling": noted.model_copy(update=changes)})
    return replace(after, control=control)


def why_unsettled(signal: Signal, settling: SettlingStatus, at: datetime, reading: Reading) -> str:
    """Why a reading of a health signal may still show what was before; "" if it doesn't. Waste and figures may.

    Args:
        at: when Prometheus was asked, by our own clock.
    """
    if signal.kind is not SignalKind.HEALTH:
        return ""
    by_label = settling.by_arm if reading.arm else settling.by_level
    since = settling.by_policy if reading.level is None else by_label
    return _why(since, signal.window_seconds, at)


def settled_canary(snapshot: Snapshot, signals: Iterable[Signal], settling: SettlingStatus, now: datetime) -> Snapshot:
    """Without what may still show a canary that ended before the running one began."""
    windows, at = {signal.name: signal.window_seconds for signal in signals}, min(now, snapshot.at)
    readings = {
        name: found
        for name, found in snapshot.readings.items()
        if not _why(settling.canary, windows.get(name, 0.0), at)
    }
    return replace(snapshot, readings=readings)


def _why(since: str | None, window_seconds: float, at: datetime) -> str:
    if seconds_since(since, at) >= window_seconds:
        return ""
    return f"too soon after the change: its window of {window_seconds:g} s reaches back before {since}"


def _arms(state: State, view: View) -> tuple[Runs, Runs | None]:
    """What runs for all, and what the canary's requests get; at the state's own level, whatever the ceiling is now."""
    stable, canary = effective_inputs(state, replace(view, ceiling=MAX_LEVEL))
    return _runs(stable, view), None if canary is None else _runs(canary, view)


def _runs(arm: ArmInputs, view: View) -> Runs:
    values = frozenset((entry.path, entry.value) for entry in arm.tuned)
    return modes_at(arm.target, view) - arm.suspended.keys(), values
