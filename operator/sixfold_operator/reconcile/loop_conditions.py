"""What the control loop has to say -> conditions of the policy. Pure."""

from __future__ import annotations

from sixfold_api.conditions import ConditionStatus
from sixfold_api.control_status import Verdict as SignalVerdict
from sixfold_operator.control.levels import AWAITS_CANARY
from sixfold_operator.control.tickets import open_message
from sixfold_operator.reconcile.findings import Findings
from sixfold_operator.reconcile.rollout import Verdict

NOT_CONFIGURED = (
    "no Prometheus is configured, so nothing is watched and levels move only by hand: set prometheus.enabled or"
    " prometheus.url in the chart's values"
)
ALERTS_ONLY = (
    "no Prometheus is configured, so levels move by hand and by the alerts of spec.analysis.alerts; health is that none"
    " of them fires"
)
NOT_YET = "Prometheus has not been asked yet"


def loop_conditions(findings: Findings) -> dict[str, tuple[Verdict, ConditionStatus]]:
    """MetricsAvailable, and ShadowActive where answers are to be computed again."""
    result = {"MetricsAvailable": metrics_available(findings)}
    if findings.spec.shadow is not None:
        result["ShadowActive"] = shadow_active(findings)
    return result


def metrics_available(findings: Findings) -> tuple[Verdict, ConditionStatus]:
    """Whether signals can be judged. While they can't, nothing moves."""
    decided = findings.decided
    if not decided.watches:
        has_alerts = decided.hears and findings.spec.analysis.alerts
        message = ALERTS_ONLY if has_alerts else NOT_CONFIGURED
        return Verdict(False, "NotConfigured", message), ConditionStatus.UNKNOWN
    if decided.snapshot is None:
        return Verdict(False, "Waiting", NOT_YET), ConditionStatus.UNKNOWN
    snapshot = decided.snapshot
    if snapshot.reason == "Found":
        message = snapshot.message or "signals are read from Prometheus"
        return Verdict(True, "Found", message), ConditionStatus.TRUE
    message = f"{snapshot.message or snapshot.reason}. Levels stay where they are meanwhile"
    return Verdict(False, snapshot.reason, message), ConditionStatus.FALSE


def rolled_back(findings: Findings) -> Verdict | None:
    """The operator holds the level under the ceiling, or modes off; None where it doesn't."""
    state, view = findings.decided.state, findings.decided.view
    parts = []
    if state.level is not None and state.level.target < view.ceiling:
        parts.append(f"level {state.level.target} of {view.ceiling} ({state.level.reason}, since {state.level.since})")
    suspended = [entry for entry in state.suspended if entry.reason != AWAITS_CANARY]
    parts += [f"{entry.mode} off ({entry.reason}, since {entry.since})" for entry in suspended]
    if not parts:
        return None
    rejected = [] if state.level is None else state.level.rejected
    outlook = "what was rejected stays off until the spec or retryToken changes" if rejected else "it recovers by steps"
    reason = "LevelLowered" if state.level is not None and state.level.target < view.ceiling else "ModeSuspended"
    return Verdict(False, reason, f"{'; '.join(parts)}; {outlook}")


def ticket_open(findings: Findings) -> Verdict | None:
    """Waste that waits for somebody."""
    waiting = findings.decided.tickets.open
    return Verdict(False, "WasteSeen", open_message(waiting)) if waiting else None


def signals_unknown(findings: Findings) -> Verdict | None:
    """Thresholds for signals that nobody watches."""
    unknown = findings.decided.unknown
    if not unknown or not findings.decided.watches:
        return None
    message = (
        f"spec.analysis.thresholds names {', '.join(unknown)}: no such signal is built in or in the chart's values"
    )
    return Verdict(False, "NoSuchSignal", message)


def shadow_active(findings: Findings) -> tuple[Verdict, ConditionStatus]:
    """Whether pods compute a share of the answers again; the first one that doesn't says why."""
    for _, pod in sorted(findings.states.items()):
        if pod.shadow_off:
            return Verdict(False, "PodsGoWithout", f"pod {pod.pod}: {pod.shadow_off}"), ConditionStatus.FALSE
    if not findings.states:
        return Verdict(
            False, "NoReadyPods", "no pod has told whether it computes answers again"
        ), ConditionStatus.UNKNOWN
    if findings.effective.config.level == 0:
        return Verdict(False, "Level0", "every answer is level 0's already"), ConditionStatus.FALSE
    shadow = findings.spec.shadow
    rate = shadow.sample_rate if shadow is not None else "0"
    judged = [
        f"{entry.name} {entry.verdict}"
        for entry in findings.decided.state.signals
        if entry.name.startswith("Shadow") and entry.verdict is not SignalVerdict.UNKNOWN
    ]
    message = f"{rate} of the answers are computed again at level 0" + (f"; {', '.join(judged)}" if judged else "")
    return Verdict(True, "Sampling", message), ConditionStatus.TRUE
