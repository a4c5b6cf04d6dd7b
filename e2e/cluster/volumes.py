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

    On the embedded node the claim is bound to a folder of this machine; elsewhere to the default StorageClass,
    and filled through a pod. Raises HarnessError for a folder that is not there.
    """
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing:
        raise HarnessError(f"no such model folder: {', '.join(missing)}")
    namespace_object: dict[str, object] = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    if target.kind == "embedded":
        with step(f"claim {CLAIM} in {namespace}"):
            for folder in folders:
                _copy(folder, MODELS / folder.name)
            _apply(target, [namespace_object, _host_volume(namespace), _claim(namespace, static=True)])
        return
    with step(f"claim {CLAIM} in {namespace}"):
        _apply(target, [namespace_object, _claim(namespace, static=False), _filler(namespace)])
        pod = f"pod/{HELPER}"
        target.kubectl("-n", namespace, "wait", "--for=condition=Ready", "--timeout=300s", pod)
        for folder in folders:
            target.kubectl("-n", namespace, "cp", str(folder), f"{HELPER}:/models/{folder.name}")
        target.kubectl("-n", namespace, "delete", pod, "--now")


def _apply(target: Target, items: list[dict[str, object]]) -> None:
    document = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    target.kubectl("apply", "--server-side", "--filename", "-", stdin=document)


def _copy(source: Path, destination: Path) -> None:
    """Make `destination` what `source` is, readable by the pods' user."""
    if destination.exists():
        shutil.rmtree(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, destination)
    MODELS.chmod(0o777)  # artifacts are written here by pods that do not run as root
    for path in [destination, *destination.rglob("*")]:
        if path.is_dir():
            path.chmod(0o777)


def _host_volume(namespace: str) -> dict[str, object]:
    name = f"sixfold-{CLAIM}-{namespace}"
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "sixfold-models"}},
        "spec": {
            "capacity": {"storage": SIZE},
            "accessModes": ["ReadWriteMany", "ReadOnlyMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            "claimRef": {"namespace": namespace, "name": CLAIM},
            "hostPath": {"path": str(MODELS), "type": "Directory"},
        },
    }


def _claim(namespace: str, static: bool) -> dict[str, object]:
    spec: dict[str, object] = {
        "accessModes": ["ReadWriteMany" if static else "ReadWriteOnce"],
        "resources": {"requests": {"storage": SIZE}},
    }
    if static:
        spec |= {"storageClassName": "", "volumeName": f"sixfold-{CLAIM}-{namespace}"}
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
