"""A claim `models` with model folders in it, in any namespace of the cluster in use."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from console import HarnessError, step
from paths import IMAGES_FILE, MODELS
from target import Target

CLAIM = "models"
SIZE = "20Gi"
HELPER = "sixfold-models-filler"


def ensure(target: Target, namespace: str, folders: Sequence[Path]) -> None:
    """Create the namespace if need be, and a bound claim `models` that holds a copy of each folder by its name.

    On the embedded node the claim is bound to a folder of its own on this machine; elsewhere to the default
    StorageClass, and filled through a pod. Raises HarnessError for a folder that is not there.
    """
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing:
        raise HarnessError(f"no such model folder: {', '.join(missing)}")
    namespace_object: dict[str, object] = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    if target.kind == "embedded":
        with step(f"claim {CLAIM} in {namespace}"):
            _fill(MODELS / namespace, folders)
            _delete_if_released(target, f"pv/{_volume_name(namespace)}")
            _apply(target, [namespace_object, _host_volume(namespace), _claim(namespace, static=True)])
            bound = "--for=jsonpath={.status.phase}=Bound"
            target.kubectl("-n", namespace, "wait", bound, "--timeout=60s", f"pvc/{CLAIM}")
        return
    with step(f"claim {CLAIM} in {namespace}"):
        _apply(target, [namespace_object, _claim(namespace, static=False), _filler(namespace)])
        try:
            _fill_through_pod(target, namespace, folders)
        finally:
            target.kubectl("-n", namespace, "delete", f"pod/{HELPER}", "--now")


def remove(target: Target, namespace: str) -> None:
    """Remove what `ensure` left on this machine for a namespace that is being deleted; elsewhere the claim's class
    does."""
    if target.kind == "embedded":
        target.kubectl("delete", f"pv/{_volume_name(namespace)}", "--ignore-not-found", "--wait=false")
        shutil.rmtree(MODELS / namespace, ignore_errors=True)


def _fill_through_pod(target: Target, namespace: str, folders: Sequence[Path]) -> None:
    try:
        target.kubectl("-n", namespace, "wait", "--for=condition=Ready", "--timeout=300s", f"pod/{HELPER}")
    except HarnessError:
        events = target.kubectl("-n", namespace, "get", "events")
        raise HarnessError(
            f"the claim or its pod did not come up (is there a default StorageClass?):\n{events}"
        ) from None
    for folder in folders:
        target.kubectl("-n", namespace, "cp", "--no-preserve", str(folder), f"{HELPER}:/models/{folder.name}")


def _apply(target: Target, items: list[dict[str, object]]) -> None:
    document = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    target.kubectl("apply", "--server-side", "--filename", "-", stdin=document)


def _fill(volume: Path, folders: Sequence[Path]) -> None:
    """Copy the folders into `volume`; pods, which do not run as root, may read all and write beside it."""
    volume.mkdir(parents=True, exist_ok=True)
    for folder in folders:
        shutil.rmtree(volume / folder.name, ignore_errors=True)
        shutil.copytree(folder, volume / folder.name)
    for path in [volume, *volume.rglob("*")]:
        path.chmod(0o777 if path.is_dir() else 0o644)


def _delete_if_released(target: Target, volume: str) -> None:
    """A volume whose claim went with its namespace takes no new claim: make room for a fresh one."""
    phase = target.kubectl("get", volume, "--ignore-not-found", "--output=jsonpath={.status.phase}")
    if phase == "Released":
        target.kubectl("delete", volume)


def _volume_name(namespace: str) -> str:
    return f"sixfold-{CLAIM}-{namespace}"


def _host_volume(namespace: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": _volume_name(namespace), "labels": {"app.kubernetes.io/name": "sixfold-models"}},
        "spec": {
            "capacity": {"storage": SIZE},
            "accessModes": ["ReadWriteMany", "ReadOnlyMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            "claimRef": {"namespace": namespace, "name": CLAIM},
            "hostPath": {"path": str(MODELS / namespace), "type": "Directory"},
        },
    }


def _claim(namespace: str, static: bool) -> dict[str, object]:
    spec: dict[str, object] = {
        "accessModes": ["ReadWriteMany" if static else "ReadWriteOnce"],
        "resources": {"requests": {"storage": SIZE}},
    }
    if static:
        spec |= {"storageClassName": "", "volumeName": _volume_name(namespace)}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": CLAIM, "namespace": namespace},
        "spec": spec,
    }


def _filler(namespace: str) -> dict[str, object]:
    """A pod of the runtime image that waits with the claim mounted: `kubectl cp` needs its tar."""
    if not IMAGES_FILE.exists():
        raise HarnessError("the models are copied through a pod of the runtime image: run `cluster.py images` first")
    container = {
        "name": "filler",
        "image": json.loads(IMAGES_FILE.read_text())["runtime"],
        "command": ["sleep", "3600"],
        "volumeMounts": [{"name": CLAIM, "mountPath": "/models"}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": HELPER, "namespace": namespace},
        "spec": {
            "securityContext": {
                "runAsNonRoot": True,
                "fsGroup": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
            "volumes": [{"name": CLAIM, "persistentVolumeClaim": {"claimName": CLAIM}}],
        },
    }
