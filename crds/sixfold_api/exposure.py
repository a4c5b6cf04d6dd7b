"""How clients reach the gateway from outside, and which may."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from sixfold_api.base import ApiModel, Rule
from sixfold_api.scalars import DropNulls, LabelKey, LabelValue, ObjectName

CIDR_PATTERN = r"^[0-9a-fA-F:.]{2,39}/[0-9]{1,3}$"
PATH_PATTERN = r"^/([-._~a-zA-Z0-9]+/?)*$"
PathPrefix = Annotated[str, StringConstraints(pattern=PATH_PATTERN, max_length=256)]
Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=16), DropNulls]


class IngressSpec(ApiModel):
    """An Ingress in front of the gateway, with what the known controllers need to let streams through: no buffering,
    timeouts as long as `requestTimeout`, bodies as large as `maxRequestSize`.

    Other annotations come from the chart's value gateway.ingressAnnotations, and never from a policy: with snippets
    in them whoever may write a policy could take over the controller, which reads the Secrets of all namespaces.
    """

    host: ObjectName
    """Host name that clients use."""
    class_name: ObjectName | None = None
    """IngressClass; absent means the cluster's default."""
    path: PathPrefix = "/v1"
    """Prefix of the requests that are passed on, as they are. The API lies under /v1; with / clients also reach
    /metrics, /state and the page."""
    tls_secret_name: ObjectName | None = None
    """Secret of type kubernetes.io/tls in the same namespace; absent means without TLS, so that API keys travel
    in the clear unless something else encrypts them."""


class ParentRef(ApiModel):
    """A Gateway, or a listener of one."""

    name: ObjectName
    """Name of the Gateway."""
    namespace: ObjectName | None = None
    """Its namespace; absent means the policy's. The Gateway must allow routes from there."""
    section_name: ObjectName | None = None
    """Name of a listener; absent means all."""


class HTTPRouteSpec(ApiModel):
    """An HTTPRoute of the Gateway API (1.2 or newer), without a limit on how long an answer may stream."""

    parent_refs: Annotated[list[ParentRef], Field(min_length=1, max_length=16)]
    """Gateways that take the route."""
    hostnames: Annotated[list[ObjectName], Field(max_length=16)] = []
    """Host names that clients use; none means those of the Gateway."""
    path: PathPrefix = "/v1"
    """Prefix of the requests that are passed on, as they are. The API lies under /v1; with / clients also reach
    /metrics, /state and the page."""


class ClientPeer(ApiModel):
    """Who may connect to the gateway."""

    cidr: Annotated[str, StringConstraints(pattern=CIDR_PATTERN, max_length=43)] | None = None
    """Addresses, such as 10.0.0.0/8."""
    namespace_labels: Labels | None = None
    """Labels of namespaces; absent means the policy's own, {} all."""
    pod_labels: Labels | None = None
    """Labels of pods; absent or {} means all pods of these namespaces."""

    rules = (
        Rule(
            "has(self.cidr) != (has(self.namespaceLabels) || has(self.podLabels))",
            "name either cidr, or namespaceLabels, podLabels or both",
            lambda p: (p.cidr is not None) != (p.namespace_labels is not None or p.pod_labels is not None),
        ),
    )
