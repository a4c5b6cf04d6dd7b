"""A real kube-apiserver (etcd, no controllers) with the committed CRDs."""

from __future__ import annotations

import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from sixfold_api.kinds import KINDS, Kind
from sixfold_api.names import API_VERSION

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "e2e" / "cluster"))

import binaries
from control_plane import ControlPlane, temporary_control_plane


@dataclass(frozen=True)
class Answer:
    """What kube-apiserver said: the object, or the messages of the causes."""

    accepted: bool
    stored: dict[str, Any]
    causes: list[str] = field(default_factory=list)

    @property
    def spec(self) -> dict[str, Any]:
        assert self.accepted, self.causes
        return self.stored["spec"]


class Api:
    """Requests that validate strictly, as `kubectl apply` does, in one namespace."""

    def __init__(self, client: httpx.Client, namespace: str = "default") -> None:
        self.client = client
        self.namespace = namespace

    def path(self, kind: Kind, name: str = "") -> str:
        return f"/apis/{API_VERSION}/namespaces/{self.namespace}/{kind.plural}" + (f"/{name}" if name else "")

    def create(self, kind: Kind, spec: Any, name: str = "example", *, dry_run: bool = True) -> Answer:
        body = {"apiVersion": API_VERSION, "kind": kind.kind, "metadata": {"name": name}, "spec": spec}
        query = {"fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
        return self._answer(self.client.post(self.path(kind), params=query, json=body))

    def patch(self, kind: Kind, name: str, patch: dict[str, Any], subresource: str = "") -> Answer:
        path = self.path(kind, name) + (f"/{subresource}" if subresource else "")
        headers = {"Content-Type": "application/merge-patch+json"}
        return self._answer(self.client.patch(path, params={"fieldValidation": "Strict"}, json=patch, headers=headers))

    def get(self, kind: Kind, name: str) -> dict[str, Any]:
        response = self.client.get(self.path(kind, name))
        response.raise_for_status()
        return response.json()

    def delete(self, kind: Kind, name: str) -> None:
        self.client.delete(self.path(kind, name)).raise_for_status()

    @staticmethod
    def _answer(response: httpx.Response) -> Answer:
        content = response.json()
        if response.is_success:
            return Answer(True, content)
        assert response.status_code in (400, 422), content
        causes = [cause["message"] for cause in (content.get("details") or {}).get("causes", [])]
        return Answer(False, {}, causes or [content["message"]])


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    with temporary_control_plane() as control_plane:
        yield control_plane


class Kubectl:
    """kubectl with an administrator's rights (or another user's), against the test's own API server only."""

    def __init__(self, program: Path, kubeconfig: Path) -> None:
        self._command = [str(program), f"--kubeconfig={kubeconfig}", f"--cache-dir={kubeconfig.parent / 'kubectl'}"]

    def run(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._command, *arguments], input=stdin, capture_output=True, text=True, check=False, timeout=60
        )

    def __call__(self, *arguments: str, stdin: str | None = None) -> str:
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout


@pytest.fixture(scope="session")
def kubectl(control_plane: ControlPlane) -> Kubectl:
    """kubectl, with the committed CRDs established."""
    kubectl = Kubectl(binaries.ensure(control_plane_only=True) / "kubectl", control_plane.kubeconfig)
    for kind in KINDS:
        kubectl("apply", "--server-side", "-f", str(ROOT / "crds" / f"{kind.plural}.yaml"))
    names = [f"crd/{kind.plural}.sixfold.dev" for kind in KINDS]
    kubectl("wait", "--for=condition=Established", "--timeout=30s", *names)
    # Discovery and the schemas that `kubectl explain` reads follow a moment later, and kubectl caches what it sees.
    _wait(kubectl, ["api-resources", "--api-group=sixfold.dev"], [kind.short_name for kind in KINDS])
    _wait(kubectl, ["get", "--raw", "/openapi/v3"], [API_VERSION])
    return kubectl


def _wait(kubectl: Kubectl, command: list[str], words: list[str]) -> None:
    for _ in range(200):
        shown = kubectl.run(*command).stdout
        if all(word in shown for word in words):
            return
    raise AssertionError(f"kubectl {' '.join(command)} never showed {words}")


@pytest.fixture(scope="session")
def api(control_plane: ControlPlane, kubectl: Kubectl) -> Iterator[Api]:
    with httpx.Client(
        base_url=control_plane.url,
        headers={"Authorization": f"Bearer {control_plane.token}"},
        verify=ssl.create_default_context(cafile=str(control_plane.ca_file)),
        trust_env=False,
        timeout=30,
    ) as client:
        yield Api(client)
