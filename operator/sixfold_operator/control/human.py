"""A human's change: it wins at once, and what was held against the spec before is forgotten. Pure."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from sixfold_api.conditions import timestamp
from sixfold_api.control_status import ControlStatus, HistoryEntry, LevelStatus, Suspension
from sixfold_api.modes import Mode
from sixfold_operator.control.levels import AWAITS_CANARY, active_modes, in_order, modes_at
from sixfold_operator.control.memory import entry, forgotten
from sixfold_operator.control.model import Outcome, State, View
from sixfold_operator.control.settling import all_new


def has_changed(state: State, view: View) -> bool:
    """Whether the spec isn't the one that the state is about; true before the first decision."""
    control = state.control
    return state.level is None or (control.ceiling, control.retry_token, control.spec_hash) != (
        view.ceiling,
        view.retry_token,
        view.spec_hash,
    )


def obey(state: State, view: View, now: datetime) -> Outcome:
    """The ceiling, at once. With a canary, modes that weren't on before await it; the level counts them already."""
    reason = "RetryToken" if _is_retry(state, view) else "Spec"
    waiting = _waiting(state, view)
    old = state.level
    is_same = old is not None and old.target == view.ceiling
    level = LevelStatus(
        target=view.ceiling, reason=reason, since=old.since if old is not None and is_same else timestamp(now)
    )
    known = state.control
    is_other = old is None or (known.spec_hash, known.retry_token) != (view.spec_hash, view.retry_token)
    control = ControlStatus(
        spec_hash=view.spec_hash,
        ceiling=view.ceiling,
        retry_token=view.retry_token,
        trial=known.trial,
        settling=all_new(state, now) if is_other else known.settling,
    )
    signals = tuple(forgotten(signal) for signal in state.signals)
    suspended = tuple(Suspension(mode=mode, reason=AWAITS_CANARY, since=timestamp(now)) for mode in waiting)
    after = replace(state, level=level, control=control, signals=signals, suspended=suspended, canary=None)
    is_news = not is_same or state.suspended or waiting or state.canary is not None
    return Outcome(after, (_told(state, view, reason, waiting, now),) if is_news else ())


def _is_retry(state: State, view: View) -> bool:
    return state.control.ceiling is not None and state.control.retry_token != view.retry_token


def _waiting(state: State, view: View) -> list[Mode]:
    """Modes that the ceiling turns on and that didn't run before, in the order of trying; none without a canary."""
    if view.canary is None or not view.enforce or state.level is None or state.control.ceiling is None:
        return []
    ran = active_modes(state, view)
    return in_order(modes_at(view.ceiling, view) - (ran if state.active is None else ran & state.active))


def _told(state: State, view: View, reason: str, waiting: list[Mode], now: datetime) -> HistoryEntry:
    old = state.level
    if old is None or state.control.ceiling is None:
        message = f"Level {view.ceiling}, as spec.rollbackLevel says"
    elif old.target == view.ceiling:
        message = f"Level {view.ceiling} stays"
    else:
        message = f"Level {old.target} -> {view.ceiling}, as spec.rollbackLevel says"
    if reason == "RetryToken":
        message += "; spec.retryToken changed"
    if state.suspended or (old is not None and old.rejected):
        message += "; suspensions and rejections are forgotten"
    if waiting:
        message += f"; tried on a share of the requests first: {', '.join(waiting)}"
    return entry(now, "LevelChanged", reason, message)
