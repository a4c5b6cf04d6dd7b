"""A real kube-apiserver with the CRDs, the operator as a process of its own, and a plain API client.

No controllers, scheduler or kubelet run here: what they would report, the tests write into the statuses.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "e2e" / "cluster"))

from control_plane import ControlPlane, temporary_control_plane  # noqa: E402

from sixfold_api.crdgen import crd  # noqa: E402
from sixfold_api.kinds import KINDS  # noqa: E402

Manifest = dict[str, Any]
IMAGE = "registry.example/sixfold-runtime:test"
WAIT_SECONDS = 30.0

PATHS = {
    "InferencePolicy": "/apis/sixfold.dev/v1alpha1/{}/inferencepolicies",
    "ModelVariant": "/apis/sixfold.dev/v1alpha1/{}/modelvariants",
    "Deployment": "/apis/apps/v1/{}/deployments",
    "Job": "/apis/batch/v1/{}/jobs",
    "Service": "/api/v1/{}/services",
    "ConfigMap": "/api/v1/{}/configmaps",
    "Pod": "/api/v1/{}/pods",
    "PersistentVolumeClaim": "/api/v1/{}/persistentvolumeclaims",
    "Event": "/api/v1/{}/events",
}


class Api:
    """kube-apiserver as an administrator, in one namespace."""

    def __init__(self, http: httpx.Client, namespace: str) -> None:
        self.http, self.namespace = http, namespace

    def path(self, kind: str, name: str = "") -> str:
        base = PATHS[kind].format(f"namespaces/{self.namespace}")
        return f"{base}/{name}" if name else base

    def create(self, manifest: Manifest) -> Manifest:
        return _checked(self.http.post(self.path(manifest["kind"]), json=manifest))

    def get(self, kind: str, name: str) -> Manifest | None:
        answer = self.http.get(self.path(kind, name))
        return None if answer.status_code == 404 else _checked(answer)

    def list(self, kind: str) -> list[Manifest]:
        items: list[Manifest] = _checked(self.http.get(self.path(kind)))["items"]
        return items

    def patch(self, kind: str, name: str, change: Manifest, subresource: str = "") -> Manifest:
        path = self.path(kind, name) + (f"/{subresource}" if subresource else "")
        headers = {"Content-Type": "application/merge-patch+json"}
        return _checked(self.http.patch(path, content=json.dumps(change), headers=headers))

    def set_status(self, kind: str, name: str, status: Manifest) -> Manifest:
        return self.patch(kind, name, {"status": status}, "status")

    def delete(self, kind: str, name: str) -> None:
        _checked(self.http.request("DELETE", self.path(kind, name), json={"gracePeriodSeconds": 0}))

    def condition(self, kind: str, name: str, type_: str) -> Manifest:
        conditions = ((self.get(kind, name) or {}).get("status") or {}).get("conditions", [])
        return next((entry for entry in conditions if entry["type"] == type_), {"status": "", "reason": ""})


def _checked(answer: httpx.Response) -> Manifest:
    assert answer.is_success, f"{answer.request.method} {answer.request.url}: {answer.text}"
    document: Manifest = answer.json()
    return document


def eventually(what: str, check: Callable[[], Any], seconds: float = WAIT_SECONDS) -> Any:
    """Wait until `check` gives something true; returns it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := check():
            return result
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s: {what}; last: {check()!r}")


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    with temporary_control_plane() as running:
        os.environ["KUBECONFIG"] = str(running.kubeconfig)
        yield running


@pytest.fixture(scope="session")
def http(control_plane: ControlPlane) -> Iterator[httpx.Client]:
    """The API with both CRDs established."""
    trust = ssl.create_default_context(cafile=str(control_plane.ca_file))
    headers = {"Authorization": f"Bearer {control_plane.token}"}
    with httpx.Client(base_url=control_plane.url, headers=headers, verify=trust, trust_env=False, timeout=30) as client:
        for kind in KINDS:
            _checked(client.post("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", json=crd(kind)))
        for kind in KINDS:
            path = f"/apis/sixfold.dev/v1alpha1/{kind.plural}"
            eventually(f"{kind.kind} is served", lambda path=path: client.get(path).is_success)
        yield client


@pytest.fixture
def api(http: httpx.Client) -> Api:
    """A namespace of the test's own."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    _checked(http.post("/api/v1/namespaces", json={"metadata": {"name": name}}))
    return Api(http, name)


class OperatorProcess:
    """`python -m sixfold_operator.main` against the control plane."""

    def __init__(self, log: Path, **environment: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.log = log
        settings = {"SIXFOLD_RUNTIME_IMAGE": IMAGE, "SIXFOLD_METRICS_PORT": str(self.port), **environment}
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sixfold_operator.main"],
                env={**os.environ, **settings},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            try:
                return httpx.get(f"http://127.0.0.1:{self.port}/readyz", trust_env=False).is_success
            except httpx.TransportError:
                return False

        eventually("the operator is ready", ready)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self.kill()


@pytest.fixture(scope="session")
def operator(http: httpx.Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    """The operator, running for all tests that want one beside them."""
    process = OperatorProcess(tmp_path_factory.mktemp("operator") / "log")
    process.wait_ready()
    yield process
    process.stop()
    print(process.log.read_text()[-5000:])
