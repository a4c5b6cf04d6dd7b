"""A real kube-apiserver with the CRDs, the operator as a process of its own, and a plain API client.

No controllers, scheduler or kubelet run here: what they would report, the tests write into the statuses.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "e2e" / "cluster"))

from control_plane import ControlPlane, temporary_control_plane

from sixfold_api.crdgen import crd
from sixfold_api.kinds import KINDS
from sixfold_api.runtime_config import PodState
from sixfold_api.variant import PERMANENT_FAILURE_EXIT_CODE
from sixfold_operator.kube import Kube

Manifest = dict[str, Any]
IMAGE = "registry.example/sixfold-runtime:test"
WAIT_SECONDS = 30.0
NOW = "2030-01-01T00:00:00Z"

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


def chart_rules() -> list[Manifest]:
    """What the chart grants to the operator."""
    templates = (REPOSITORY / "helm" / "sixfold" / "templates" / "_helpers.tpl").read_text()
    block = re.search(r'define "sixfold.rules" -}}\n(.*?){{-? end', templates, re.DOTALL)
    assert block is not None, "the chart's template sixfold.rules has moved"
    rules: list[Manifest] = yaml.safe_load(block[1])
    return rules


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
        _checked(
            self.http.request(
                "DELETE", self.path(kind, name), json={"gracePeriodSeconds": 0, "propagationPolicy": "Background"}
            )
        )

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


class OperatorProcess:
    """`python -m sixfold_operator.main` against the control plane, with the rights of a service account."""

    def __init__(self, log: Path, kubeconfig: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.log, self.kubeconfig = log, kubeconfig
        self.start()

    def start(self, **environment: str) -> None:
        """Start the process and wait until it watches."""
        settings = {"SIXFOLD_RUNTIME_IMAGE": IMAGE, "SIXFOLD_METRICS_PORT": str(self.port), **environment}
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sixfold_operator.main"],
                env={**os.environ, "KUBECONFIG": str(self.kubeconfig), **settings},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._wait_ready()

    def _wait_ready(self) -> None:
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
def operator_kubeconfig(
    http: httpx.Client, control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A service account with the rights that the chart gives, and nothing else."""
    account = {"name": "sixfold-operator", "namespace": "default"}
    _checked(http.post("/api/v1/namespaces/default/serviceaccounts", json={"metadata": account}))
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    _checked(http.post(f"{rbac}/clusterroles", json={"metadata": {"name": "sixfold"}, "rules": chart_rules()}))
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "sixfold"}
    binding = {"metadata": {"name": "sixfold"}, "roleRef": role, "subjects": [{"kind": "ServiceAccount", **account}]}
    _checked(http.post(f"{rbac}/clusterrolebindings", json=binding))
    token = _checked(http.post("/api/v1/namespaces/default/serviceaccounts/sixfold-operator/token", json={"spec": {}}))
    config = json.loads(control_plane.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token["status"]["token"]}
    path = tmp_path_factory.mktemp("operator") / "kubeconfig"
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def operator(operator_kubeconfig: Path) -> Iterator[OperatorProcess]:
    """The operator, running for the tests of a module that want one beside them."""
    process = OperatorProcess(operator_kubeconfig.parent / "log", operator_kubeconfig)
    yield process
    process.stop()
    print(process.log.read_text()[-5000:])


