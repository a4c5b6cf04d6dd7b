"""What the control loop decides about a policy, from what was collected since it last looked. No I/O of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from sixfold_api.control_status import SignalStatus, Verdict
from sixfold_api.modes import Mode
from sixfold_api.policy import InferencePolicySpec, InferencePolicyStatus
from sixfold_api.runtime_config import CANARY, STABLE
from sixfold_operator.alerts import observed_alerts
from sixfold_operator.builders.common import Manifest
from sixfold_operator.control.canary import judge
from sixfold_operator.control.figures import arm_figures
from sixfold_operator.control.model import CanaryJudgement, Observed, Snapshot, State, View
from sixfold_operator.control.reducer import decide
from sixfold_operator.control.tickets import Ticket
from sixfold_operator.control.verdicts import observe
from sixfold_operator.control.view import state_of, thresholds_of, view_of
from sixfold_operator.reconcile.context import Clock
from sixfold_operator.reconcile.decided import Decided, Watched
from sixfold_operator.reconcile.inputs import Find
from sixfold_operator.reconcile.quality_bounds import quality_bounds
from sixfold_operator.reconcile.rollout import last_status
from sixfold_operator.reconcile.waste_actions import act_on_waste

SHADOW = "Shadow"
"""What the names of signals begin with that come from comparisons with level 0."""
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
        view, state = view_of(spec, unsupported, before), state_of(before)
        signals = self._watched.signals()
        thresholds = thresholds_of(spec, quality_bounds(spec, variant))
        names = {signal.name for signal in signals}
        unknown = tuple(entry.signal for entry in spec.analysis.thresholds if entry.signal not in names)
        snapshot = self._watched.snapshot(*place)
        firing = self._watched.firing(*place)
        alerts = observed_alerts(spec.analysis.alerts, firing, state.signals)
        is_news = self._is_news(place, alerts)
        if not (self._is_due(place, view) or is_news):
            outcome = decide(state, view, (), None, now)
            return Decided(outcome.state, view, thresholds, outcome.decisions, (), (), snapshot, unknown, bool(signals))
        self._looked[place] = self._clock.monotonic()
        target = view.ceiling if state.level is None else state.level.target
        off = {mode for mode in Mode if mode not in view.modes} | {entry.mode for entry in state.suspended}
        if spec.shadow is None:  # what was compared before lingers in a window of minutes
            signals = [signal for signal in signals if not signal.name.startswith(SHADOW)]
        observed = observe(signals, snapshot, thresholds, state.signals, target, now, off) + alerts
        state = replace(state, signals=_urgent(state.signals, alerts, view.timing.failure_limit))
        outcome = decide(state, view, observed, _judgement(state, view, snapshot, thresholds), now)
        return Decided(
            outcome.state, view, thresholds, outcome.decisions, (), observed, snapshot, unknown, bool(signals)
        )

    def again_seconds(self, namespace: str, name: str, view: View) -> float | None:
        """When the next look is due; None where nothing is watched."""
        if not self._watched.signals():
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


def _urgent(signals: Sequence[SignalStatus], alerts: Sequence[Observed], limit: int) -> tuple[SignalStatus, ...]:
    """Alertmanager has waited already (`for:`): an alert that fires needs no further breaches in a row."""
    firing = {alert.name for alert in alerts if alert.verdict is Verdict.BREACH}
    known = {signal.name: signal for signal in signals}
    for name in firing:
        old = known.get(name)
        if old is None or old.verdict is not Verdict.BREACH:
            known[name] = SignalStatus(name=name, verdict=Verdict.BREACH, failures=limit - 1)
    return tuple(known.values())


def _judgement(
    state: State, view: View, snapshot: Snapshot | None, thresholds: Mapping[str, float]
) -> CanaryJudgement | None:
    """The running canary beside the rest; None where none runs."""
    if state.canary is None or view.canary is None or snapshot is None:
        return None
    level = None if state.level is None else state.level.target
    return judge(
        arm_figures(snapshot, STABLE, level),
        arm_figures(snapshot, CANARY, level),
        view.canary.min_samples,
        max_disagreement=thresholds.get("ShadowDisagreement", 0.05),
        max_divergence_nats=thresholds.get("ShadowDivergence", 0.05),
    )
