"""The canary's way: started, widened, promoted, rejected or ended. Pure.

A level is tried mode by mode: the target counts it from the start, its modes are suspended for the reason `Canary`, and
the canary tries one after the other. Modes of a whole process can't be split: their turn turns them on for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from sixfold_api.conditions import timestamp
from sixfold_api.control_status import CanaryStatus, Rejection, Suspension, TunedValue, Verdict
from sixfold_api.modes import LEVEL_FROM, Mode, ModeState
from sixfold_api.policy import ModeStatus
from sixfold_operator.control.levels import AWAITS_CANARY, awaiting_canary, rejections, with_tuned
from sixfold_operator.control.memory import changed, entry, is_cooling, with_rejection
from sixfold_operator.control.model import CanaryJudgement, Outcome, State, View
from sixfold_operator.control.moments import seconds_since

UNSUPPORTED = "Unsupported"
"""Reason of a suspension: the pods can't run the mode."""
SPLITTABLE_PATHS = ("/generation/speculative/", "/classification/earlyExit/")
"""Tuned values that requests can have each their own of; the others are a whole process's."""


def begin_tuned(state: State, view: View, tuned: TunedValue, now: datetime) -> Outcome:
    """A tuned value on its way: through the canary, or for all at once where there is none or it can't be split.

    Nothing happens while another canary runs, while modes await theirs, or where the value was rejected for this spec.
    Waiting for the cooldown is the caller's (`memory.is_cooling`).
    """
    refused = any(entry.path == tuned.path and entry.value == tuned.value for entry in rejections(state, view))
    if state.level is None or state.canary is not None or awaiting_canary(state, view) or refused:
        return Outcome(state)
    what = f"{tuned.path} = {tuned.value}"
    if view.canary is None or not view.enforce or not tuned.path.startswith(SPLITTABLE_PATHS):
        after = changed(replace(state, tuned=with_tuned(state.tuned, tuned)), now)
        return Outcome(after, (entry(now, "Tuned", tuned.ticket or "Tuning", f"{what} for all requests"),))
    percent = view.canary.steps[0]
    canary = CanaryStatus(tuned=tuned, percent=percent, since=timestamp(now))
    return Outcome(
        replace(state, canary=canary),
        (entry(now, "CanaryStarted", "Canary", f"{what} for {percent} % of the requests"),),
    )


def begin_mode(state: State, view: View, mode: Mode, reason: str, now: datetime) -> Outcome:
    """A suspended mode on its way back: through the canary where there is one that can be split, else for all."""
    if view.canary is None or mode in view.unsplittable:
        why = "" if view.canary is None else "; it belongs to the whole process, so that no canary can try it"
        message = f"{mode} is on again{why}"
        return Outcome(_restored(state, mode, now), (entry(now, "ModeRestored", reason, message),))
    percent = view.canary.steps[0]
    canary = CanaryStatus(mode=mode, percent=percent, since=timestamp(now))
    message = f"{mode} for {percent} % of the requests"
    return Outcome(replace(state, canary=canary), (entry(now, "CanaryStarted", reason, message),))


def begin_next(state: State, view: View, now: datetime) -> Outcome:
    """The next mode that awaits its canary, if there is one. What is on for all at once waits for the cooldown."""
    waiting = awaiting_canary(state, view)
    if not waiting or state.canary is not None:
        return Outcome(state)
    if waiting[0] in view.unsplittable and is_cooling(state, view, now):
        return Outcome(state)
    return begin_mode(state, view, waiting[0], "Canary", now)