class Scene:
    """A namespace with what users create, and the reports of the controllers that don't run here."""

    FACTS = {
        "digest": "sha256:" + "a" * 64,
        "sizeBytes": 7_450_000,
        "parameters": 3_680_000,
        "architecture": "LlamaForCausalLM",
        "dtype": "bfloat16",
        "contextTokens": 4096,
        "vocabularyTokens": 1024,
        "tokenizerFingerprint": "sha256:" + "b" * 64,
    }
    RUNNING = {
        "phase": "Running",
        "podIP": "127.0.0.1",
        "podIPs": [{"ip": "127.0.0.1"}],
        "conditions": [{"type": "Ready", "status": "True"}, {"type": "PodScheduled", "status": "True"}],
    }

    eventually = staticmethod(eventually)

    def __init__(self, api: Api) -> None:
        self.api = api

    def claim(self, name: str = "models") -> None:
        spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
        self.api.create({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec})

    def variant(self, name: str = "chat", task: str = "Generation", **spec: Any) -> None:
        spec = {"task": task, "source": {"uri": f"pvc://models/{name}"}, **spec}
        self.api.create(_ours("ModelVariant", name, spec))

    def policy(self, name: str = "bot", **spec: Any) -> None:
        spec = {"generation": {"variantRef": {"name": "chat"}}, "engine": {"accelerator": {"type": "CPU"}}, **spec}
        self.api.create(_ours("InferencePolicy", name, spec))

    def job(self, variant: str = "chat") -> Manifest:
        """The variant's Job, once it is there."""

        def jobs() -> list[Manifest]:
            found = self.api.list("Job")
            return [job for job in found if job["metadata"]["labels"]["sixfold.dev/variant"] == variant]

        first: Manifest = eventually(f"{variant} has a Job", jobs)[0]
        return first

    def finish_job(self, variant: str = "chat", summary: Manifest | None = None, ok: bool = True) -> Manifest:
        """What Job controller and kubelet report when the Job's pod ends, `summary` being its termination message.

        A failure with a summary is one that another try wouldn't heal, one without is a pod that never got so far.
        """
        job = self.job(variant)
        if summary is not None:
            self.job_pod(job, summary, 0 if ok else PERMANENT_FAILURE_EXIT_CODE)
        now = {"lastTransitionTime": NOW, "lastProbeTime": NOW}
        if ok:
            conditions = [{"type": type_, "status": "True", **now} for type_ in ("SuccessCriteriaMet", "Complete")]
            status = {"startTime": NOW, "completionTime": NOW, "succeeded": 1, "conditions": conditions}
        else:
            reason = {"reason": "BackoffLimitExceeded", "message": "Job has reached the specified backoff limit"}
            if summary is not None:
                reason = {"reason": "PodFailurePolicy", "message": "Container prepare failed with exit code 2"}
            conditions = [{"type": type_, "status": "True", **now, **reason} for type_ in ("FailureTarget", "Failed")]
            status = {"startTime": NOW, "failed": 3 if summary is None else 1, "conditions": conditions}
        self.api.set_status("Job", job["metadata"]["name"], status)
        return job

    def job_pod(self, job: Manifest, summary: Manifest, exit_code: int) -> None:
        name = f"{job['metadata']['name']}-{uuid.uuid4().hex[:5]}"
        self.api.create(_pod(job, "batch/v1", "Job", name))
        ended = {"exitCode": exit_code, "finishedAt": NOW, "startedAt": NOW, "message": json.dumps(summary)}
        self.api.set_status(
            "Pod",
            name,
            {
                "phase": "Failed" if exit_code else "Succeeded",
                "containerStatuses": [_container("prepare", {"terminated": {**ended, "reason": "Completed"}})],
            },
        )

    def replace_deleted(self, kind: str, name: str) -> None:
        """Delete a child and wait for another of that name."""
        uid = (self.api.get(kind, name) or {})["metadata"]["uid"]
        self.api.delete(kind, name)

        def is_back() -> bool:
            live = self.api.get(kind, name)
            return live is not None and live["metadata"]["uid"] != uid

        eventually(f"{kind} {name} is back", is_back)

    def pod(self, deployment: str, name: str, status: Manifest) -> None:
        """A pod of a Deployment, as its ReplicaSet would make it (the ReplicaSet is left out)."""
        owner = eventually(f"{deployment} exists", lambda: self.api.get("Deployment", deployment))
        self.api.create(_pod(owner, "apps/v1", "Deployment", name))
        self.api.set_status("Pod", name, status)

    def deployment_ready(self, name: str) -> None:
        live = eventually(f"{name} exists", lambda: self.api.get("Deployment", name))
        replicas = live["spec"]["replicas"]
        counts = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
        generation = {"observedGeneration": live["metadata"]["generation"]}
        self.api.set_status("Deployment", name, {**generation, **dict.fromkeys(counts, replicas)})

    def ready_policy(self) -> None:
        """A policy `bot` whose Deployments are all ready."""
        self.claim()
        self.variant()
        self.policy()
        self.finish_job(summary={"facts": self.FACTS})
        for part in ("engine", "gateway"):
            self.deployment_ready(f"bot-{part}")
        self.wait("InferencePolicy", "bot", "Ready", "True")

    def sequence(self, level: int) -> int:
        """Sequence of the configuration of `bot`, once it says that level."""

        def written() -> int:
            config = json.loads((self.api.get("ConfigMap", "bot-runtime") or {})["data"]["config.json"])
            number: int = config["sequence"]
            return number if config["stable"]["level"] == level else 0

        result: int = eventually(f"the ConfigMap says level {level}", written)
        return result

    def wait_generation(self, kind: str, name: str) -> int:
        """Until the status describes the newest spec."""

        def seen() -> int:
            live = self.api.get(kind, name)
            newest: int = live["metadata"]["generation"]
            return newest if live["status"]["observedGeneration"] == newest else 0

        result: int = eventually(f"{name} is observed", seen)
        return result

    def wait(self, kind: str, name: str, type_: str, status: str, reason: str | None = None) -> Manifest:
        def reached() -> Manifest | None:
            seen = self.api.condition(kind, name, type_)
            return seen if seen["status"] == status and reason in (None, seen["reason"]) else None

        try:
            result: Manifest = eventually(f"{kind} {name} has {type_}={status} {reason or ''}", reached)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{json.dumps(self.api.get(kind, name), indent=1)}") from None
        return result


