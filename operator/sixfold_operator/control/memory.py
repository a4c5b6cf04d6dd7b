"""What the reducer remembers, and how a change is written into it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sixfold_api.conditions import timestamp
from sixfold_api.control_status import (
    BreachRecord,
    CanaryStatus,
    HistoryEntry,
    LevelStatus,
    Rejection,
    SettlingStatus,
    SignalStatus,
    Suspension,
    Verdict,
)
from sixfold_operator.control.levels import target
from sixfold_operator.control.model import Observed, SignalKind, State, View
from sixfold_operator.control.moments import no_later, seconds_since

ALERT_PREFIX = "Alert/"
MAX_BREACHES, MAX_REJECTIONS, MAX_SIGNALS = 16, 32, 128
"""Bounds of the schema."""


def entry(now: datetime, decision: str, reason: str, message: str) -> HistoryEntry:
    return HistoryEntry(at=timestamp(now), decision=decision, reason=reason[:64], message=message[:512])


def with_control(state: State, **changes: Any) -> State:
    """The same state if nothing differs."""
    if all(getattr(state.control, name) == value for name, value in changes.items()):
        return state
    return replace(state, control=state.control.model_copy(update=changes))


def with_level(state: State, level: int, reason: str, now: datetime) -> State:
    """Another target; its rejections stay."""
    rejected = [] if state.level is None else state.level.rejected
    return replace(
        state, level=LevelStatus(target=level, reason=reason[:64], since=timestamp(now), rejected=list(rejected))
    )


def with_rejection(state: State, rejection: Rejection) -> State:
    assert state.level is not None  # only what was decided on can fail
    rejected = [*state.level.rejected, rejection][-MAX_REJECTIONS:]
    return replace(state, level=state.level.model_copy(update={"rejected": rejected}))


def changed(state: State, now: datetime) -> State:
    """After the operator changed what all requests get: cooldown begins, and what was seen before is about the past."""
    state = with_control(state, changed_at=timestamp(now), healthy_since=None, healthy_seconds=0)
    return replace(state, signals=tuple(forgotten(signal) for signal in state.signals))


def forgotten(signal: SignalStatus) -> SignalStatus:
    """A signal that begins anew: hysteresis of a breach at another level would hold this one to less than the
    threshold. An alert fires until it is told to have ended."""
    if signal.name.startswith(ALERT_PREFIX):
        return signal.model_copy(update={"failures": 0}) if signal.failures else signal
    is_new = signal.verdict is not Verdict.BREACH and signal.failures == 0
    return signal if is_new else signal.model_copy(update={"failures": 0, "verdict": Verdict.UNKNOWN})


def is_cooling(state: State, view: View, now: datetime) -> bool:
    return seconds_since(state.control.changed_at, now) < view.timing.cooldown


def is_judged(view: View, now: datetime) -> bool:
    """Whether the policy has been ready for long enough; also where that began in the future, as clocks that went back
    have it."""
    if view.ready_since is None:
        return False
    return abs((now - view.ready_since).total_seconds()) >= view.timing.initial_delay


def count(state: State, view: View, observed: Sequence[Observed], *, judged: bool) -> State:
    """Verdicts and breaches in a row, after a look.

    A look at everything (it shows a primary signal) drops signals that no longer exist; alerts stay until they are told
    to have ended.
    """
    before = {signal.name: signal for signal in state.signals}
    now_seen = {}
    for item in observed:
        if item.kind is not SignalKind.FIGURE:
            verdict = item.verdict if judged else Verdict.UNKNOWN
            now_seen[item.name] = _counted(before.get(item.name), item.name, verdict, view.timing.failure_limit)
    is_whole = any(item.is_primary for item in observed)
    kept = {name: old for name, old in before.items() if not is_whole or name.startswith(ALERT_PREFIX)}
    signals = tuple({**kept, **now_seen}.values())[:MAX_SIGNALS]
    return state if signals == state.signals else replace(state, signals=signals)


def _counted(old: SignalStatus | None, name: str, verdict: Verdict, limit: int) -> SignalStatus:
    failures = 0 if old is None else old.failures
    if verdict is Verdict.OK:
        failures = 0
    elif verdict is Verdict.BREACH:
        failures = min(failures + 1, limit)
    if old is not None and old.verdict is verdict and old.failures == failures:
        return old
    return SignalStatus(name=name[:160], verdict=verdict, failures=failures)


def is_second(state: State, view: View, subject: str, now: datetime) -> bool:
    """Whether a subject was left before because of a breach, within rejectWindow."""
    return any(
        record.subject == subject and seconds_since(record.at, now) <= view.timing.reject_window
        for record in state.control.breaches
    )


def with_breach(state: State, view: View, subject: str, now: datetime) -> State:
    kept = [record for record in state.control.breaches if seconds_since(record.at, now) <= view.timing.reject_window]
    return with_control(state, breaches=[*kept, BreachRecord(subject=subject, at=timestamp(now))][-MAX_BREACHES:])


def sane(state: State, view: View, now: datetime) -> State:
    """The state without what can't be: a target out of bounds, moments in the future, an unfinished canary entry."""
    level = state.level
    if level is not None and (level.target != target(state, view) or no_later(level.since, now) != level.since):
        update = {"target": target(state, view), "since": no_later(level.since, now)}
        if level.target > view.ceiling:
            update["reason"] = "Spec"
        level = level.model_copy(update=update)
    return with_control(
        replace(
            state, level=level, suspended=_suspensions(state.suspended, now), canary=_canary(state.canary, view, now)
        ),
        changed_at=_past(state.control.changed_at, now),
        healthy_since=_past(state.control.healthy_since, now),
        settling=_settling(state.control.settling, now),
        breaches=[
            record if no_later(record.at, now) == record.at else record.model_copy(update={"at": timestamp(now)})
            for record in state.control.breaches
        ],
    )


def _past(moment: str | None, now: datetime) -> str | None:
    return None if moment is None else no_later(moment, now)


def _settling(settling: SettlingStatus, now: datetime) -> SettlingStatus:
    moments = {name: _past(getattr(settling, name), now) for name in SettlingStatus.model_fields}
    past = SettlingStatus(**moments)
    return settling if past == settling else past


def _suspensions(entries: Iterable[Suspension], now: datetime) -> tuple[Suspension, ...]:
    first: dict[str, Suspension] = {}
    for item in entries:
        since = no_later(item.since, now)
        first.setdefault(item.mode, item if since == item.since else item.model_copy(update={"since": since}))
    return tuple(first.values())


def _canary(canary: CanaryStatus | None, view: View, now: datetime) -> CanaryStatus | None:
    """Of a mode or of a tuned value."""
    if canary is None or (canary.mode is None) == (canary.tuned is None):
        return None
    if canary.mode is not None and canary.mode not in view.modes:
        return None
    since = no_later(canary.since, now)
    return canary if since == canary.since else canary.model_copy(update={"since": since})
