"""What a reconcile of a policy found -> its status and the notes for people. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from sixfold_api.conditions import Condition, ConditionStatus, merge
from sixfold_api.control_status import HistoryEntry
from sixfold_api.effective import NOTHING_STREAMS
from sixfold_api.modes import Mode, ModeState
from sixfold_api.names import ENGINE
from sixfold_api.policy import EngineStatus, InferencePolicyStatus, ModeStatus
from sixfold_operator.builders.common import selector
from sixfold_operator.builders.workload import components
from sixfold_operator.control.ramp import UNSUPPORTED
from sixfold_operator.control.view import remembered
from sixfold_operator.reconcile.findings import Findings
from sixfold_operator.reconcile.loop_conditions import loop_conditions, rolled_back, signals_unknown, ticket_open
from sixfold_operator.reconcile.policy_weights import draft_shortened, full_weights, slices_failed, weights_failed
from sixfold_operator.reconcile.rollout import ASLEEP, Verdict, judge_deployment, last_status
from sixfold_operator.reconcile.scaling import load_of
from sixfold_operator.reconcile.status_writer import ALARMS, Note, transition_notes
from sixfold_operator.reconcile.surroundings import exposure_failed

NOTED = ("Ready", "VariantsReady", *ALARMS)
OPEN_GATEWAY = "spec.gateway.apiKeysSecretRef is not set: whoever reaches the gateway may use it"


def workload_verdict(findings: Findings) -> Verdict:
    """WorkloadReady: the first component that isn't as it should be, engines before the gateway that waits for them."""
    if findings.refusals:
        return Verdict(False, "Refused", "The API refused: " + "; ".join(findings.refusals))
    verdicts = []
    for component in sorted(components(findings.spec), key=lambda name: name != ENGINE):
        deployment = findings.deployments.get(component)
        load, pods = load_of(findings.spec, component), findings.pods.get(component, ())
        may_sleep = load is not None and load.may_sleep
        verdicts.append(judge_deployment(component, deployment, pods, findings.states, may_sleep=may_sleep))
    worst = next((verdict for verdict in verdicts if not verdict.ok), None)
    reason = ASLEEP if any(verdict.reason == ASLEEP for verdict in verdicts) else "Ready"
    return worst or Verdict(True, reason, "; ".join(verdict.message for verdict in verdicts))


def build_status(findings: Findings, now: datetime) -> InferencePolicyStatus:
    """The whole status; what can't be known now keeps its last value where the API says so."""
    before = last_status(InferencePolicyStatus, findings.policy)
    level = findings.reach.level
    status = InferencePolicyStatus(
        observed_generation=findings.policy["metadata"]["generation"],
        effective_level=before.effective_level if level is None else level,
        modes=[_mode(mode, findings) for mode in findings.effective.modes],
        config=findings.reach.status,
        engine=_engine(findings, before.engine),
        history=before.history,
        conditions=merge(before.conditions, _conditions(findings), now),
    )
    return remembered(status, findings.decided.state, findings.decided.decisions)


def decision_notes(decisions: Iterable[HistoryEntry]) -> list[Note]:
    """An Event for each decision; those that take something away are warnings."""
    return [
        Note(
            entry.decision,
            f"{entry.reason}: {entry.message}" if entry.reason != "Spec" else entry.message,
            _warns(entry),
        )
        for entry in decisions
    ]


def _warns(entry: HistoryEntry) -> bool:
    if entry.decision in ("ModeSuspended", "Rejected", "CanaryRejected", "Observed"):
        return True
    return entry.decision == "LevelChanged" and entry.reason not in ("Spec", "Recovered", "RetryToken")


def notes(
    before: InferencePolicyStatus, after: InferencePolicyStatus, decisions: Iterable[HistoryEntry] = ()
) -> list[Note]:
    """What people should hear of: decisions, modes that can't run, the conditions of NOTED when they change."""
    result = decision_notes(decisions)
    rejected = [entry for entry in after.conditions if entry.reason == "ConfigRejected"]
    result += transition_notes(before.conditions, after.conditions, NOTED)
    result += transition_notes(before.conditions, rejected, ("ConfigApplied",))
    result += _mode_notes(before, after)
    return list(dict.fromkeys(result))


def _mode_notes(before: InferencePolicyStatus, after: InferencePolicyStatus) -> list[Note]:
    """Modes that the spec asks for and that can no longer run."""
    were = {mode.name for mode in before.modes if mode.state is ModeState.UNSUPPORTED}
    return [
        Note("ModeUnsupported", f"{mode.name} doesn't run: {mode.reason}")
        for mode in after.modes
        if mode.state is ModeState.UNSUPPORTED
        and mode.name not in were
        and mode.name is not Mode.KV_CACHE_REUSE  # KVReuseDegraded tells
        and mode.reason != NOTHING_STREAMS
    ]


