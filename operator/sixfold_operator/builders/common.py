"""What all children share: labels, owner, the hash of what was asked for, and the shape of their pods. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sixfold_api.names import CLAIMS_DIRECTORY, COMPONENT_LABEL, GROUP, POLICY_LABEL
from sixfold_api.pods import PodSettings
from sixfold_operator.settings import OperatorSettings

Manifest = dict[str, Any]

MANAGED_BY_LABEL, MANAGED_BY = "app.kubernetes.io/managed-by", "sixfold-operator"
SPEC_HASH_ANNOTATION = f"{GROUP}/spec-hash"
"""Hash of the manifest that was applied: tells that a field which is no longer asked for has to go."""

USER_ID = 65532


def digest(value: Any, digits: int = 16) -> str:
    """Short hash of a JSON value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def child(owner: Manifest, api_version: str, kind: str, name: str, labels: Mapping[str, str]) -> Manifest:
    """A manifest without a body, owned by `owner` (its controller) and in its namespace."""
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
    }
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": owner["metadata"]["namespace"],
            "labels": {MANAGED_BY_LABEL: MANAGED_BY, **labels},
            "ownerReferences": [reference],
        },
    }


def with_hash(manifest: Manifest) -> Manifest:
    """The manifest with the hash of itself as an annotation."""
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), SPEC_HASH_ANNOTATION: digest(manifest)}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def selector(policy: str, component: str) -> dict[str, str]:
    """Labels that select the pods of a component. They never change: a Deployment's selector can't."""
    return {POLICY_LABEL: policy, COMPONENT_LABEL: component}


def field_env(name: str, path: str) -> Manifest:
    """An environment variable from a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


@dataclass(frozen=True)
class Mount:
    """A volume and where it appears in the main container."""

    name: str
    source: Mapping[str, Any]
    path: str
    read_only: bool = True


def claim_mounts(claims: Iterable[str], *, read_only: bool = True) -> list[Mount]:
    """Each claim at /claims/<claim>. Read-only is the mount, not the volume: a claim that one node may mount
    can then be shared with a pod that writes."""
    return [
        Mount(
            f"claim-{digest(claim, 8)}",
            {"persistentVolumeClaim": {"claimName": claim}},
            f"{CLAIMS_DIRECTORY}/{claim}",
            read_only,
        )
        for claim in sorted(set(claims))
    ]


def container(settings: OperatorSettings, name: str, pod: PodSettings, mounts: Iterable[Mount]) -> Manifest:
    """The main container, restricted: no root, no capabilities, nothing writable but /tmp."""
    result: Manifest = {
        "name": name,
        "image": settings.runtime_image,
        "imagePullPolicy": settings.runtime_image_pull_policy,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}] + [_volume_mount(mount) for mount in mounts],
    }
    if pod.resources is not None:
        result["resources"] = pod.resources.to_dict()
    return result


def pod_spec(main: Manifest, pod: PodSettings, mounts: Iterable[Mount]) -> Manifest:
    """A pod around its main container, without an API token, placed as the user asked."""
    result: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [main],
        "volumes": [{"name": "tmp", "emptyDir": {}}] + [{"name": mount.name, **mount.source} for mount in mounts],
    }
    settings = pod.to_dict()
    settings.pop("resources", None)
    result.update(settings)
    return result


def _volume_mount(mount: Mount) -> Manifest:
    return {"name": mount.name, "mountPath": mount.path} | ({"readOnly": True} if mount.read_only else {})


def http_probe(path: str, port: int, period_seconds: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period_seconds,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
