"""How far a RuntimeConfig has reached, which pods to poke, when to look again. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sixfold_api.names import SEQUENCE_ANNOTATION
from sixfold_api.policy import ConfigStatus
from sixfold_api.runtime_config import PodState
from sixfold_operator.builders.common import Manifest
from sixfold_operator.reconcile.rollout import Verdict, is_ready, is_running

POKE_AGAIN_SECONDS = (0.8, 2.5, 8.0, 25.0, 80.0)
"""A kubelet that was poked may still read the ConfigMap as it was a moment ago, and then keeps that for a minute."""
SHORTEST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.1, 60.0


@dataclass(frozen=True)
class Reach:
    """What the pods say about a sequence."""

    status: ConfigStatus
    verdict: Verdict
    known: bool
    """False where ready pods couldn't be asked."""
    level: int | None
    """The level that every ready pod reports; None while they differ or can't be asked."""

    @property
    def complete(self) -> bool:
        return self.status.applied == self.status.pods


def reach(pods: Sequence[Manifest], states: Mapping[str, PodState], sequence: int) -> Reach:
    """Judge the ready pods; terminating ones and those that are coming up don't count."""
    ready = [pod["metadata"]["name"] for pod in pods if is_ready(pod)]
    told = [states[name] for name in ready if name in states]
    applied = sum(state.sequence >= sequence and not state.config_error for state in told)
    levels = {state.level for state in told}
    level = levels.pop() if len(levels) == 1 and len(told) == len(ready) else None
    status = ConfigStatus(sequence=sequence, pods=len(ready), applied=applied)
    verdict, known = _verdict(ready, told, status)
    return Reach(status, verdict, known, level)


def _verdict(ready: Sequence[str], told: Sequence[PodState], status: ConfigStatus) -> tuple[Verdict, bool]:
    refused = next((state for state in told if state.config_error), None)
    if refused is not None:
        message = f"pod {refused.pod} refused the configuration and keeps the last good one: {refused.config_error}"
        return Verdict(False, "ConfigRejected", message), True
    count = f"{status.applied} of {status.pods} ready pods run sequence {status.sequence}"
    if not ready:
        return Verdict(False, "NoReadyPods", "no pod is ready; each starts with the newest configuration"), True
    if any(state.sequence < status.sequence for state in told):
        return Verdict(False, "Waiting", count), True
    if len(told) < len(ready):
        silent = len(ready) - len(told)
        message = f"{count}; {silent} don't answer on /state (is the operator outside the cluster's network?)"
        return Verdict(False, "PodsUnreachable", message), False
    unknown = sorted({field for state in told for field in state.unknown_fields})
    note = f"; the runtime image is older and doesn't know {', '.join(unknown)}" if unknown else ""
    return Verdict(True, "Applied", count + note), True


def pods_to_poke(
    pods: Sequence[Manifest], states: Mapping[str, PodState], sequence: int, attempt: int, *, just_written: bool
) -> dict[str, str]:
    """Pod name -> value of the annotation, for running pods whose kubelet has to look at the ConfigMap.

    A pod that says it lags is poked again with each attempt; one that says nothing once, and only if it can have
    mounted an older ConfigMap.
    """
    value = f"{sequence}-{attempt}" if attempt else str(sequence)
    pokes = {}
    for pod in pods:
        name = pod["metadata"]["name"]
        if not is_running(pod):
            continue
        last = pod["metadata"].get("annotations", {}).get(SEQUENCE_ANNOTATION, "")
        state = states.get(name)
        if state is not None:
            needed = state.sequence < sequence and last != value
        else:
            needed = last.split("-")[0] != str(sequence) and (just_written or is_ready(pod))
        if needed:
            pokes[name] = value
    return pokes


def poke_attempt(elapsed_seconds: float) -> int:
    """How many times a lagging pod should have been poked again, so long after the write."""
    return sum(elapsed_seconds >= threshold for threshold in POKE_AGAIN_SECONDS)


def wait_seconds(elapsed_seconds: float) -> float:
    """When to ask the pods again: a quarter of the time that has passed, within bounds."""
    return min(LONGEST_WAIT_SECONDS, max(SHORTEST_WAIT_SECONDS, elapsed_seconds / 4))
