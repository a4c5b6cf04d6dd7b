"""What follows from a policy's state and what was observed: the one place that decides. Pure, with the clock given."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sixfold_api.control_status import SignalStatus, Verdict
from sixfold_operator.control.breach import due, respond
from sixfold_operator.control.human import has_changed, obey
from sixfold_operator.control.levels import AWAITS_CANARY
from sixfold_operator.control.memory import count, entry, is_judged, sane, with_control
from sixfold_operator.control.model import CanaryJudgement, Observed, Outcome, State, View
from sixfold_operator.control.ramp import advance, begin_next, release
from sixfold_operator.control.recovery import health, recover
from sixfold_operator.control.settling import settle


def decide(
    state: State, view: View, observed: Sequence[Observed], canary: CanaryJudgement | None, now: datetime
) -> Outcome:
    """One look at a policy.

    It is called once an interval, and right after its spec or an alert changed. At most one thing changes a call. The
    call that finds a changed spec obeys it and judges nothing.

    Args:
        observed: signals and alerts, judged; one that is absent keeps its remembered verdict and count.
        canary: how the running canary compares with the rest; None where none runs or nobody looked.
        now: aware, UTC.
    """
    state = sane(state, view, now)
    outcome = _obeyed(state, view, now) if has_changed(state, view) else _looked(state, view, observed, canary, now)
    return Outcome(settle(state, outcome.state, view, now), outcome.decisions)


def _looked(
    state: State, view: View, observed: Sequence[Observed], canary: CanaryJudgement | None, now: datetime
) -> Outcome:
    judged = is_judged(view, now)
    before, state = state.signals, count(state, view, observed, judged=judged)
    if view.canary is None and (state.canary is not None or _waits(state)):
        return release(state, view, now)
    breaching = due(state, view, observed) if judged else []
    verdict = health(state, observed)
    if not view.enforce:
        return _observed_only(state, view, _newly(breaching, before, view), verdict, now)
    outcome = respond(state, view, breaching, now)
    if not outcome.decisions:
        outcome = advance(outcome.state, view, canary if judged else None, now, healthy=verdict is Verdict.OK)
    if not outcome.decisions and verdict is Verdict.OK:
        outcome = begin_next(outcome.state, view, now)
    return outcome if outcome.decisions else recover(outcome.state, view, verdict, now)


def _obeyed(state: State, view: View, now: datetime) -> Outcome:
    obeyed = obey(state, view, now)
    if not view.enforce:
        return obeyed
    started = begin_next(obeyed.state, view, now)
    return Outcome(started.state, (*obeyed.decisions, *started.decisions))


def _waits(state: State) -> bool:
    return any(item.reason == AWAITS_CANARY for item in state.suspended)


def _newly(breaching: Sequence[Observed], before: Sequence[SignalStatus], view: View) -> list[Observed]:
    """Those that reached failureLimit with this look: a run of breaches is told once."""
    told = {signal.name for signal in before if signal.failures >= view.timing.failure_limit}
    return [item for item in breaching if item.name not in told]


def _observed_only(
    state: State, view: View, breaching: Sequence[Observed], verdict: Verdict | None, now: datetime
) -> Outcome:
    """automation Observe: what would be done, in words. A running canary stays as it is."""
    would = respond(with_control(state, changed_at=None), view, breaching, now)
    if not would.decisions:
        would = recover(state, view, verdict, now)
        clock = would.state.control
        state = with_control(state, healthy_since=clock.healthy_since, healthy_seconds=clock.healthy_seconds)
    if not would.decisions:
        return Outcome(state)
    first = would.decisions[0]
    message = f"{first.decision} under automation Enforce: {first.message}"
    return Outcome(state, (entry(now, "Observed", first.reason, message),))
