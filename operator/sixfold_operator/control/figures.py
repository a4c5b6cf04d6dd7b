"""Figures of a policy that are read and never judged, out of a snapshot. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from sixfold_api.runtime_config import STABLE
from sixfold_operator.control.canary import ArmFigures
from sixfold_operator.control.model import Reading, Snapshot

REQUEST_COST = "RequestCost"


def request_cost_seconds(snapshot: Snapshot, level: int | None = None, arm: str = STABLE) -> float | None:
    """Mean engine seconds of a request, at one level or at all; None where no request was counted."""
    return _mean(_chosen(snapshot, REQUEST_COST, level, arm))


def request_samples(snapshot: Snapshot, level: int | None = None, arm: str = STABLE) -> float:
    """How many requests stand behind request_cost_seconds."""
    return sum(each.samples for each in _chosen(snapshot, REQUEST_COST, level, arm))


def busy_share(snapshot: Snapshot) -> float | None:
    """Share of the time in which pods that hold a model compute."""
    readings = _finite(snapshot.readings.get("BusyShare", ()))
    return readings[0].value if len(readings) == 1 else None


def arm_figures(snapshot: Snapshot, arm: str, level: int | None = None) -> ArmFigures:
    """What one arm did over the windows of the figures, at one level or at all: an older step's series may linger."""

    def chosen(name: str) -> list[Reading]:
        return _chosen(snapshot, name, level, arm)

    errors, shadows, tokens = chosen("ArmErrorRate"), chosen("ShadowDisagreement"), chosen("ShadowDivergence")
    return ArmFigures(
        requests=sum(each.samples for each in errors),
        errors=sum(each.value * each.samples for each in errors),
        p95_seconds=_worst(chosen("ArmRequestP95")),
        shadowed=sum(each.samples for each in shadows),
        differed=sum(each.value * each.samples for each in shadows),
        shadow_tokens=sum(each.samples for each in tokens),
        divergence_nats=_mean(tokens),
    )


def _chosen(snapshot: Snapshot, name: str, level: int | None, arm: str) -> list[Reading]:
    readings = _finite(snapshot.readings.get(name, ()))
    return [each for each in readings if each.arm == arm and level in (None, each.level)]


def _finite(readings: Iterable[Reading]) -> list[Reading]:
    return [each for each in readings if math.isfinite(each.value) and math.isfinite(each.samples)]


def _mean(readings: Iterable[Reading]) -> float | None:
    """Of values, each as often as it has samples."""
    counted = [each for each in readings if each.samples > 0]
    samples = sum(each.samples for each in counted)
    return sum(each.value * each.samples for each in counted) / samples if samples else None


def _worst(readings: Iterable[Reading]) -> float | None:
    return max((each.value for each in readings if each.samples > 0), default=None)
