"""The operator's own Prometheus metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

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
    "Alerts that the receiver got: taken, repeated, unlisted, unknown_policy, malformed or unauthorized",
    ["result"],
)
