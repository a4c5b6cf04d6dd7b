"""A policy's spec and status as the control loop sees them. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

from sixfold_api.analysis import AnalysisSpec, Automation, CanarySpec
from sixfold_api.conditions import ConditionStatus
from sixfold_api.control_status import ControlStatus, HistoryEntry
from sixfold_api.effective import effective
from sixfold_api.modes import LEVEL_FROM, MAX_LEVEL, Mode, ModeState
from sixfold_api.policy import InferencePolicySpec, InferencePolicyStatus
from sixfold_api.scalars import FullWeights, duration_seconds
from sixfold_operator.control.model import PROCESS_WIDE, CanaryPlan, State, Timing, View

HISTORY_ENTRIES = 10


def view_of(spec: InferencePolicySpec, unsupported: Mapping[Mode, str], status: InferencePolicyStatus) -> View:
    """What the spec says, as far as the reducer cares. `unsupported` has the modes that can't run."""
    highest = effective(spec.model_copy(update={"rollback_level": MAX_LEVEL}), unsupported=unsupported)
    modes = frozenset(mode.name for mode in highest.modes if mode.state is ModeState.ACTIVE)
    ceiling = spec.rollback_level
    changing = {LEVEL_FROM[mode] for mode in modes if LEVEL_FROM[mode] <= ceiling}
    is_swapped = status.engine is not None and status.engine.full_weights is FullWeights.SWAP
    return View(
        ceiling=ceiling,
        levels=tuple(sorted({0, ceiling, *changing})),
        modes=modes,
        spec_hash=spec_hash(spec),
        enforce=spec.automation is Automation.ENFORCE,
        retry_token=spec.retry_token or "",
        timing=timing_of(spec.analysis),
        canary=None if spec.canary is None else plan_of(spec.canary),
        ready_since=ready_since(status),
        unsplittable=PROCESS_WIDE | ({Mode.QUANTIZED} if is_swapped else set()),
    )


def spec_hash(spec: InferencePolicySpec) -> str:
    """Of the part of the spec that decides what a level runs. Scaling and placement don't count."""
    document: dict[str, Any] = {
        "generation": spec.generation.to_dict() if spec.generation else None,
        "classification": spec.classification.to_dict() if spec.classification else None,
        "batching": spec.batching.to_dict() if spec.batching else None,
        "streaming": spec.streaming.to_dict(),
    }
    if document["classification"]:
        document["classification"].pop("engine", None)
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def timing_of(analysis: AnalysisSpec) -> Timing:
    return Timing(
        interval=duration_seconds(analysis.interval),
        initial_delay=duration_seconds(analysis.initial_delay),
        failure_limit=analysis.failure_limit,
        cooldown=duration_seconds(analysis.cooldown),
        recover_after=duration_seconds(analysis.recover_after),
        reject_window=duration_seconds(analysis.reject_window),
    )


def plan_of(canary: CanarySpec) -> CanaryPlan:
    return CanaryPlan(tuple(canary.steps), duration_seconds(canary.step_duration), canary.min_samples)


def ready_since(status: InferencePolicyStatus) -> datetime | None:
    """Since when the policy has been Ready; None while it isn't."""
    ready = next((entry for entry in status.conditions if entry.type == "Ready"), None)
    if ready is None or ready.status is not ConditionStatus.TRUE or not ready.last_transition_time:
        return None
    return datetime.fromisoformat(ready.last_transition_time.replace("Z", "+00:00"))


def state_of(status: InferencePolicyStatus) -> State:
    """What the loop remembers of a policy."""
    active = frozenset(mode.name for mode in status.modes if mode.state is ModeState.ACTIVE)
    return State(
        level=status.level,
        suspended=tuple(status.suspended),
        tuned=tuple(status.tuned),
        canary=status.canary,
        signals=tuple(status.signals),
        control=status.control or ControlStatus(),
        active=active if status.modes else None,
    )


def remembered(
    status: InferencePolicyStatus, state: State, decisions: Collection[HistoryEntry]
) -> InferencePolicyStatus:
    """A status with the state and the newest decisions in it."""
    history = [*reversed(list(decisions)), *status.history][:HISTORY_ENTRIES]
    return status.model_copy(
        update={
            "level": state.level,
            "suspended": list(state.suspended),
            "tuned": list(state.tuned),
            "canary": state.canary,
            "signals": list(state.signals),
            "history": history,
            "control": state.control,
        }
    )


def thresholds_of(spec: InferencePolicySpec, measured: Mapping[str, float]) -> dict[str, float]:
    """Signal -> this policy's threshold: what the spec says, before what its variants' reports say."""
    return {**measured, **{entry.signal: float(entry.threshold) for entry in spec.analysis.thresholds}}
