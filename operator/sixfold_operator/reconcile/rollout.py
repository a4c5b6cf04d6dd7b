"""What pods and Deployments say about themselves -> one verdict with a reason. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from sixfold_api.base import StatusModel
from sixfold_api.runtime_config import PodState
from sixfold_operator.builders.common import Manifest

_FATAL_WAITS = {
    "CrashLoopBackOff",
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImageNeverPull",
    "ErrImagePull",
    "ImageInspectError",
    "ImagePullBackOff",
    "InvalidImageName",
    "RunContainerError",
}


S = TypeVar("S", bound=StatusModel)
ASLEEP = "Asleep"


class Verdict(NamedTuple):
    """Whether something is as it should be, why not, and in which words."""

    ok: bool
    reason: str
    message: str


def is_leaving(pod: Manifest) -> bool:
    """Terminating or finished pods serve nobody and don't count."""
    return "deletionTimestamp" in pod["metadata"] or pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def is_ready(pod: Manifest) -> bool:
    return not is_leaving(pod) and condition(pod, "Ready").get("status") == "True"


def is_running(pod: Manifest) -> bool:
    return not is_leaving(pod) and pod.get("status", {}).get("phase") == "Running"


def last_status(model: type[S], owner: Manifest) -> S:
    """The status that was written last. A part that this version can't read (a newer operator wrote it) is dropped."""
    status = owner.get("status", {})
    try:
        return model.model_validate(status)
    except ValidationError as error:
        unreadable = {problem["loc"][0] for problem in error.errors()}
        return model.model_validate({key: value for key, value in status.items() if key not in unreadable})


def condition(manifest: Manifest, type_: str) -> Mapping[str, Any]:
    """The condition of that type, as the object's status has it; empty without one."""
    conditions = manifest.get("status", {}).get("conditions", [])
    return next((entry for entry in conditions if entry["type"] == type_), {})


def pod_problem(pod: Manifest) -> Verdict | None:
    """Why a pod can't come up, in the words of scheduler or kubelet; None if nothing is known against it."""
    name = pod["metadata"]["name"]
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        reason = one_word(scheduled.get("reason"), "Unschedulable")
        return Verdict(False, reason, f"pod {name}: {scheduled.get('message', '')}")
    for container in pod.get("status", {}).get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("reason") in _FATAL_WAITS:
            ended = container.get("lastState", {}).get("terminated")
            detail = f"; before that: {termination(ended)}" if ended else ""
            return Verdict(False, waiting["reason"], f"pod {name}: {waiting.get('message', 'no message')}{detail}")
    return None


def termination(ended: Mapping[str, Any]) -> str:
    """How a container ended, for people."""
    message = str(ended.get("message", "")).strip()
    return f"{ended.get('reason', 'ended')} with exit code {ended.get('exitCode')}" + (
        f": {message}" if message else ""
    )


def one_word(text: Any, otherwise: str) -> str:
    """A reason that a condition may carry."""
    return text if isinstance(text, str) and re.fullmatch(r"[A-Z][A-Za-z0-9]{0,63}", text) else otherwise


def judge_deployment(
    component: str,
    deployment: Manifest | None,
    pods: Sequence[Manifest],
    states: Mapping[str, PodState],
    *,
    may_sleep: bool = False,
) -> Verdict:
    """Whether every replica of the newest template is ready. Old pods that still answer don't count, and no pods are
    right where they `may_sleep`."""
    if deployment is None:
        return Verdict(False, "NotCreated", f"{component}: the Deployment doesn't exist yet")
    replicas = deployment["spec"].get("replicas", 1)
    status = deployment.get("status", {})
    seen = status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)
    exist, updated = status.get("replicas", 0), status.get("updatedReplicas", 0)
    available = status.get("availableReplicas", 0)
    if seen and replicas == 0 and exist == 0 and may_sleep:
        return Verdict(True, ASLEEP, f"{component}: asleep until the next request")
    if seen and replicas == 0 and exist == 0:
        return Verdict(False, "ScaledToZero", f"{component}: scaled to zero replicas, so nothing answers")
    if seen and updated == exist == replicas and available >= replicas:
        return Verdict(True, "Ready", f"{component}: {available} of {replicas} pods are ready")
    problem = _first_problem(deployment, pods, states)
    if problem is not None:
        return problem._replace(message=f"{component}: {problem.message}")
    if seen and updated == exist == replicas:
        return Verdict(False, "PodsNotReady", f"{component}: {available} of {replicas} pods are ready")
    left = f"{max(0, exist - updated)} old ones are left"
    return Verdict(False, "RollingOut", f"{component}: {updated} of {replicas} pods have the newest template, {left}")


def _first_problem(deployment: Manifest, pods: Iterable[Manifest], states: Mapping[str, PodState]) -> Verdict | None:
    failure = condition(deployment, "ReplicaFailure")
    if failure.get("status") == "True":
        return Verdict(False, one_word(failure.get("reason"), "ReplicaFailure"), failure.get("message", ""))
    newest_first = sorted(pods, key=lambda pod: pod["metadata"].get("creationTimestamp", ""), reverse=True)
    for pod in newest_first:
        if is_leaving(pod):
            continue
        state = states.get(pod["metadata"]["name"])
        for model in state.models if state else ():
            if model.error:
                return Verdict(False, "ModelLoadFailed", f"pod {pod['metadata']['name']}: {model.name}: {model.error}")
        if (problem := pod_problem(pod)) is not None:
            return problem
    return None
