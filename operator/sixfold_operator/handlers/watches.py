"""Watch events of both kinds and of their children go to the controller, and nothing else happens here."""

from __future__ import annotations

from typing import Any

import kopf

from sixfold_api.names import GROUP, POLICY_PLURAL, TICKET_PLURAL, VARIANT_PLURAL, VERSION


@kopf.on.event(GROUP, VERSION, POLICY_PLURAL)
@kopf.on.event(GROUP, VERSION, VARIANT_PLURAL)
@kopf.on.event(GROUP, VERSION, TICKET_PLURAL)
@kopf.on.event("", "v1", "pods")
@kopf.on.event("", "v1", "services")
@kopf.on.event("", "v1", "configmaps")
@kopf.on.event("apps", "v1", "deployments")
@kopf.on.event("batch", "v1", "jobs")
@kopf.on.event("policy", "v1", "poddisruptionbudgets")
@kopf.on.event("networking.k8s.io", "v1", "networkpolicies")
@kopf.on.event("networking.k8s.io", "v1", "ingresses")
async def observe(event: kopf.RawEvent, resource: kopf.Resource, memo: kopf.Memo, **_: Any) -> None:
    """Which children are watched is narrowed by label in `process.configure`, at the API's side."""
    memo.controller.observe(event["type"], {**event["object"], "kind": resource.kind})