def advance(state: State, view: View, judgement: CanaryJudgement | None, now: datetime, *, healthy: bool) -> Outcome:
    """The running canary after a look at it: rejected, widened, promoted, or as it was.

    Args:
        healthy: whether health is conclusive: only then does it go on.
    """
    canary, plan = state.canary, view.canary
    if canary is None or plan is None or judgement is None or judgement.verdict is Verdict.UNKNOWN:
        return Outcome(state)
    if judgement.verdict is Verdict.BREACH:
        return reject(state, view, judgement.signal or "CanaryWorse", judgement.why, now)
    waited = seconds_since(canary.since, now) >= plan.step_seconds
    if not healthy or not waited or judgement.samples < plan.min_samples:
        return Outcome(state)
    percent = next((step for step in plan.steps if step > canary.percent), None)
    if percent is None:
        return Outcome(state) if is_cooling(state, view, now) else _promoted(state, canary, judgement, now)
    wider = canary.model_copy(update={"percent": percent, "since": timestamp(now)})
    message = f"{_what(canary)} for {percent} % of the requests: {judgement.why}"
    return Outcome(replace(state, canary=wider), (entry(now, "CanaryStep", "Samples", message),))


def unsupported_canary(state: State, modes: Iterable[ModeStatus]) -> CanaryJudgement | None:
    """A judgement on a mode that is tried and that pods can't run; None where they can.

    Args:
        modes: as the pods reported them last.
    """
    for mode in modes:
        if state.canary is not None and mode.name is state.canary.mode and mode.state is ModeState.UNSUPPORTED:
            return CanaryJudgement(Verdict.BREACH, 0, mode.reason, UNSUPPORTED)
    return None


def reject(state: State, view: View, signal: str, why: str, now: datetime) -> Outcome:
    """The canary ends and isn't tried again; the others never saw it."""
    canary = state.canary
    assert canary is not None
    signal = signal[:64]
    tuned = canary.tuned
    rejection = Rejection(
        mode=canary.mode,
        path=None if tuned is None else tuned.path,
        value=None if tuned is None else tuned.value,
        spec_hash=view.spec_hash,
        reason=signal,
    )
    suspended = tuple(
        item.model_copy(update={"reason": signal}) if item.mode is canary.mode else item for item in state.suspended
    )
    after = with_rejection(replace(state, canary=None, suspended=suspended), rejection)
    message = f"{_what(canary)} is not tried again until the spec or retryToken changes: {why}"
    return Outcome(after, (entry(now, "CanaryRejected", signal, message),))


def interrupt(state: State, signal: str, level: int) -> State:
    """The canary ends, without being blamed; what awaits one comes back as suspended modes do, after health.

    Args:
        level: that holds from now on: modes above it will be tried when it goes up again.
    """
    suspended = tuple(
        item.model_copy(update={"reason": signal[:64]}) if _awaits(item) else item
        for item in state.suspended
        if not _awaits(item) or LEVEL_FROM[item.mode] <= level
    )
    if state.canary is None and suspended == state.suspended:
        return state
    return replace(state, canary=None, suspended=suspended)


def release(state: State, view: View, now: datetime) -> Outcome:
    """Without spec.canary nothing awaits one: the modes are on for all, a tuned value will be offered again."""
    waiting = [item.mode for item in state.suspended if _awaits(item)]
    after = replace(state, canary=None, suspended=tuple(item for item in state.suspended if not _awaits(item)))
    if not waiting:
        return Outcome(after)
    message = f"{', '.join(waiting)} for all requests: spec.canary is gone"
    return Outcome(changed(after, now), (entry(now, "ModeRestored", "Spec", message),))


def _awaits(item: Suspension) -> bool:
    return item.reason == AWAITS_CANARY


def _promoted(state: State, canary: CanaryStatus, judgement: CanaryJudgement, now: datetime) -> Outcome:
    if canary.mode is not None:
        after = _restored(state, canary.mode, now)
    else:
        assert canary.tuned is not None
        after = changed(replace(state, canary=None, tuned=with_tuned(state.tuned, canary.tuned)), now)
    message = f"{_what(canary)} for all requests: {judgement.why}"
    return Outcome(after, (entry(now, "CanaryPromoted", "Samples", message),))


def _restored(state: State, mode: Mode, now: datetime) -> State:
    suspended = tuple(item for item in state.suspended if item.mode is not mode)
    return changed(replace(state, canary=None, suspended=suspended), now)


def _what(canary: CanaryStatus) -> str:
    return str(canary.mode) if canary.tuned is None else f"{canary.tuned.path} = {canary.tuned.value}"
