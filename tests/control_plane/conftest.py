"""A real kube-apiserver with the CRDs, and the operator as a process of its own.

No controllers, scheduler or kubelet run here: what they would report, the tests write into the statuses.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest
import yaml

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path[:0] = [str(HERE), str(REPOSITORY / "e2e" / "cluster")]

import audit
from control_plane import ControlPlane, temporary_control_plane
from scenes import IMAGE, Api, Manifest, PodReport, Scene, checked, eventually

from sixfold_api.crdgen import crd
from sixfold_api.kinds import KINDS
from sixfold_operator.kube import Kube

PAIR = ("operator-a", "operator-b")
"""Service accounts of two operators that share a Lease."""


def service_account(name: str) -> str:
    """As a user."""
    return f"system:serviceaccount:default:{name}"


def chart_rules() -> list[Manifest]:
    """What the chart grants to the operator."""
    templates = (REPOSITORY / "helm" / "sixfold" / "templates" / "_helpers.tpl").read_text()
    block = re.search(r'define "sixfold.rules" -}}\n(.*?){{-? end', templates, re.DOTALL)
    assert block is not None, "the chart's template sixfold.rules has moved"
    rules: list[Manifest] = yaml.safe_load(block[1])
    return rules


def lease_rules(name: str) -> list[Manifest]:
    """What the chart grants on the operator's Lease, in the release's namespace."""
    template = (REPOSITORY / "helm" / "sixfold" / "templates" / "lease.yaml").read_text()
    block = re.search(r"^rules:\n(.*?)^---", template, re.DOTALL | re.MULTILINE)
    assert block is not None, "the chart's rules of the Lease have moved"
    rules: list[Manifest] = yaml.safe_load(re.sub(r"{{.*?}}", name, block[1]))
    return rules


@pytest.fixture(scope="session")
def audit_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the operators of the fixture `make_operator` asked for."""
    return audit.log_file(tmp_path_factory.mktemp("audit"))


@pytest.fixture(scope="session")
def control_plane(audit_log: Path) -> Iterator[ControlPlane]:
    with temporary_control_plane(*audit.flags(audit_log.parent, *map(service_account, PAIR))) as running:
        os.environ["KUBECONFIG"] = str(running.kubeconfig)
        yield running


@pytest.fixture(scope="session")
def http(control_plane: ControlPlane) -> Iterator[httpx.Client]:
    """The API with both CRDs established."""
    trust = ssl.create_default_context(cafile=str(control_plane.ca_file))
    headers = {"Authorization": f"Bearer {control_plane.token}"}
    with httpx.Client(base_url=control_plane.url, headers=headers, verify=trust, trust_env=False, timeout=30) as client:
        for kind in KINDS:
            checked(client.post("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", json=crd(kind)))
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

    def role(self) -> str:
        """What /readyz says: `leader`, or `standby` and who leads; empty where nobody answers."""
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/readyz", trust_env=False, timeout=1).text
        except httpx.TransportError:
            return ""

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self.kill()


@pytest.fixture(scope="session")
def make_operator_account(
    http: httpx.Client, control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Makes service accounts with the rights that the chart gives, and nothing else; returns kubeconfigs.

    With `lease`, those on the Lease of that name in the namespace `default` too.
    """
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    checked(http.post(f"{rbac}/clusterroles", json={"metadata": {"name": "sixfold"}, "rules": chart_rules()}))

    def make(name: str, lease: str = "") -> Path:
        account = {"name": name, "namespace": "default"}
        checked(http.post("/api/v1/namespaces/default/serviceaccounts", json={"metadata": account}))
        roles = [("ClusterRole", "sixfold", f"{rbac}/clusterrolebindings")]
        if lease:
            role = {"metadata": {"name": name}, "rules": lease_rules(lease)}
            checked(http.post(f"{rbac}/namespaces/default/roles", json=role))
            roles.append(("Role", name, f"{rbac}/namespaces/default/rolebindings"))
        for kind, role_name, path in roles:
            reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role_name}
            subjects = [{"kind": "ServiceAccount", **account}]
            checked(http.post(path, json={"metadata": {"name": name}, "roleRef": reference, "subjects": subjects}))
        token = checked(http.post(f"/api/v1/namespaces/default/serviceaccounts/{name}/token", json={"spec": {}}))
        config = json.loads(control_plane.kubeconfig.read_text())
        config["users"][0]["user"] = {"token": token["status"]["token"]}
        path = tmp_path_factory.mktemp(name) / "kubeconfig"
        path.write_text(json.dumps(config))
        return path

    return make


@pytest.fixture(scope="session")
def operator_kubeconfig(make_operator_account: Callable[..., Path]) -> Path:
    return make_operator_account("sixfold-operator")


@pytest.fixture(scope="module")
def operator(operator_kubeconfig: Path) -> Iterator[OperatorProcess]:
    """The operator, running for the tests of a module that want one beside them."""
    process = OperatorProcess(operator_kubeconfig.parent / "log", operator_kubeconfig)
    process.start()
    yield process
    process.stop()
    print(process.log.read_text()[-5000:])


@pytest.fixture(scope="session")
def pair_kubeconfigs(make_operator_account: Callable[..., Path]) -> dict[str, Path]:
    """By service account, with the rights on the Lease `pair`."""
    return {name: make_operator_account(name, lease="pair") for name in PAIR}


@pytest.fixture
def start_pair(pair_kubeconfigs: dict[str, Path]) -> Iterator[Callable[..., dict[str, OperatorProcess]]]:
    """Starts two operators; kube-apiserver's audit log tells them apart."""
    made: dict[str, OperatorProcess] = {}

    def start(**environment: str) -> dict[str, OperatorProcess]:
        for name, path in pair_kubeconfigs.items():
            made[name] = OperatorProcess(path.parent / "log", path)
            made[name].start(SIXFOLD_IDENTITY=name, **environment)
        return made

    yield start
    for process in made.values():
        process.stop()
        print(process.log.read_text()[-5000:])


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
        checked(http.post("/api/v1/namespaces", json={"metadata": {"name": name}}))
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