def _ours(kind: str, name: str, spec: Manifest) -> Manifest:
    return {"apiVersion": "sixfold.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def _pod(owner: Manifest, api_version: str, kind: str, name: str) -> Manifest:
    """A pod from the owner's template."""
    template = owner["spec"]["template"]
    reference = {"apiVersion": api_version, "kind": kind, "controller": True}
    reference |= {key: owner["metadata"][key] for key in ("name", "uid")}
    metadata = {"name": name, "labels": template["metadata"]["labels"], "ownerReferences": [reference]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def _container(name: str, state: Manifest, ready: bool = False) -> Manifest:
    return {"name": name, "image": IMAGE, "imageID": "", "ready": ready, "restartCount": 0, "state": state}


class PodReport:
    """What a pod of the runtime answers on /state, on a loopback address of its own."""

    _addresses = itertools.count(2)

    def __init__(self, port: int) -> None:
        self.address = f"127.44.0.{next(self._addresses)}"
        self._body = b""
        report = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path == "/state" else 404)
                self.send_header("Content-Length", str(len(report._body)))
                self.end_headers()
                self.wfile.write(report._body)

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer((self.address, port), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def say(self, **fields: Any) -> None:
        self._body = json.dumps(PodState(role="engine", pod=self.address, ready=True, **fields).to_dict()).encode()


@pytest.fixture
def pod_reports() -> Iterator[Callable[[int], PodReport]]:
    made: list[PodReport] = []

    def make(port: int) -> PodReport:
        made.append(PodReport(port))
        return made[-1]

    yield make
    for report in made:
        report.server.shutdown()
        report.server.server_close()


@pytest.fixture
def make_scene(http: httpx.Client) -> Callable[[], Scene]:
    """Makes scenes, each in a namespace of its own."""

    def make() -> Scene:
        name = f"test-{uuid.uuid4().hex[:8]}"
        _checked(http.post("/api/v1/namespaces", json={"metadata": {"name": name}}))
        return Scene(Api(http, name))

    return make


@pytest.fixture
def scene(make_scene: Callable[[], Scene]) -> Scene:
    return make_scene()


@pytest.fixture
async def kube(control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kube]:
    monkeypatch.setenv("KUBECONFIG", str(control_plane.kubeconfig))
    """A connection of the operator's own API layer, as an administrator."""
    connection = await Kube.connect()
    yield connection
    await connection.close()
