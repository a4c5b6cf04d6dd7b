"""ModelVariant, Job and pods -> what to do and what to say. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from pydantic import ValidationError

from sixfold_api.conditions import Condition, ConditionStatus, merge
from sixfold_api.exit_heads import ExitReport
from sixfold_api.precision import DraftReport, QualityReport
from sixfold_api.subgraphs import SliceReport
from sixfold_api.variant import (
    PERMANENT_FAILURE_EXIT_CODE,
    ArtifactFacts,
    ArtifactStatus,
    ModelVariantSpec,
    ModelVariantStatus,
    PreparationSummary,
)
from sixfold_operator.builders.common import Manifest
from sixfold_operator.builders.job import TRIES, Inputs, artifact_place, job_name
from sixfold_operator.reconcile.rollout import Verdict, condition, last_status, one_word, pod_problem, termination
from sixfold_operator.reconcile.variant_quality import TOKENIZER_MISMATCH, budget_verdict, draft_verdict, exits_verdict

CLAIM_RETRY_SECONDS = 10.0
SUMMARY_GRACE_SECONDS = 10.0
"""How long the pod's last status may lag behind the Job's."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True)
class Measured:
    """What a preparation found out beside the facts."""

    quality: QualityReport | None = None
    draft: DraftReport | None = None
    exits: ExitReport | None = None
    slices: Sequence[SliceReport] = ()

    @classmethod
    def of(cls, told: ModelVariantStatus | PreparationSummary | None) -> Measured:
        return cls() if told is None else cls(told.quality, told.draft, told.exits, told.slices)


@dataclass(frozen=True)
class VariantPlan:
    """What follows from what was observed."""

    verdict: Verdict
    """Prepared."""
    artifact: ArtifactStatus | None = None
    job_name: str | None = None
    measured: Measured = field(default_factory=Measured)
    create_job: bool = False
    discard_job: bool = False
    again_seconds: float | None = None


def plan(
    variant: Manifest,
    spec: ModelVariantSpec,
    job: Manifest | None,
    pods: Sequence[Manifest],
    inputs: Inputs | Verdict,
    missing_claims: Sequence[str],
    now: datetime,
) -> VariantPlan:
    """The next step of a variant.

    `job` is the one that belongs to the spec, `pods` are its pods. `inputs` is what the Job is made from, or what
    it waits for; like `missing_claims` it counts only without a Job. What shapes an artifact is immutable, so a
    recorded artifact stands for as long as the variant does.
    """
    status = last_status(ModelVariantStatus, variant)
    if status.artifact is not None:
        return recorded(status, _prepared(status.artifact))
    name = job_name(variant, spec)
    if job is None:
        return _begin(name, inputs, missing_claims)
    summary = newest_summary(pods)
    measured = Measured.of(summary)
    if condition(job, "Complete").get("status") == "True":
        return _complete(variant, spec, job, inputs, summary, now)
    if condition(job, "Failed").get("status") == "True":
        return VariantPlan(_failed(job, pods, summary), None, name, measured)
    return VariantPlan(_running(name, pods, summary), None, name, measured)


def recorded(status: ModelVariantStatus, verdict: Verdict) -> VariantPlan:
    """Everything stays as the status has it."""
    return VariantPlan(verdict, status.artifact, status.job_name, Measured.of(status))


def status_of(plan: VariantPlan, variant: Manifest, now: datetime) -> ModelVariantStatus:
    """The status that a plan leads to."""
    generation = variant["metadata"]["generation"]
    before = last_status(ModelVariantStatus, variant)
    conditions = [
        Condition(
            type=type_,
            status=ConditionStatus.TRUE if verdict.ok else ConditionStatus.FALSE,
            reason=verdict.reason,
            message=verdict.message[:2048],
            observed_generation=generation,
        )
        for type_, verdict in _verdicts(plan, is_draft="draftFor" in variant["spec"]).items()
    ]
    return ModelVariantStatus(
        observed_generation=generation,
        artifact=plan.artifact,
        size=size_text(plan.artifact.size_bytes) if plan.artifact else None,
        quality=plan.measured.quality,
        draft=plan.measured.draft,
        exits=plan.measured.exits,
        slices=list(plan.measured.slices),
        job_name=plan.job_name,
        conditions=merge(before.conditions, conditions, now),
    )


def _verdicts(plan: VariantPlan, *, is_draft: bool) -> dict[str, Verdict]:
    """The conditions. Weights that were prepared but lost too much can't be served."""
    verdicts = {"Prepared": plan.verdict, "Ready": plan.verdict}
    measured = plan.measured
    if measured.quality is not None:
        verdicts["WithinBudget"] = budget_verdict(measured.quality)
        if plan.verdict.ok and not verdicts["WithinBudget"].ok:
            verdicts["Ready"] = verdicts["WithinBudget"]
    if measured.exits is not None:
        verdicts["ExitsCalibrated"] = exits_verdict(measured.exits)
    if measured.draft is not None:
        verdicts["DraftCompatible"] = draft_verdict(measured.draft)
    elif is_draft and plan.verdict.reason == TOKENIZER_MISMATCH:
        verdicts["DraftCompatible"] = plan.verdict
    return verdicts


