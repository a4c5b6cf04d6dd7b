"""How many pods a component has, where load decides."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from sixfold_api.base import ApiModel, Rule
from sixfold_api.scalars import Duration, NoFloat, Unquoted, duration_seconds

DEFAULT_IDLE_SECONDS = 600.0


class Scaler(StrEnum):
    """Who counts."""

    AUTO = "Auto"
    HPA = "HPA"
    KEDA = "KEDA"


MIN_NOT_OVER_MAX = Rule(
    "!has(self.minReplicas) || self.minReplicas <= self.maxReplicas",
    "minReplicas may not be over maxReplicas",
    lambda a: a.min_replicas <= a.max_replicas,
)


class GatewayAutoscalingSpec(ApiModel):
    """The number of gateways follows their CPU use. The operator then leaves `replicas` of the Deployment alone."""

    min_replicas: Annotated[int, Field(ge=1, le=100), Unquoted, NoFloat] = 1
    """Fewest pods. Gateways never sleep: they hold the request that wakes the engines."""
    max_replicas: Annotated[int, Field(ge=1, le=100), Unquoted, NoFloat]
    """Most pods."""
    scaler: Scaler = Scaler.AUTO
    """HPA is Kubernetes' own autoscaler, KEDA writes a ScaledObject. Auto takes KEDA where it is installed and the
    operator knows a Prometheus, else HPA."""
    cpu_percent: Annotated[int, Field(ge=1, le=1000), Unquoted] = 80
    """Average CPU use to hold, in percent of what the pods request."""

    rules = (MIN_NOT_OVER_MAX,)

    def as_load(self) -> EngineAutoscalingSpec:
        """The same in the terms of engines."""
        return EngineAutoscalingSpec(
            min_replicas=self.min_replicas,
            max_replicas=self.max_replicas,
            scaler=self.scaler,
            cpu_percent=self.cpu_percent,
        )


class EngineAutoscalingSpec(ApiModel):
    """The number of engines follows the load. The operator then leaves `replicas` of the Deployment alone."""

    min_replicas: Annotated[int, Field(ge=0, le=1000), Unquoted, NoFloat] = 1
    """Fewest pods. 0 lets engines sleep while nobody asks: the next request waits until they are back."""
    max_replicas: Annotated[int, Field(ge=1, le=1000), Unquoted, NoFloat]
    """Most pods."""
    scaler: Scaler = Scaler.AUTO
    """HPA is Kubernetes' own autoscaler, KEDA writes a ScaledObject. Auto takes KEDA where it is installed and the
    operator knows a Prometheus, else HPA."""
    cpu_percent: Annotated[int, Field(ge=1, le=1000), Unquoted] | None = None
    """Average CPU use to hold, in percent of what the pods request."""
    queued_requests: Annotated[int, Field(ge=1, le=10_000), Unquoted] | None = None
    """Waiting requests to hold, a pod. KEDA reads them from Prometheus; HPA needs an adapter that serves the pods'
    metric sixfold_requests_waiting."""
    idle_after: Duration | None = None
    """With minReplicas 0: how long no request may have come before the pods go. Absent means 10m."""

    rules = (
        MIN_NOT_OVER_MAX,
        Rule(
            "has(self.cpuPercent) || has(self.queuedRequests)",
            "name what to scale by: cpuPercent, queuedRequests or both",
            lambda a: a.cpu_percent is not None or a.queued_requests is not None,
        ),
        Rule(
            "!has(self.idleAfter) || (has(self.minReplicas) && self.minReplicas == 0)",
            "idleAfter is for minReplicas: 0; remove it or set minReplicas to 0",
            lambda a: a.idle_after is None or a.min_replicas == 0,
        ),
        Rule(
            "!has(self.idleAfter) || (duration(self.idleAfter) >= duration('1s')"
            " && duration(self.idleAfter) <= duration('168h'))",
            "idleAfter must be between 1s and 168h",
            lambda a: a.idle_after is None or 1.0 <= duration_seconds(a.idle_after) <= 168 * 3600.0,
        ),
    )

    @property
    def may_sleep(self) -> bool:
        return self.min_replicas == 0

    @property
    def idle_seconds(self) -> float:
        """How long no request may have come before the pods go."""
        return DEFAULT_IDLE_SECONDS if self.idle_after is None else duration_seconds(self.idle_after)
