"""The operator as the chart installs it, for a kube-apiserver without kubelets: its objects, its rights, its settings.

The process itself is the caller's to start::

    chart = install(control_plane, "--set=operator.resyncSeconds=60")
    subprocess.Popen([sys.executable, "-m", "sixfold_operator.main"], env=chart.environment)
"""

import json
import os
from dataclasses import dataclass
from typing import Any

import binaries
import yaml
from control_plane import ControlPlane
from paths import REPOSITORY
from processes import run

RELEASE, NAMESPACE = "sixfold", "sixfold-system"
USER = f"system:serviceaccount:{NAMESPACE}:{RELEASE}-operator"
"""The operator, as kube-apiserver calls it."""
WORKLOADS = ("Deployment", "StatefulSet")
Document = dict[str, Any]


@dataclass(frozen=True)
class Installed:
    """What the chart made of its values.

    Attributes:
        documents: all that it rendered.
        environment: of the operator's process, with a kubeconfig of its service account.
    """

    documents: list[Document]
    environment: dict[str, str]


def render(*arguments: str) -> list[Document]:
    """The chart's manifests."""
    options = f"--namespace={NAMESPACE}", f"--kube-version={binaries.kubernetes_version()}"
    text = run(binaries.helm(), "template", RELEASE, REPOSITORY / "helm" / "sixfold", *options, *arguments)
    return [document for document in yaml.safe_load_all(text) if document]


def install(plane: ControlPlane, *arguments: str) -> Installed:
    """Apply what the chart renders but for its workloads; `arguments` are helm's."""
    documents = render(*arguments)
    kubectl = binaries.kubectl(), "--kubeconfig", plane.kubeconfig
    needed = {NAMESPACE, *(document["metadata"].get("namespace", NAMESPACE) for document in documents)}
    namespaces = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in sorted(needed)]
    wanted = [document for document in documents if document["kind"] not in WORKLOADS]
    listing = {"apiVersion": "v1", "kind": "List", "items": [*namespaces, *wanted]}
    run(*kubectl, "apply", "--server-side", "--filename", "-", stdin=json.dumps(listing))
    run(*kubectl, "wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
    token = run(*kubectl, "create", "token", "--namespace", NAMESPACE, USER.rpartition(":")[2]).strip()
    kubeconfig = plane.folder / "operator.kubeconfig"
    config = json.loads(plane.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    kubeconfig.touch(mode=0o600)
    kubeconfig.write_text(json.dumps(config))
    return Installed(documents, {**os.environ, **_settings(documents), "KUBECONFIG": str(kubeconfig)})


def _settings(documents: list[Document]) -> dict[str, str]:
    """Environment variables of the operator's container that are plain values."""
    (deployment,) = [
        document
        for document in documents
        if document["kind"] == "Deployment" and document["metadata"]["name"] == f"{RELEASE}-operator"
    ]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
