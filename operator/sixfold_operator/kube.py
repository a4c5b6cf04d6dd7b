"""The Kubernetes API as this operator uses it: dicts in, dicts out, over the official client's async transport."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple, Self
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import load_incluster_config, load_kube_config

from sixfold_api.names import (
    API_VERSION,
    POLICY_KIND,
    POLICY_PLURAL,
    TICKET_KIND,
    TICKET_PLURAL,
    VARIANT_KIND,
    VARIANT_PLURAL,
)
from sixfold_operator import metrics

Manifest = dict[str, Any]

FIELD_MANAGER = "sixfold-operator"
REPLICAS_MANAGER = "sixfold-replicas"
"""Owns the number of pods where the spec doesn't say it, so that other changes leave it as it is."""
TIMEOUT = aiohttp.ClientTimeout(total=20, connect=5)
PAGE_ITEMS = 100
"""Of a list at a time. A Deployment as a dict takes some 50 KB, ten times its text."""

RESOURCES: dict[str, tuple[str, str]] = {
    POLICY_KIND: (API_VERSION, POLICY_PLURAL),
    VARIANT_KIND: (API_VERSION, VARIANT_PLURAL),
    TICKET_KIND: (API_VERSION, TICKET_PLURAL),
    "Deployment": ("apps/v1", "deployments"),
    "Job": ("batch/v1", "jobs"),
    "Service": ("v1", "services"),
    "ConfigMap": ("v1", "configmaps"),
    "Pod": ("v1", "pods"),
    "PodDisruptionBudget": ("policy/v1", "poddisruptionbudgets"),
    "NetworkPolicy": ("networking.k8s.io/v1", "networkpolicies"),
    "Ingress": ("networking.k8s.io/v1", "ingresses"),
    "HorizontalPodAutoscaler": ("autoscaling/v2", "horizontalpodautoscalers"),
    "ScaledObject": ("keda.sh/v1alpha1", "scaledobjects"),
    "HTTPRoute": ("gateway.networking.k8s.io/v1", "httproutes"),
    "PersistentVolumeClaim": ("v1", "persistentvolumeclaims"),
    "Event": ("v1", "events"),
    "Lease": ("coordination.k8s.io/v1", "leases"),
}
"""Kind -> apiVersion and plural of everything that is read or written."""


class Page(NamedTuple):
    """Some objects of a list, and the resource version of the whole list."""

    items: list[Manifest]
    version: int


class ApiError(Exception):
    """The API refused a request, or couldn't be reached (status 0)."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status, self.reason, self.message = status, reason, message

    @property
    def is_refusal(self) -> bool:
        """The request itself is wrong or forbidden: trying the same again won't help."""
        return self.status in (400, 403, 422)