def _conditions(findings: Findings) -> list[Condition]:
    generation = findings.policy["metadata"]["generation"]
    applied, workload = findings.reach.verdict, workload_verdict(findings)

    def entry(type_: str, verdict: Verdict, status: ConditionStatus | None = None) -> Condition:
        return Condition(
            type=type_,
            status=status or (ConditionStatus.TRUE if verdict.ok else ConditionStatus.FALSE),
            reason=verdict.reason,
            message=verdict.message[:2048],
            observed_generation=generation,
        )

    conflict = Verdict(False, "Conflict", "; ".join(findings.conflicts)) if findings.conflicts else None
    rejected = applied if applied.reason == "ConfigRejected" else None
    blockers = [
        conflict,
        locked_out(findings),
        None if findings.variants.ok else findings.variants,
        None if workload.ok else workload,
        rejected,
    ]
    ready = next((blocker for blocker in blockers if blocker is not None), workload)
    result = [
        entry("Ready", ready),
        entry("WorkloadReady", workload),
        entry("VariantsReady", findings.variants),
        entry("ConfigApplied", applied, None if findings.reach.known else ConditionStatus.UNKNOWN),
    ]
    if conflict is not None:
        result.append(entry("Conflict", conflict, ConditionStatus.TRUE))
    told = {
        "WeightsFailed": weights_failed(findings),
        "SlicesFailed": slices_failed(findings),
        "DraftShortened": draft_shortened(findings),
        "KVReuseDegraded": _kv_reuse_degraded(findings),
        "PartsNotFound": parts_not_found(findings),
        "ExposureFailed": exposure_failed(findings),
        "AutoscalingFailed": findings.unscaled,
        "RolledBack": rolled_back(findings),
        "SignalsUnknown": signals_unknown(findings),
        "TicketOpen": ticket_open(findings),
        **findings.warnings,
    }
    for type_, reported in told.items():
        if reported is not None:
            result.append(entry(type_, reported, ConditionStatus.TRUE))
    for type_, (verdict, status) in loop_conditions(findings).items():
        result.append(entry(type_, verdict, status))
    if findings.spec.gateway.api_keys_secret_ref is None:
        result.append(entry("OpenGateway", Verdict(True, "NoApiKeys", OPEN_GATEWAY)))
    return result


def locked_out(findings: Findings) -> Verdict | None:
    """The gateways ask for keys and know none. The operator never reads the Secret: they tell."""
    secret = findings.spec.gateway.api_keys_secret_ref
    if secret is None or all(state.tenants != 0 for state in findings.states.values()):
        return None
    message = (
        f"the Secret '{secret.name}' doesn't exist or has no entries, so every request is refused: "
        "give it one entry a tenant, whose value is the tenant's key"
    )
    return Verdict(False, "NoApiKeys", message)


def _kv_reuse_degraded(findings: Findings) -> Verdict | None:
    """The first pod that can't keep or share keys and values as the level asks for. The operator never reads the
    Secret with Redis's address: pods tell that it or its entry is missing."""
    if findings.effective.config.kv_reuse is None:
        return None
    for _, state in sorted(findings.states.items()):
        if Mode.KV_CACHE_REUSE in state.unsupported:
            return Verdict(False, "PodsGoWithout", f"pod {state.pod}: {state.unsupported[Mode.KV_CACHE_REUSE]}")
    return None


def parts_not_found(findings: Findings) -> Verdict | None:
    """What the policy names in Secrets and ConfigMaps, which the operator never reads: the first pod that misses it."""
    for _, state in sorted(findings.states.items()):
        if state.not_found:
            return Verdict(False, "PodsGoWithout", f"pod {state.pod}: " + "; ".join(state.not_found))
    return None


def _mode(mode: ModeStatus, findings: Findings) -> ModeStatus:
    """A mode that is on, for all or on trial, but that a pod can't run is unsupported, in the pod's words; so it stays
    where its trial ended because of that."""
    canary, is_on = findings.canary, mode.state is ModeState.ACTIVE
    is_tried = not is_on and canary is not None and canary.config.is_active(mode.name)
    for state in findings.states.values() if is_on or is_tried else ():
        if mode.name in state.unsupported:
            reason = f"pod {state.pod}: {state.unsupported[mode.name]}"[:256]
            return ModeStatus(name=mode.name, state=ModeState.UNSUPPORTED, reason=reason)
    if is_tried and canary is not None:
        return ModeStatus(name=mode.name, state=ModeState.CANARY, reason=f"on for {canary.percent} % of the requests")
    suspended = {entry.mode: entry.reason for entry in findings.decided.state.suspended}
    if mode.state is ModeState.SUSPENDED and suspended.get(mode.name) == UNSUPPORTED:
        before = last_status(InferencePolicyStatus, findings.policy).modes
        told = (known for known in before if known.name is mode.name and known.state is ModeState.UNSUPPORTED)
        return next(told, mode)
    return mode


def _engine(findings: Findings, before: EngineStatus | None) -> EngineStatus:
    deployment = findings.deployments.get(ENGINE) or {}
    status = deployment.get("status", {})
    labels = selector(findings.policy["metadata"]["name"], ENGINE)
    return EngineStatus(
        replicas=status.get("replicas", 0),
        ready_replicas=status.get("readyReplicas", 0),
        selector=",".join(f"{key}={value}" for key, value in labels.items()),
        full_weights=full_weights(findings, before),
    )
