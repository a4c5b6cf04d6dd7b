"""Brings the whole product up in the cluster at hand, and speaks to it. The demo and the journeys share it.

Which cluster: see `cluster/`. Everything a person would type goes through kubectl and helm, as they would type it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TextIO

REPOSITORY = Path(__file__).resolve().parent.parent
CLUSTER_TOOL = REPOSITORY / "e2e" / "cluster" / "cluster.py"
TEXTS = REPOSITORY / "examples" / "models" / "text"
SYSTEM_NAMESPACE = "sixfold-system"
JOURNEY_KEY = "journey-key-1"
"""The API key of the journeys' only tenant."""
sys.path.insert(0, str(REPOSITORY / "e2e" / "cluster"))

import binaries
import target
from console import HarnessError, step
from paths import IMAGES_FILE

Document = dict[str, Any]
IMAGE_VALUES = {
    "operator": "image.operator",
    "runtime": "image.runtime",
    "redis": "redis.image",
    "prometheus": "prometheus.image",
}
"""Image -> where the chart's values name it."""
PUBLIC_IMAGES = {"alertmanager": "prom/alertmanager:v0.28.1"}


class CommandError(Exception):
    """A command that a person would have typed failed; the message is what it printed."""


@dataclass(frozen=True)
class Cluster:
    """A running cluster: the environment in which kubectl and helm reach it."""

    environment: dict[str, str]

    def run(self, *command: str, stdin: str | None = None, timeout_seconds: float = 300) -> str:
        """Run a command and return its standard output; CommandError with its standard error if it fails."""
        done = subprocess.run(
            command, input=stdin, env=self.environment, capture_output=True, text=True, timeout=timeout_seconds
        )
        if done.returncode != 0:
            raise CommandError(f"{' '.join(command)}\n{done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self.run("kubectl", *arguments, stdin=stdin)

    def apply(self, namespace: str, *documents: Document) -> str:
        listing = {"apiVersion": "v1", "kind": "List", "items": list(documents)}
        return self.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(listing))

    def get(self, namespace: str, kind: str, name: str) -> Document | None:
        """The object, or None if there is none."""
        text = self.kubectl("get", "-n", namespace, kind, name, "-o", "json", "--ignore-not-found")
        return json.loads(text) if text.strip() else None

    def list(self, namespace: str, kind: str, selector: str = "") -> list[Document]:
        arguments = ["-l", selector] if selector else []
        items: list[Document] = json.loads(self.kubectl("get", "-n", namespace, kind, "-o", "json", *arguments))[
            "items"
        ]
        return items

    def patch(self, namespace: str, kind: str, name: str, patch: Document) -> None:
        self.kubectl("patch", "-n", namespace, kind, name, "--type=merge", "-p", json.dumps(patch))

    @contextmanager
    def reach(self, namespace: str, service: str, port: int) -> Iterator[str]:
        """A base URL that leads to a Service while it lasts.

        Where this machine is the cluster's node, that is the Service's own address, as other pods see it. Elsewhere it
        is `kubectl port-forward`, which follows one of the pods and ends with it.
        """
        found = self.get(namespace, "service", service)
        if target.in_use().kind == "embedded" and found is not None:
            address = found["spec"]["clusterIP"]
            os.environ["no_proxy"] = f"{os.environ.get('no_proxy', os.environ.get('NO_PROXY', ''))},{address}"
            # A pod that is ready isn't reached before the node's rules say so.
            wait_until(f"{service}:{port} is reached", lambda: _accepts(address, port), 30, 0.1)
            yield f"http://{address}:{port}"
            return
        with self.port_forward(namespace, f"svc/{service}", port) as url:
            yield url

    @contextmanager
    def port_forward(self, namespace: str, resource: str, port: int) -> Iterator[str]:
        """A base URL on the loopback address that leads to `resource` (svc/NAME or pod/NAME) while it lasts."""
        with tempfile.TemporaryFile("w+") as log:  # a pipe nobody reads would fill up: one line a connection
            process = subprocess.Popen(
                ["kubectl", "port-forward", "-n", namespace, resource, f":{port}"],
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                yield f"http://{_forwarded_address(process, log, resource)}"
            finally:
                process.terminate()
                process.wait()


def _accepts(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def _forwarded_address(process: subprocess.Popen[bytes], log: TextIO, resource: str) -> str:
    """host:port that `kubectl port-forward` chose, once it says so."""
    for _ in range(200):
        log.seek(0)
        said = log.read()
        if found := re.search(r"127\.0\.0\.1:\d+", said):
            return found[0]
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise CommandError(f"kubectl port-forward {resource}: {said.strip() or 'no answer'}")


def connect() -> Cluster:
    """The cluster that is up. Raises CommandError where none is, or where its programs can't be had."""
    path = os.environ["PATH"]
    try:
        kubeconfig = str(target.in_use().kubeconfig)
        if not (shutil.which("kubectl") and shutil.which("helm")):
            path = f"{path}:{binaries.ensure()}"
    except HarnessError as problem:
        raise CommandError(str(problem)) from problem
    return Cluster({**os.environ, "KUBECONFIG": kubeconfig, "PATH": path})


def bring_up(*namespaces: str) -> Cluster:
    """Models, cluster, images, operator, a Prometheus, and a Redis for policies in these namespaces.

    Idempotent; each step prints what it does and how long it took.
    """
    model_folders()
    for verb in ("up", "images"):
        subprocess.run([sys.executable, str(CLUSTER_TOOL), verb], check=True, stdout=sys.stderr)
    cluster = connect()
    for name in namespaces:
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(namespace))
    install_operator(cluster, *namespaces)
    return cluster


@cache
def model_folders() -> dict[str, Path]:
    """Folders of the example models by name, built where they aren't there yet, and of the texts to prepare them on."""
    builder = [sys.executable, str(REPOSITORY / "e2e" / "models" / "build.py")]
    printed = subprocess.run(builder, check=True, stdout=subprocess.PIPE, text=True).stdout
    folders: dict[str, str] = json.loads(printed.splitlines()[-1])
    return {name: Path(folder) for name, folder in folders.items()} | {"text": TEXTS}


def built_images() -> dict[str, str]:
    """Name and tag of each image that was built last, by what it is of."""
    images: dict[str, str] = json.loads(IMAGES_FILE.read_text())
    return images


def image_of(part: str) -> str:
    """The image of a part that the chart doesn't bring; the public one where it wasn't built here."""
    built = built_images()
    return built[part] if part in built else PUBLIC_IMAGES[part]


def install_operator(cluster: Cluster, *namespaces: str) -> str:
    """`helm upgrade --install` of the chart with the images that were built last; returns helm's output.

    Its Redis is there for policies in `namespaces`; its Prometheus scrapes every second.
    """
    images = built_images()
    arguments = ["--set", "redis.enabled=true", "--set", f"redis.urlSecret.namespaces={{{','.join(namespaces)}}}"]
    arguments += ["-f", str(REPOSITORY / "e2e" / "monitoring.yaml")]
    for name, where in IMAGE_VALUES.items():
        if name in images:
            repository, _, tag = images[name].rpartition(":")
            arguments += ["--set-string", f"{where}.repository={repository},{where}.tag={tag}"]
    with step("installing the operator with Helm"):
        return _helm_install(cluster, *arguments)


def _helm_install(cluster: Cluster, *arguments: str) -> str:
    chart = str(REPOSITORY / "helm" / "sixfold")
    place = ("--namespace", SYSTEM_NAMESPACE, "--create-namespace", "--wait", "--timeout", "3m")
    try:
        return cluster.run("helm", "upgrade", "--install", "sixfold", chart, *place, *arguments)
    except CommandError as problem:
        where = ("-n", SYSTEM_NAMESPACE)
        pods = cluster.kubectl("get", "pods", *where)
        log = cluster.kubectl("logs", *where, "-l", "app.kubernetes.io/name=sixfold", "--tail=15")
        raise CommandError(f"{problem}\n{pods}\n{log}") from problem


def fill_models_claim(namespace: str, folders: dict[str, Path]) -> None:
    """A claim `models` in the namespace that holds each folder under its name."""
    sources = [argument for folder in folders.values() for argument in ("--from", str(folder))]
    subprocess.run(
        [sys.executable, str(CLUSTER_TOOL), "models-volume", "--namespace", namespace, *sources],
        check=True,
        stdout=sys.stderr,
    )


def forget_models(namespace: str) -> None:
    """Remove what `fill_models_claim` left on this machine for a namespace that is being deleted."""
    subprocess.run([sys.executable, str(CLUSTER_TOOL), "forget-models", "--namespace", namespace], check=True)


def condition(document: Document | None, type_: str) -> Document:
    """A condition of an object; one with status Absent where there is none."""
    conditions = ((document or {}).get("status") or {}).get("conditions") or []
    return next((c for c in conditions if c["type"] == type_), {"status": "Absent", "reason": "", "message": ""})


def pods(cluster: Cluster, namespace: str, component: str) -> list[str]:
    """Names of the pods of a component of the policy `assistant`."""
    found = cluster.list(namespace, "pods", f"sixfold.dev/policy=assistant,sixfold.dev/component={component}")
    return [pod["metadata"]["name"] for pod in found]


def pod_metrics(cluster: Cluster, namespace: str, component: str) -> str:
    """What the only pod of an engine component of the policy `assistant` exports."""
    (pod,) = pods(cluster, namespace, component)
    return cluster.kubectl("get", "--raw", f"/api/v1/namespaces/{namespace}/pods/{pod}:8001/proxy/metrics")


def wait_until(what: str, check: Callable[[], Any], timeout_seconds: float = 180, interval_seconds: float = 0.5) -> Any:
    """Poll until `check` answers something true and return it; on a timeout the last answer is in the error."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        answer = check()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_seconds:.0f} s; last seen: {answer!r}")
        time.sleep(interval_seconds)


def is_ready(cluster: Cluster, namespace: str, policy: str) -> bool:
    """Whether the policy is Ready for its present generation, with the image that was installed last: an operator that
    has just been upgraded may not have looked at it yet."""
    document = cluster.get(namespace, "ipol", policy)
    seen = condition(document, "Ready")
    if document is None or seen["status"] != "True":
        return False
    images = {
        container["image"]
        for deployment in cluster.list(namespace, "deployments", f"sixfold.dev/policy={policy}")
        for container in deployment["spec"]["template"]["spec"]["containers"]
    }
    return seen.get("observedGeneration") == document["metadata"]["generation"] and images == {image_of("runtime")}


def wait_ready(cluster: Cluster, namespace: str, policy: str, timeout_seconds: float = 900) -> None:
    """Wait until the policy is_ready."""

    def ready() -> bool:
        return is_ready(cluster, namespace, policy)

    try:
        wait_until(f"{policy} is Ready", ready, timeout_seconds)
    except TimeoutError as problem:
        status = (cluster.get(namespace, "ipol", policy) or {}).get("status")
        pods = cluster.kubectl("get", "pods", "-n", namespace, "-o", "wide")
        raise TimeoutError(f"{problem}\n{json.dumps(status, indent=2)}\n{pods}") from problem