class Kube:
    """One connection pool to kube-apiserver. Every method raises ApiError.

    Attributes:
        may_write: asked right before each write but those of a Lease; where it says no, the write is an ApiError.
    """

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self.may_write: Callable[[], bool] = lambda: True
        self._writes: set[asyncio.Task[Manifest]] = set()

    @classmethod
    async def connect(cls) -> Self:
        """As the pod's service account, or else as the kubeconfig says."""
        configuration = Configuration()
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            # The path is looked up now: the client does it once, when it is imported.
            config_file = os.environ.get("KUBECONFIG", "~/.kube/config")
            await load_kube_config(  # type: ignore[no-untyped-call]
                config_file=config_file, client_configuration=configuration
            )
        return cls(ApiClient(configuration))

    async def close(self) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """The object as it is now; None if there is none."""
        try:
            return await self._request("get", "GET", _path(kind, namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def pages(self, kind: str, namespace: str | None, selector: str = "") -> AsyncIterator[Page]:
        """All objects of a kind (in all namespaces without one), some at a time."""
        query = {"limit": str(PAGE_ITEMS), **({"labelSelector": selector} if selector else {})}
        while True:
            page = await self._request("list", "GET", _path(kind, namespace), query)
            # Items of a list carry neither kind nor apiVersion.
            items = [{"apiVersion": RESOURCES[kind][0], "kind": kind, **item} for item in page["items"]]
            yield Page(items, int(page["metadata"]["resourceVersion"]))
            if not (token := page["metadata"].get("continue")):
                return
            query["continue"] = token

    async def list(self, kind: str, namespace: str | None, selector: str = "") -> tuple[list[Manifest], int]:
        """All of them at once, and the resource version of the list."""
        found: list[Manifest] = []
        version = 0
        async for page in self.pages(kind, namespace, selector):
            found += page.items
            version = page.version
        return found, version

    async def serves(self, api_version: str) -> set[str]:
        """Kinds of a group version that the API serves; empty if the group isn't there."""
        try:
            found = await self._request("discover", "GET", f"/apis/{api_version}")
        except ApiError as error:
            if error.status == 404:
                return set()
            raise
        return {resource["kind"] for resource in found["resources"]}

    async def apply(self, manifest: Manifest, *, force: bool, manager: str = FIELD_MANAGER) -> Manifest:
        """Server-side apply. With `metadata.uid` it changes that very object or fails with 409; without `force`
        it fails with 409 where another manager owns a field."""
        metadata = manifest["metadata"]
        path = _path(manifest["kind"], metadata["namespace"], metadata["name"])
        query = {"fieldManager": manager, "force": "true" if force else "false"}
        return await self._write("apply", "PATCH", path, query, manifest, "application/apply-patch+yaml")

    async def apply_status(self, manifest: Manifest) -> Manifest:
        """Server-side apply of the status subresource; 404 if the object is gone."""
        metadata = manifest["metadata"]
        path = _path(manifest["kind"], metadata["namespace"], metadata["name"]) + "/status"
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        return await self._write("apply_status", "PATCH", path, query, manifest, "application/apply-patch+yaml")

    async def annotate(self, kind: str, namespace: str, name: str, annotations: Mapping[str, str]) -> Manifest:
        """Merge annotations into an object; 404 if it is gone."""
        patch = {"metadata": {"annotations": dict(annotations)}}
        query = {"fieldManager": FIELD_MANAGER}
        path = _path(kind, namespace, name)
        return await self._write("annotate", "PATCH", path, query, patch, "application/merge-patch+json")

    async def delete(self, manifest: Manifest) -> None:
        """Delete this very object (by uid) and, in the background, what it owns. Gone already is fine."""
        metadata = manifest["metadata"]
        options = {"propagationPolicy": "Background", "preconditions": {"uid": metadata["uid"]}}
        path = _path(manifest["kind"], metadata["namespace"], metadata["name"])
        try:
            await self._write("delete", "DELETE", path, body=options)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def create_event(self, event: Manifest) -> None:
        """Post a core/v1 Event."""
        await self._write("create_event", "POST", _path("Event", event["metadata"]["namespace"]), body=event)

    async def put(self, lease: Manifest) -> Manifest:
        """Replace a Lease of this `metadata.resourceVersion`, or create it where none is given; 409 where it is
        another one by now."""
        metadata = lease["metadata"]
        if "resourceVersion" not in metadata:
            return await self._request("put", "POST", _path("Lease", metadata["namespace"]), body=lease)
        return await self._request("put", "PUT", _path("Lease", metadata["namespace"], metadata["name"]), body=lease)

    async def settle(self) -> None:
        """Wait for the writes that are under way, whoever asked for them."""
        await asyncio.gather(*self._writes, return_exceptions=True)

    async def _write(
        self,
        verb: str,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Manifest | None = None,
        content_type: str = "application/json",
    ) -> Manifest:
        """A write that began isn't cut off with its caller: it must have ended before another operator acts."""
        task = asyncio.create_task(self._request(verb, method, path, query, body, content_type, is_write=True))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        return await asyncio.shield(task)

    async def _request(
        self,
        verb: str,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Manifest | None = None,
        content_type: str = "application/json",
        is_write: bool = False,
    ) -> Manifest:
        url = f"{path}?{urlencode(query)}" if query else path
        try:
            prepared = await self._client.param_serialize(
                method,
                url,
                header_params={"Accept": "application/json", "Content-Type": content_type},
                body=body,
                auth_settings=["BearerToken"],
            )
            if is_write and not self.may_write():
                raise ApiError(0, "NotLeading", f"{method} {path}: not sent, another operator may lead by now")
            response = await self._client.call_api(*prepared, _request_timeout=TIMEOUT)
            text = await response.read()  # type: ignore[no-untyped-call]
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            metrics.API_REQUESTS.labels(verb, "unreachable").inc()
            raise ApiError(0, "Unreachable", f"{method} {path}: {error or type(error).__name__}") from error
        metrics.API_REQUESTS.labels(verb, str(response.status)).inc()
        answer = _decoded(text)
        if response.status >= 400:
            raise ApiError(response.status, answer.get("reason", "Error"), answer.get("message", f"{method} {path}"))
        return answer


def _decoded(text: bytes) -> Manifest:
    try:
        answer = json.loads(text)
    except ValueError:
        return {"message": text[:200].decode(errors="replace")}
    return answer if isinstance(answer, dict) else {}


def _path(kind: str, namespace: str | None, name: str = "") -> str:
    api_version, plural = RESOURCES[kind]
    root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
    scope = f"/namespaces/{quote(namespace)}" if namespace else ""
    return f"{root}{scope}/{plural}" + (f"/{quote(name)}" if name else "")
