"""spec.analysis, canary, shadow and tickets: when the operator acts by itself, and how carefully."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints

from sixfold_api.base import ApiModel, Rule
from sixfold_api.modes import Mode
from sixfold_api.scalars import Decimal, Duration, Fraction, NoFloat, Unquoted, duration_seconds

MAX_SIGNALS = 64
SignalName = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=48)]
"""Of a built-in signal, such as TTFTP95, or of one that the chart's values add."""
AlertName = Annotated[str, StringConstraints(min_length=1, max_length=128)]


class Automation(StrEnum):
    """What the operator does about a breach."""

    ENFORCE = "Enforce"
    OBSERVE = "Observe"


class Remediation(StrEnum):
    """What it does about waste."""

    TICKET_ONLY = "TicketOnly"
    AUTO_APPLY = "AutoApply"


class AlertAction(StrEnum):
    STEP_DOWN = "StepDown"
    LEVEL_0 = "Level0"
    SUSPEND = "Suspend"


class HashBy(StrEnum):
    CONVERSATION = "Conversation"
    REQUEST = "Request"


def once(what: str, key: Callable[[Any], str] = str) -> AfterValidator:
    """What kube-apiserver sees to by itself for lists with keys and for sets."""

    def check(items: list[Any]) -> list[Any]:
        if len({key(item) for item in items}) != len(items):
            raise ValueError(f"each {what} may stand there once")
        return items

    return AfterValidator(check)


class SignalThreshold(ApiModel):
    """Another threshold for a signal; its query stays, since a query of one's own would read others' metrics."""

    signal: SignalName
    """Name of the signal."""
    threshold: Decimal
    """In the signal's own unit, in quotes: seconds, or a share between 0 and 1."""


class AlertRule(ApiModel):
    """An alert of Alertmanager that may lower this policy. It is matched by its labels namespace and policy."""

    alert_name: AlertName
    """Value of the label alertname."""
    action: AlertAction
    """StepDown lowers the level by one, Level0 to 0, Suspend turns `mode` off, while the alert fires."""
    mode: Mode | None = None
    """Only for action: Suspend."""

    rules = (
        Rule(
            "has(self.mode) == (self.action == 'Suspend')",
            "mode is needed for action: Suspend, and only there",
            lambda a: (a.mode is not None) == (a.action is AlertAction.SUSPEND),
        ),
    )


class AnalysisSpec(ApiModel):
    """How health and waste are watched."""

    interval: Duration = "30s"
    """How often signals are judged."""
    initial_delay: Duration = "2m"
    """How long after the policy became Ready nothing is judged."""
    failure_limit: Annotated[int, Field(ge=1, le=100), Unquoted] = 3
    """Breaches in a row that make the operator act."""
    cooldown: Duration = "15m"
    """Least time between two changes that it makes; a drop to level 0 doesn't wait."""
    recover_after: Duration = "30m"
    """Conclusive health before it takes one step back up."""
    reject_window: Duration = "6h"
    """What fails twice within this time isn't tried again until the spec or retryToken changes."""
    thresholds: Annotated[
        list[SignalThreshold],
        once("signal", lambda entry: entry.signal),
        Field(
            max_length=MAX_SIGNALS,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["signal"]},
        ),
    ] = []
    """Thresholds of this policy."""
    alerts: Annotated[
        list[AlertRule],
        once("alert", lambda entry: entry.alert_name),
        Field(
            max_length=32,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["alertName"]},
        ),
    ] = []
    """Alerts that may lower this policy; others are counted and change nothing."""

    rules = (
        Rule(
            "!has(self.interval) || (duration(self.interval) >= duration('1s')"
            " && duration(self.interval) <= duration('1h'))",
            "interval must be between 1s and 1h",
            lambda a: 1.0 <= duration_seconds(a.interval) <= 3600.0,
        ),
        Rule(
            "(!has(self.initialDelay) || duration(self.initialDelay) <= duration('24h'))"
            " && (!has(self.cooldown) || duration(self.cooldown) <= duration('24h'))"
            " && (!has(self.recoverAfter) || duration(self.recoverAfter) <= duration('168h'))"
            " && (!has(self.rejectWindow) || duration(self.rejectWindow) <= duration('720h'))",
            "initialDelay and cooldown may be at most 24h, recoverAfter 168h, rejectWindow 720h",
            lambda a: (
                max(duration_seconds(a.initial_delay), duration_seconds(a.cooldown)) <= 86400.0
                and duration_seconds(a.recover_after) <= 7 * 86400.0
                and duration_seconds(a.reject_window) <= 30 * 86400.0
            ),
        ),
    )


CanaryStep = Annotated[int, Field(ge=1, le=99), Unquoted, NoFloat]


def _ascending(steps: list[int]) -> list[int]:
    if any(later <= earlier for earlier, later in pairwise(steps)):
        raise ValueError("steps must go up")
    return steps


class CanarySpec(ApiModel):
    """A higher level, a mode or a tuned value is tried on a share of the requests first."""

    steps: Annotated[
        list[CanaryStep],
        AfterValidator(_ascending),
        Field(
            min_length=1,
            max_length=8,
            json_schema_extra={
                "x-kubernetes-list-type": "set",
                "x-kubernetes-validations": [{"rule": "self.isSorted()", "message": "steps must go up"}],
            },
        ),
    ] = [5, 25, 50]
    """Percent of the requests, step by step; after the last one it holds for all."""
    step_duration: Duration = "5m"
    """Least time of a step; it lasts until there are samples enough to judge it."""
    hash_by: HashBy = HashBy.CONVERSATION
    """What stays together in one arm."""
    min_samples: Annotated[int, Field(ge=1, le=1_000_000), Unquoted] = 50
    """Requests of the canary that a judgement needs."""

    rules = (
        Rule(
            "!has(self.stepDuration) || (duration(self.stepDuration) >= duration('1s')"
            " && duration(self.stepDuration) <= duration('24h'))",
            "stepDuration must be between 1s and 24h",
            lambda c: 1.0 <= duration_seconds(c.step_duration) <= 86400.0,
        ),
    )


class ShadowSpec(ApiModel):
    """A share of the answers is computed again at level 0, with what capacity is spare, and compared."""

    sample_rate: Fraction = "0.01"
    """Share of the answers, in quotes."""


class TicketsSpec(ApiModel):
    """Where tickets go beside the cluster."""

    sinks: Annotated[
        list[Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$", max_length=40)]],
        once("sink"),
        Field(max_length=8, json_schema_extra={"x-kubernetes-list-type": "set"}),
    ] = []
    """Names of sinks of the chart's values: an address in here would let anyone send requests from the operator."""
