"""What Prometheus answered, as readings; and what the answers say about a policy's metrics as a whole. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sixfold_api.ticket import Cause
from sixfold_operator.control.model import Reading, Snapshot
from sixfold_operator.control.promql import PART, SAMPLES, VALUE
from sixfold_operator.control.waste_signals import FRESHNESS, SCRAPES_SECONDS

FOUND, MISSING, STALE, PROMETHEUS_ERROR = "Found", "Missing", "Stale", "PrometheusError"
"""Reasons of the condition MetricsAvailable."""
INTERVALS, SCRAPES = 2.0, 5.0
"""A sample older than that many intervals, and that many scrapes, is stale; scrapes that are more than
SCRAPES_SECONDS apart count as if they weren't."""
MOST_ROWS = 20_000

Policy = tuple[str, str]
"""Namespace and name."""
Readings = Mapping[Policy, tuple[Reading, ...]]

_CAUSES = {
    "padding": Cause.PADDING,
    "rejected_draft": Cause.REJECTED_DRAFT,
    "recomputed_prefix": Cause.RECOMPUTED_PREFIX,
    "unneeded_layers": Cause.UNNEEDED_LAYERS,
    "cancelled": Cause.CANCELLED,
}


class AnswerError(ValueError):
    """An answer isn't what a signal's query should give."""


def readings(rows: Any) -> Readings:
    """Readings by policy, of an answer to `expression_of(signal)`.

    Args:
        rows: a vector as Prometheus sends it: `[{"metric": {label: text}, "value": [unix seconds, "number"]}]`.

    Raises:
        AnswerError: no vector, too many rows, or none of them with the labels namespace and policy.
    """
    if not isinstance(rows, list):
        raise AnswerError("Prometheus answered something other than a vector")
    if len(rows) > MOST_ROWS:
        raise AnswerError(f"the query gives {len(rows)} series, at most {MOST_ROWS} are read")
    values: dict[Policy, list[Reading]] = {}
    samples: dict[tuple[Policy, tuple[object, ...]], float] = {}
    for row in rows:
        labels, number, unix_seconds = _row(row)
        if not (labels.get("namespace") and labels.get("policy")):
            continue
        policy = labels["namespace"], labels["policy"]
        reading = _reading(labels, number, unix_seconds)
        if reading is None:
            continue
        if labels.get(PART) == SAMPLES:
            samples[policy, _group(reading)] = number
        elif labels.get(PART) == VALUE:
            values.setdefault(policy, []).append(reading)
    if rows and not values and not samples:
        raise AnswerError("its series lack the labels namespace and policy")
    return {policy: tuple(_with_samples(policy, found, samples)) for policy, found in values.items()}


def snapshot(
    policy: Policy, at: datetime, found: Mapping[str, Readings], problems: Mapping[str, str], interval_seconds: float
) -> Snapshot:
    """What one round says about one policy.

    Args:
        found: by signal, of those that were answered.
        problems: by signal, why it wasn't answered.
        interval_seconds: how often Prometheus is asked.
    """
    own = {name: answer[policy] for name, answer in found.items() if policy in answer}
    reason, message = _state(own.get(FRESHNESS, ()), problems, not found, interval_seconds)
    return Snapshot(at, own, dict(problems), reason, message)


def _state(
    fresh: Sequence[Reading], problems: Mapping[str, str], is_dead: bool, interval_seconds: float
) -> tuple[str, str]:
    """Reason and message of a snapshot."""
    if is_dead or FRESHNESS in problems:
        return PROMETHEUS_ERROR, problems.get(FRESHNESS) or next(iter(problems.values()), "nothing was asked")
    if not fresh or not math.isfinite(fresh[0].value):
        return MISSING, (
            "Prometheus has no sixfold_level of this policy's pods: is there a PodMonitor or a scrape job for them,"
            " with honorLabels?"
        )
    age_seconds, scrapes = fresh[0].value, fresh[0].samples
    spacing_seconds = SCRAPES_SECONDS / max(scrapes, 1.0)
    limit_seconds = max(INTERVALS * interval_seconds, SCRAPES * spacing_seconds)
    if age_seconds > limit_seconds:
        # Not how old: a condition that changes each round would be written each round.
        return STALE, f"the newest sample of this policy's pods in Prometheus is older than {limit_seconds:.0f} s"
    return FOUND, ""


def _row(row: Any) -> tuple[dict[str, str], float, float]:
    try:
        labels, (unix_seconds, number) = row["metric"], row["value"]
        if not isinstance(labels, dict) or not all(isinstance(text, str) for text in labels.values()):
            raise TypeError
        return labels, float(number), float(unix_seconds)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise AnswerError("Prometheus answered something other than a vector") from None


def _reading(labels: Mapping[str, str], number: float, unix_seconds: float) -> Reading | None:
    """None where the level is no number, or the cause isn't known: a newer runtime's."""
    level, cause = labels.get("level"), labels.get("cause")
    if (level is not None and not (level.isascii() and level.isdigit() and len(level) <= 2)) or (
        cause is not None and cause not in _CAUSES
    ):
        return None
    return Reading(
        value=number,
        samples=0.0,
        unix_seconds=unix_seconds,
        level=None if level is None else int(level),
        arm=labels.get("arm"),
        variant=labels.get("variant"),
        cause=None if cause is None else _CAUSES[cause],
        length_bucket=labels.get("length_bucket"),
    )


def _group(reading: Reading) -> tuple[object, ...]:
    return reading.level, reading.arm, reading.variant, reading.cause, reading.length_bucket


def _with_samples(
    policy: Policy, found: Sequence[Reading], samples: Mapping[tuple[Policy, tuple[object, ...]], float]
) -> list[Reading]:
    return [replace(each, samples=samples.get((policy, _group(each)), 0.0)) for each in found]
