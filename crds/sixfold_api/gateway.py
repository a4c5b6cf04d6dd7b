"""spec.gateway: who may ask, how much, and with what priority."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from sixfold_api.autoscaling import GatewayAutoscalingSpec
from sixfold_api.base import ApiModel, Rule
from sixfold_api.exposure import ClientPeer, HTTPRouteSpec, IngressSpec
from sixfold_api.pods import PodSettings, SecretRef
from sixfold_api.scalars import Duration, NoFloat, Quantity, Unquoted, duration_seconds, quantity_value

MAX_TENANTS = 256
_MIB = 2**20


class Priority(StrEnum):
    LOW = "Low"
    NORMAL = "Normal"
    HIGH = "High"

    @property
    def rank(self) -> int:
        """Grows with importance."""
        return list(Priority).index(self)


class RateLimit(ApiModel):
    """Token bucket of each API key, shared out evenly over the gateway replicas."""

    requests_per_second: Annotated[int, Field(ge=1, le=100_000), Unquoted]
    """Sustained rate of one key over all gateways."""
    burst: Annotated[int, Field(ge=1, le=100_000), Unquoted] = 10
    """Requests that one key may send at once."""


class TenantSpec(ApiModel):
    """What one API key may do."""

    name: Annotated[str, StringConstraints(pattern=r"^[-._a-zA-Z0-9]+$", min_length=1, max_length=253)]
    """The entry of the Secret that holds the key."""
    priority: Priority = Priority.NORMAL
    """Of its requests: High ones join the batch that is being built."""
    max_priority: Priority | None = None
    """The highest that the header X-Priority may ask for; absent means `priority`. Lower is always allowed."""

    rules = (
        Rule(
            # In the order of the alphabet High < Low < Normal, so each pair is named.
            "!has(self.maxPriority) || self.maxPriority == 'High'"
            " || (self.maxPriority == 'Normal' && (!has(self.priority) || self.priority != 'High'))"
            " || (has(self.priority) && self.priority == 'Low')",
            "maxPriority may not be lower than priority",
            lambda t: t.max_priority is None or t.max_priority.rank >= t.priority.rank,
        ),
    )


def _each_once(tenants: list[TenantSpec]) -> list[TenantSpec]:
    """What kube-apiserver sees to by itself for a list with keys; as a rule over so many it would cost too much."""
    if len({tenant.name for tenant in tenants}) != len(tenants):
        raise ValueError("each tenant may stand there once")
    return tenants


class GatewaySpec(ApiModel):
    """The Deployment of gateway pods: keys, limits, tokenising, batching, streaming. CPU only."""

    replicas: Annotated[int, Field(ge=1, le=100), Unquoted] | None = None
    """Gateway pods; absent means 1."""
    autoscaling: GatewayAutoscalingSpec | None = None
    """Pods by load, in place of replicas."""
    api_keys_secret_ref: SecretRef | None = None
    """Secret whose entry names are tenants and whose values are their API keys. Without it the gateway is open."""
    rate_limit: RateLimit | None = None
    """Absent means no limit."""
    tenants: Annotated[
        list[TenantSpec],
        AfterValidator(_each_once),
        Field(
            max_length=MAX_TENANTS,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ] = []
    """Keys whose requests aren't of Normal priority; those that aren't listed are."""
    max_request_size: Annotated[Quantity, NoFloat] = "4Mi"
    """Most bytes of a request's body."""
    request_timeout: Duration = "10m"
    """How long a request may take in all; X-Request-Timeout may ask for less."""
    demo_page: Annotated[bool, Field(strict=True)] = False
    """For development: a page to try the endpoint with, at /. It holds no key; whoever opens it types one in."""
    ingress: IngressSpec | None = None
    """Absent means no Ingress."""
    http_route: HTTPRouteSpec | None = None
    """Absent means no HTTPRoute."""
    allow_from: Annotated[list[ClientPeer], Field(max_length=32)] = []
    """Who may connect; nobody listed means everybody. An Ingress' or Gateway's own pods must be among them. Holds where
    the chart's networkPolicies.enabled is set and the cluster's network enforces NetworkPolicies."""
    pod: PodSettings = PodSettings()
    """Placement and size of the pods."""

    rules = (
        Rule(
            "!has(self.autoscaling) || !has(self.replicas)",
            "replicas and autoscaling exclude each other: remove one",
            lambda g: g.autoscaling is None or g.replicas is None,
        ),
        Rule(
            "!has(self.tenants) || size(self.tenants) == 0 || has(self.apiKeysSecretRef)",
            "tenants are entries of the Secret with the API keys: add apiKeysSecretRef or remove them",
            lambda g: not g.tenants or g.api_keys_secret_ref is not None,
        ),
        Rule(
            "!has(self.requestTimeout) || (duration(self.requestTimeout) >= duration('1s')"
            " && duration(self.requestTimeout) <= duration('24h'))",
            "requestTimeout must be between 1s and 24h",
            lambda g: 1.0 <= duration_seconds(g.request_timeout) <= 86400.0,
        ),
        Rule(
            "!has(self.maxRequestSize) || (quantity(string(self.maxRequestSize)).compareTo(quantity('1Ki')) >= 0"
            " && quantity(string(self.maxRequestSize)).compareTo(quantity('1Gi')) <= 0)",
            "maxRequestSize must be between 1Ki and 1Gi",
            lambda g: 1024 <= quantity_value(g.max_request_size) <= 1024 * _MIB,
        ),
    )
