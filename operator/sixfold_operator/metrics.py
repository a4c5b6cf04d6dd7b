"""The operator's own Prometheus metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from prometheus_client import Counter, Gauge, Histogram

from sixfold_api.control_status import Verdict
from sixfold_api.names import CLASSIFIER, ENGINE
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.ticket import Phase
from sixfold_operator.control.model import Observed

RECONCILES = Counter("sixfold_operator_reconciles", "Reconciles by kind and result (ok, error)", ["kind", "result"])
RECONCILE_SECONDS = Histogram(
    "sixfold_operator_reconcile_seconds",
    "Seconds of a reconcile",
    ["kind"],
    buckets=(0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
QUEUE_KEYS = Gauge("sixfold_operator_queue_keys", "Keys that wait for a reconcile, delayed ones included")
QUEUE_OVERDUE_SECONDS = Gauge("sixfold_operator_queue_overdue_seconds", "How long the first due key has been waiting")
API_REQUESTS = Counter(
    "sixfold_operator_api_requests", "Requests to kube-apiserver, without watches, by verb and status", ["verb", "code"]
)
LEADER = Gauge("sixfold_operator_leader", "1 where this operator acts, 0 where it stands by")
LAST_TICK = Gauge("sixfold_operator_last_tick_timestamp_seconds", "When the ticking task last ran, Unix seconds")
MISSED_EVENTS = Counter(
    "sixfold_operator_missed_events", "Objects whose change a resync found before a watch told it", ["kind"]
)
CONFIG_SECONDS = Histogram(
    "sixfold_operator_config_propagation_seconds",
    "Seconds from writing a RuntimeConfig until every ready pod reports it",
    buckets=(0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30, 60, 120),
)
POLICY_LEVEL = Gauge("sixfold_operator_policy_level", "Target level of a policy", ["namespace", "policy"])
POLICY_CEILING = Gauge(
    "sixfold_operator_policy_ceiling", "spec.rollbackLevel: the level of a healthy policy", ["namespace", "policy"]
)
DECISIONS = Counter(
    "sixfold_operator_decisions", "Decisions of the control loop, by what and why", ["decision", "reason"]
)
ALERTS = Counter(
    "sixfold_operator_alerts",
    "Alerts that the receiver got: taken, repeated, unlisted, unknown_policy, malformed, unauthorized or standby",
    ["result"],
)
PROMETHEUS_SECONDS = Histogram(
    "sixfold_operator_prometheus_seconds",
    "Seconds of asking Prometheus for every signal",
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
PROMETHEUS_UP = Gauge("sixfold_operator_prometheus_up", "Whether Prometheus answered any query of the last round")
_SIGNAL = ["namespace", "policy", "signal"]
SIGNAL_VALUE = Gauge(
    "sixfold_operator_signal_value", "Value of a signal as it was judged last; NaN where it is Unknown", _SIGNAL
)
SIGNAL_VERDICT = Gauge("sixfold_operator_signal_verdict", "0 is Ok, 1 Breach, -1 Unknown", _SIGNAL)
TICKETS = Gauge("sixfold_operator_tickets", "Tickets by phase", ["namespace", "policy", "phase"])
COST_PER_HOUR = Gauge(
    "sixfold_cost_per_hour", "What a pod costs an hour, as the policy says", ["namespace", "policy", "component"]
)
_VERDICTS = {Verdict.OK: 0, Verdict.BREACH: 1, Verdict.UNKNOWN: -1}
_OF_A_POLICY: tuple[Gauge, ...] = (POLICY_LEVEL, POLICY_CEILING, SIGNAL_VALUE, SIGNAL_VERDICT, TICKETS, COST_PER_HOUR)


def watched(place: tuple[str, str], observed: Iterable[Observed]) -> None:
    """Signals of a policy as they were judged now."""
    for entry in observed:
        SIGNAL_VERDICT.labels(*place, entry.name).set(_VERDICTS[entry.verdict])
        SIGNAL_VALUE.labels(*place, entry.name).set(math.nan if entry.value is None else entry.value)


def tickets(place: tuple[str, str], phases: Sequence[Phase]) -> None:
    """Tickets of a policy."""
    for phase in Phase:
        TICKETS.labels(*place, phase.value).set(phases.count(phase))


def levels(place: tuple[str, str], target: int, ceiling: int) -> None:
    """The level of a policy, and the user's."""
    POLICY_LEVEL.labels(*place).set(target)
    POLICY_CEILING.labels(*place).set(ceiling)


def costs(place: tuple[str, str], spec: InferencePolicySpec) -> None:
    """What a policy says that its pods cost."""
    classifier = spec.classification.engine if spec.classification is not None else None
    for component, engine in ((ENGINE, spec.engine), (CLASSIFIER, classifier)):
        if engine is not None and engine.cost_per_hour is not None:
            COST_PER_HOUR.labels(*place, component).set(float(engine.cost_per_hour))


def forget(namespace: str, policy: str) -> None:
    """The policy is gone, and its series with it."""
    for gauge in _OF_A_POLICY:
        gauge.remove_by_labels({"namespace": namespace, "policy": policy})