def newest_summary(pods: Sequence[Manifest]) -> PreparationSummary | None:
    """What the pod that ended last left as its termination message; None if no pod left a summary."""
    ended = [terminated for pod in pods if (terminated := _terminated(pod)) is not None]
    for terminated in sorted(ended, key=lambda end: end.get("finishedAt") or "", reverse=True):
        try:
            summary = PreparationSummary.model_validate_json(terminated.get("message", ""))
        except ValidationError:
            continue
        if summary.facts is not None or summary.failure is not None:
            return summary
    return None


def size_text(size_bytes: int) -> str:
    """Bytes for people: 7.1 MiB."""
    size, unit = float(size_bytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size_bytes} B" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def _begin(name: str, inputs: Inputs | Verdict, missing_claims: Sequence[str]) -> VariantPlan:
    """What stands in the way of Job `name`, or its creation."""
    if isinstance(inputs, Verdict):
        return VariantPlan(inputs)
    if missing_claims:
        claims = " and ".join(sorted(missing_claims))
        message = f"no PersistentVolumeClaim {claims} in this namespace: create it, and preparation starts"
        return VariantPlan(Verdict(False, "ClaimMissing", message), again_seconds=CLAIM_RETRY_SECONDS)
    return VariantPlan(Verdict(False, "Preparing", f"Job {name} is being created"), None, name, create_job=True)


def _prepared(artifact: ArtifactFacts) -> Verdict:
    message = f"{artifact.architecture}, {artifact.parameters} parameters in {artifact.dtype}, {artifact.digest[:19]}"
    return Verdict(True, "Prepared", f"The weights are verified: {message}")


def _complete(
    variant: Manifest,
    spec: ModelVariantSpec,
    job: Manifest,
    inputs: Inputs | Verdict,
    summary: PreparationSummary | None,
    now: datetime,
) -> VariantPlan:
    name = job["metadata"]["name"]
    if summary is not None and summary.facts is not None:
        if isinstance(inputs, Verdict) and spec.artifact is None:
            return VariantPlan(inputs, None, name)  # used in place, and the variant whose place it is has gone
        source = inputs.source if isinstance(inputs, Inputs) else ""
        claim, path = artifact_place(variant["metadata"]["name"], spec, source)
        artifact = ArtifactStatus(**summary.facts.model_dump(), claim_name=claim, path=path)
        return VariantPlan(_prepared(artifact), artifact, name, Measured.of(summary))
    if _seconds_since_completion(job, now) < SUMMARY_GRACE_SECONDS:
        return VariantPlan(Verdict(False, "Preparing", f"Job {name} has finished"), None, name, again_seconds=1.0)
    message = f"Job {name} finished, but its pod and summary are gone: it runs once more"
    return VariantPlan(Verdict(False, "Preparing", message), None, name, discard_job=True, again_seconds=1.0)


def _failed(job: Manifest, pods: Sequence[Manifest], summary: PreparationSummary | None) -> Verdict:
    name = job["metadata"]["name"]
    retry = f"Delete Job {name} to try again"
    if summary is not None and summary.failure is not None:
        return Verdict(False, summary.failure.reason, f"{summary.failure.message}. {retry}")
    failed = condition(job, "Failed")
    ends = [termination(end) for pod in pods if (end := _terminated(pod)) is not None and end.get("exitCode")]
    detail = f" (the last pod: {ends[-1]})" if ends else ""
    reason = one_word(failed.get("reason"), "JobFailed")
    return Verdict(False, reason, f"Job {name} failed: {failed.get('message', '')}{detail}. {retry}")


def _running(name: str, pods: Sequence[Manifest], summary: PreparationSummary | None) -> Verdict:
    for pod in pods:
        problem = pod_problem(pod)
        if problem is not None and _terminated(pod) is None:
            return problem._replace(message=f"Job {name}: {problem.message}")
    if summary is not None and summary.failure is not None:
        failure = summary.failure
        outlook = f"Job {name} tries again" if _tries_again(pods) else f"Job {name} ends"
        return Verdict(False, failure.reason, f"{failure.message}. {outlook}")
    return Verdict(False, "Preparing", f"Job {name} prepares the weights")


def _tries_again(pods: Sequence[Manifest]) -> bool:
    """Whether the Job makes another pod after those that failed, as its back-off limit and failure policy say."""
    exit_codes = [end.get("exitCode") for pod in pods if (end := _terminated(pod)) is not None]
    return len(exit_codes) < TRIES and PERMANENT_FAILURE_EXIT_CODE not in exit_codes


def _terminated(pod: Manifest) -> Manifest | None:
    for container in pod.get("status", {}).get("containerStatuses", []):
        terminated: Manifest | None = container.get("state", {}).get("terminated")
        if terminated is not None:
            return terminated
    return None


def _seconds_since_completion(job: Manifest, now: datetime) -> float:
    text = job["status"].get("completionTime") or condition(job, "Complete").get("lastTransitionTime")
    if not text:
        return 0.0
    return (now - datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(UTC)).total_seconds()
