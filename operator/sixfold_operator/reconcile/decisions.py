"""What the control loop decides about a policy, from what was collected since it last looked. No I/O of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from types import MappingProxyType

from sixfold_api.control_status import SignalStatus, Verdict
from sixfold_api.modes import Mode
from sixfold_api.policy import InferencePolicySpec, InferencePolicyStatus, ModeStatus
from sixfold_api.runtime_config import CANARY, STABLE
from sixfold_operator.alerts import observed_alerts
from sixfold_operator.builders.common import Manifest
from sixfold_operator.control.answers import FOUND
from sixfold_operator.control.canary import judge
from sixfold_operator.control.figures import arm_figures
from sixfold_operator.control.model import CanaryJudgement, Observed, Signal, Snapshot, State, View
from sixfold_operator.control.ramp import unsupported_canary
from sixfold_operator.control.reducer import decide
from sixfold_operator.control.settling import settled_canary
from sixfold_operator.control.tickets import Ticket
from sixfold_operator.control.verdicts import observe
from sixfold_operator.control.view import state_of, thresholds_of, view_of
from sixfold_operator.reconcile.context import Clock
from sixfold_operator.reconcile.decided import Decided, Watched
from sixfold_operator.reconcile.inputs import Find
from sixfold_operator.reconcile.quality_bounds import quality_bounds
from sixfold_operator.reconcile.rollout import last_status
from sixfold_operator.reconcile.waste_actions import act_on_waste

EARLY = 0.9
"""A round that comes a little before the interval is over counts."""

Place = tuple[str, str]


class Decider:
    """Looks at each policy once an interval, and at once when its alerts or its spec change."""

    def __init__(self, watched: Watched, clock: Clock) -> None:
        self._watched = watched
        self._clock = clock
        self._looked: dict[Place, float] = {}
        self._alerts: dict[Place, frozenset[str]] = {}

    def decide(
        self,
        policy: Manifest,
        spec: InferencePolicySpec,
        unsupported: Mapping[Mode, str],
        variant: Find,
        tickets: Sequence[Ticket] = (),
        working: Mapping[str, int] = MappingProxyType({}),
    ) -> Decided:
        """The next state of a policy, whose status has the last one, and of its tickets.

        `working` has the ready pods of each component that computes.
        """
        decided = self._levels(policy, spec, unsupported, variant)
        place = policy["metadata"]["namespace"], policy["metadata"]["name"]
        return act_on_waste(decided, place, spec, self._watched.signals(), variant, tickets, working, self._clock.now())

    def _levels(
        self, policy: Manifest, spec: InferencePolicySpec, unsupported: Mapping[Mode, str], variant: Find
    ) -> Decided:
        place = policy["metadata"]["namespace"], policy["metadata"]["name"]
        before, now = last_status(InferencePolicyStatus, policy), self._clock.now()
        view, state, signals = view_of(spec, unsupported, before), state_of(before), self._watched.signals()
        names = {signal.name for signal in signals}
        decided = Decided(
            state,
            view,
            thresholds_of(spec, quality_bounds(spec, variant)),
            snapshot=self._watched.snapshot(*place),
            unknown=tuple(entry.signal for entry in spec.analysis.thresholds if entry.signal not in names),
            watches=bool(signals),
            hears=self._watched.hears,
        )
        are_all = self._watched.hears and not signals
        alerts = observed_alerts(spec.analysis.alerts, self._watched.firing(*place), state.signals, are_all=are_all)
        is_news = self._is_news(place, alerts)
        if not (self._is_due(place, view) or is_news):
            outcome = decide(state, view, (), None, now)
            return replace(decided, state=outcome.state, decisions=outcome.decisions)
        self._looked[place] = self._clock.monotonic()
        return _looked(decided, signals, alerts, before.modes, now)

    def again_seconds(self, namespace: str, name: str, view: View) -> float | None:
        """When the next look is due; None where nothing is watched."""
        if not self._watched.signals() and not self._watched.hears:
            return None
        looked = self._looked.get((namespace, name))
        if looked is None:
            return view.timing.interval
        return max(0.05, looked + view.timing.interval - self._clock.monotonic())

    def forget(self, namespace: str, name: str) -> None:
        self._looked.pop((namespace, name), None)
        self._alerts.pop((namespace, name), None)

    def _is_due(self, place: Place, view: View) -> bool:
        looked = self._looked.get(place)
        return looked is None or self._clock.monotonic() - looked >= EARLY * view.timing.interval

    def _is_news(self, place: Place, alerts: Sequence[Observed]) -> bool:
        """Whether an alert began or ended since the last look."""
        firing = frozenset(alert.name for alert in alerts if alert.verdict is Verdict.BREACH)
        is_news = firing != self._alerts.get(place, frozenset())
        self._alerts[place] = firing
        return is_news


def _looked(
    decided: Decided,
    signals: Sequence[Signal],
    alerts: tuple[Observed, ...],
    modes: Sequence[ModeStatus],
    now: datetime,
) -> Decided:
    """A look at everything. `modes` as the pods reported them last."""
    state, view, snapshot, thresholds = decided.state, decided.view, decided.snapshot, decided.thresholds
    target = view.ceiling if state.level is None else state.level.target
    off, settling = _off(state, view), state.control.settling
    observed = observe(signals, snapshot, thresholds, state.signals, target, now, off, settling) + alerts
    state = replace(state, signals=_urgent(state.signals, alerts, view.timing.failure_limit))
    trial = unsupported_canary(state, modes)
    if trial is None and snapshot is not None:
        trial = _judgement(state, view, settled_canary(snapshot, signals, settling, now), thresholds)
    outcome = decide(state, view, observed, trial, now)
    return replace(decided, state=outcome.state, decisions=outcome.decisions, observed=observed)


def _urgent(signals: Sequence[SignalStatus], alerts: Sequence[Observed], limit: int) -> tuple[SignalStatus, ...]:
    """Alertmanager has waited already (`for:`): an alert that fires needs no further breaches in a row."""
    firing = {alert.name for alert in alerts if alert.verdict is Verdict.BREACH}
    known = {signal.name: signal for signal in signals}
    for name in firing:
        old = known.get(name)
        if old is None or old.verdict is not Verdict.BREACH:
            known[name] = SignalStatus(name=name, verdict=Verdict.BREACH, failures=limit - 1)
    return tuple(known.values())


def _off(state: State, view: View) -> set[Mode]:
    """Modes that no request gets, whatever the level: the one on trial is suspended for most."""
    suspended = {entry.mode for entry in state.suspended}
    tried = set() if state.canary is None else {state.canary.mode}
    return (set(Mode) - view.modes) | (suspended - tried)


def _judgement(state: State, view: View, snapshot: Snapshot, thresholds: Mapping[str, float]) -> CanaryJudgement | None:
    """The running canary beside the rest; None where none runs, or where Prometheus has nothing of now."""
    if state.canary is None or view.canary is None or snapshot.reason != FOUND:
        return None
    level = None if state.level is None else state.level.target
    return judge(
        arm_figures(snapshot, STABLE, level),
        arm_figures(snapshot, CANARY, level),
        view.canary.min_samples,
        max_disagreement=thresholds.get("ShadowDisagreement", 0.05),
        max_divergence_nats=thresholds.get("ShadowDivergence", 0.05),
    )
