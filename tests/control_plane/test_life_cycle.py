"""What the operator leaves behind: with it gone, objects and whole namespaces can still be deleted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import binaries
import httpx
import pytest
from processes import Daemon

CHILDREN = ("Deployment", "Service", "ConfigMap", "PodDisruptionBudget", "NetworkPolicy", "Job")


@pytest.fixture
def cluster_controllers(control_plane: Any) -> Iterator[None]:
    """Those of kube-controller-manager that delete: what owners and namespaces leave."""
    program = binaries.ensure(control_plane_only=True) / "kube-controller-manager"
    flags = [f"--kubeconfig={control_plane.kubeconfig}", "--leader-elect=false"]
    controllers = (
        "namespace-controller",
        "garbage-collector-controller",
        "persistentvolumeclaim-protection-controller",
    )
    flags += [f"--controllers={','.join(controllers)}", "--secure-port=0"]
    daemon = Daemon("kube-controller-manager", control_plane.folder)
    daemon.start([program, *flags], die_with_parent=True)
    yield
    daemon.stop()


def leftovers(scene: Any) -> list[str]:
    """Children in the scene's namespace, but for what isn't ours."""
    found = [f"{kind}/{item['metadata']['name']}" for kind in CHILDREN for item in scene.api.list(kind)]
    return [name for name in found if name != "ConfigMap/kube-root-ca.crt"]


def test_without_the_operator_policies_and_namespaces_can_be_deleted(
    make_scene: Any, operator: Any, cluster_controllers: None, http: httpx.Client
) -> None:
    scene, other = make_scene(), make_scene()
    for each in (scene, other):
        each.ready_policy()
    operator.kill()
    assert len(leftovers(scene)) > 5
    for kind in (*CHILDREN, "InferencePolicy", "ModelVariant"):
        for item in scene.api.list(kind):
            assert not item["metadata"].get("finalizers"), item["metadata"]
    scene.api.delete("InferencePolicy", "bot")
    scene.api.delete("ModelVariant", "chat")
    path = f"/api/v1/namespaces/{other.api.namespace}"
    http.delete(path).raise_for_status()
    scene.eventually("what the policy and the variant owned has gone", lambda: leftovers(scene) == [])
    scene.eventually("the namespace has gone", lambda: http.get(path).status_code == 404)
