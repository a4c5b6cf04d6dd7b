"""spec.gateway.ingress and .httpRoute -> Ingress and HTTPRoute, which let streams through. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from sixfold_api.exposure import HTTPRouteSpec, IngressSpec
from sixfold_api.gateway import GatewaySpec
from sixfold_api.names import GATEWAY, GATEWAY_PORT, component_name
from sixfold_api.scalars import duration_seconds, quantity_value
from sixfold_operator.builders.common import Manifest, child, selector

INGRESS_KIND, ROUTE_KIND = "Ingress", "HTTPRoute"
ROUTE_API = "gateway.networking.k8s.io/v1"

MARGIN_SECONDS = 10
"""The gateway ends a request that takes too long itself, in words; whoever stands before it waits a little longer."""
MAX_ALB_IDLE_SECONDS = 4000


def ingress(policy: Manifest, gateway: GatewaySpec, spec: IngressSpec, extra: Mapping[str, str]) -> Manifest:
    """The Ingress. `extra` annotations, of the operator's settings, win over those for streaming."""
    manifest = child(policy, "networking.k8s.io/v1", INGRESS_KIND, *_name_and_labels(policy))
    manifest["metadata"]["annotations"] = streaming_annotations(gateway) | dict(extra)
    service = {"name": manifest["metadata"]["name"], "port": {"number": GATEWAY_PORT}}
    path = {"path": spec.path, "pathType": "Prefix", "backend": {"service": service}}
    manifest["spec"] = {"rules": [{"host": spec.host, "http": {"paths": [path]}}]}
    if spec.class_name is not None:
        manifest["spec"]["ingressClassName"] = spec.class_name
    if spec.tls_secret_name is not None:
        manifest["spec"]["tls"] = [{"hosts": [spec.host], "secretName": spec.tls_secret_name}]
    return manifest


def streaming_annotations(gateway: GatewaySpec) -> dict[str, str]:
    """What ingress-nginx, F5's NGINX, both HAProxy controllers, Contour and AWS's ALB must be told to pass events on at
    once, to wait for the next one, and to take large prompts. Traefik does so by itself."""
    seconds = math.ceil(duration_seconds(gateway.request_timeout)) + MARGIN_SECONDS
    body_bytes = str(math.ceil(quantity_value(gateway.max_request_size)))
    community, f5 = "nginx.ingress.kubernetes.io", "nginx.org"
    return {
        f"{community}/proxy-buffering": "off",
        f"{community}/proxy-read-timeout": str(seconds),
        f"{community}/proxy-send-timeout": str(seconds),
        f"{community}/proxy-body-size": body_bytes,
        f"{f5}/proxy-buffering": "False",
        f"{f5}/proxy-read-timeout": f"{seconds}s",
        f"{f5}/proxy-send-timeout": f"{seconds}s",
        f"{f5}/client-max-body-size": body_bytes,
        "haproxy.org/timeout-server": f"{seconds}s",
        "haproxy-ingress.github.io/timeout-server": f"{seconds}s",
        "projectcontour.io/response-timeout": "infinity",
        "alb.ingress.kubernetes.io/load-balancer-attributes": (
            f"idle_timeout.timeout_seconds={min(seconds, MAX_ALB_IDLE_SECONDS)}"
        ),
    }


def http_route(policy: Manifest, spec: HTTPRouteSpec) -> Manifest:
    """The HTTPRoute. Its timeouts are off: the gateway has its own, and answers may stream for as long as those say."""
    manifest = child(policy, ROUTE_API, ROUTE_KIND, *_name_and_labels(policy))
    manifest["spec"] = {
        "parentRefs": [reference.to_dict() for reference in spec.parent_refs],
        "rules": [
            {
                "matches": [{"path": {"type": "PathPrefix", "value": spec.path}}],
                "backendRefs": [{"name": manifest["metadata"]["name"], "port": GATEWAY_PORT}],
                "timeouts": {"request": "0s"},
            }
        ],
    }
    if spec.hostnames:
        manifest["spec"]["hostnames"] = list(spec.hostnames)
    return manifest


def _name_and_labels(policy: Manifest) -> tuple[str, dict[str, str]]:
    name = policy["metadata"]["name"]
    return component_name(name, GATEWAY), selector(name, GATEWAY)
