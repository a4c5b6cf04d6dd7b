"""The operator's service account may do what it does and nothing else: what the chart grants is what was used.

The operator runs as the chart's service account against a kube-apiserver of its own with RBAC, which logs what it is
asked for. A verb that nobody needs shows up here, as does one that is missing.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import audit
import binaries
import httpx
import installed
import pytest
from conftest import OperatorProcess
from control_plane import temporary_control_plane
from processes import run
from scenes import Api, Scene

from sixfold_api.ticket import OptimizationTicketSpec, OptimizationTicketStatus, Phase
from sixfold_operator.cache import Cache
from sixfold_operator.control.tickets import Ticket, TicketPlan
from sixfold_operator.kube import Kube
from sixfold_operator.pod_states import PodStates
from sixfold_operator.reconcile.children import Children
from sixfold_operator.reconcile.context import Context
from sixfold_operator.reconcile.tickets import write_tickets
from sixfold_operator.settings import OperatorSettings

Right = tuple[str, str, str]
"""API group, resource with its subresource, verb."""
HERE = Path(__file__).parent
NAMESPACE = "shop"
UNUSED: dict[Right, str] = {}
"""Granted and not used by what runs here, with the reason."""
ROUTE = {"parentRefs": [{"name": "shared", "namespace": "edge"}], "hostnames": ["chat.example.com"]}
EXPOSED = {"ingress": {"host": "chat.example.com"}, "httpRoute": ROUTE}
BY_CPU = {"autoscaling": {"minReplicas": 1, "maxReplicas": 3, "cpuPercent": 80, "scaler": "HPA"}}
BY_QUEUE = {"autoscaling": {"minReplicas": 1, "maxReplicas": 3, "queuedRequests": 4, "scaler": "KEDA"}}
WAYS = ("Ingress", "HTTPRoute", "HorizontalPodAutoscaler")
CHILDREN = (("Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"), "bot-classifier"), (WAYS, "bot-gateway")
"""What goes when it is no longer asked for."""
TICKET = OptimizationTicketSpec.model_validate(
    {
        "policyRef": {"name": "bot"},
        "fingerprint": "0123456789",
        "cause": "RecomputedPrefix",
        "evidence": {"signal": "WastedFlops", "query": "up", "value": "0.8", "threshold": "0.65", "window": "600s"},
        "recommendation": {"summary": "Keep keys and values."},
    }
)


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """kube-apiserver, with the kinds of the Gateway API and of KEDA."""
    folder = tmp_path_factory.mktemp("audit")
    with temporary_control_plane(*audit.flags(folder, installed.USER)) as running:
        routes = json.loads((HERE / "httproutes.crd.json").read_text())
        kubectl(running, "apply", "--server-side", "-f", "-", stdin=json.dumps(routes))
        kubectl(running, "apply", "--server-side", "-f", "-", stdin=json.dumps(keda()))
        running.audit_log = audit.log_file(folder)
        yield running


def keda() -> dict[str, Any]:
    """The CRD of ScaledObjects, which takes anything."""
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1alpha1", "served": True, "storage": True, "schema": {"openAPIV3Schema": anything}}
    names = {
        "kind": "ScaledObject",
        "plural": "scaledobjects",
        "singular": "scaledobject",
        "listKind": "ScaledObjectList",
    }
    spec = {"group": "keda.sh", "scope": "Namespaced", "names": names, "versions": [version]}
    metadata = {"name": "scaledobjects.keda.sh"}
    kind = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
    return {**kind, "metadata": metadata, "spec": spec}


def kubectl(plane: Any, *arguments: str, stdin: str | None = None) -> str:
    return run(binaries.kubectl(), "--kubeconfig", plane.kubeconfig, *arguments, stdin=stdin)


@pytest.mark.parametrize("form", ["the whole cluster", "one namespace"])
def test_what_is_granted_is_what_is_used(
    plane: Any, form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    everywhere = form == "the whole cluster"
    namespace = NAMESPACE if everywhere else f"{NAMESPACE}-only"
    arguments = ["--set=operator.resyncSeconds=1"] + ([] if everywhere else [f"--set=watchNamespaces={{{namespace}}}"])
    kubectl(plane, "create", "namespace", namespace)
    began = sum(1 for _ in audit.requests(plane.audit_log))
    chart = installed.install(plane, *arguments)
    for name, value in chart.environment.items():
        monkeypatch.setenv(name, value)
    operator = OperatorProcess(tmp_path / "log", Path(chart.environment["KUBECONFIG"]))
    kubectl(plane, "delete", "lease", "--namespace", installed.NAMESPACE, "--all")
    trust = ssl.create_default_context(cafile=str(plane.ca_file))
    headers = {"Authorization": f"Bearer {plane.token}"}
    with httpx.Client(base_url=plane.url, headers=headers, verify=trust, trust_env=False, timeout=30) as http:
        scene = Scene(Api(http, namespace))
        try:
            operator.start(SIXFOLD_IDENTITY=form.replace(" ", "-"), SIXFOLD_PROMETHEUS_URL="http://127.0.0.1:9")
            everything(scene)
            asyncio.run(ticket(scene))
        finally:
            operator.stop()
            print(operator.log.read_text()[-5000:])
    seen = list(audit.requests(plane.audit_log))[began:]
    granted = rights(chart.documents)
    remove(plane, chart.documents)
    assert [entry for entry in seen if entry.code == 403] == []
    assert not {resource for _, resource, _ in granted if resource.startswith("secrets") or "*" in resource}
    missing, unneeded = used(seen) - granted, granted - used(seen)
    assert not missing, "these are used although the chart doesn't grant them"
    assert unneeded == set(UNUSED), "the chart grants what isn't needed (or UNUSED excuses what is used)"


def everything(scene: Scene) -> None:
    """Each child comes, changes, and goes."""
    scene.claim()
    scene.variant("chat")
    scene.variant("mood", "Classification")
    scene.variant("other")
    engine = {"accelerator": {"type": "CPU"}}
    classification = {"variantRef": {"name": "mood"}, "engine": {**engine, "replicas": 2}}
    scene.policy(classification=classification, engine=engine | BY_QUEUE, gateway=EXPOSED | BY_CPU)
    first = scene.job("other")["metadata"]["name"]
    scene.api.patch("ModelVariant", "other", {"spec": {"preparation": {"pod": {"nodeSelector": {"pool": "b"}}}}})
    scene.eventually("its first Job is gone", lambda: scene.api.get("Job", first) is None)
    for name in ("chat", "mood"):
        scene.finish_job(name, {"facts": scene.FACTS})
    for part in ("engine", "classifier", "gateway"):
        scene.deployment_ready(f"bot-{part}")
    scene.wait("InferencePolicy", "bot", "Ready", "True")
    scene.pod("bot-engine", "bot-engine-1", scene.RUNNING)
    scene.eventually("an autoscaler", lambda: scene.api.get("ScaledObject", "bot-engine"))
    for kinds, name in CHILDREN:
        for kind in kinds:
            scene.eventually(f"{kind} {name}", lambda kind=kind, name=name: scene.api.get(kind, name))
    nothing = dict.fromkeys((*EXPOSED, *BY_CPU))
    fewer = {"gateway": nothing, "engine": dict.fromkeys(BY_QUEUE), "classification": {"engine": None}}
    scene.api.patch("InferencePolicy", "bot", {"spec": {**fewer, "rollbackLevel": 1}})
    scene.wait_generation("InferencePolicy", "bot")
    scene.deployment_ready("bot-engine")
    scene.deployment_ready("bot-gateway")
    for kinds, name in (*CHILDREN, (("ScaledObject",), "bot-engine")):
        for kind in kinds:
            gone = lambda kind=kind, name=name: scene.api.get(kind, name) is None  # noqa: E731
            scene.eventually(f"{kind} {name} is gone", gone)


async def ticket(scene: Scene) -> None:
    """A ticket comes and goes as the operator writes it: no Prometheus has found waste here."""
    policy = scene.api.get("InferencePolicy", "bot")
    assert policy is not None
    found = Ticket("bot-0123456789", TICKET, OptimizationTicketStatus(phase=Phase.OPEN, occurrences=1))
    kube, cache = await Kube.connect(), Cache()
    context = Context(OperatorSettings(), kube, cache, Children(kube, cache), PodStates())  # settings: the chart's
    await write_tickets(context, policy, TicketPlan(opened=(found,), now=(found,)))
    await write_tickets(context, policy, TicketPlan(expired=(found.name,)))
    await kube.close()


def used(seen: list[audit.Request]) -> set[Right]:
    """The rights behind requests: who applies or puts what wasn't there needs the right to create it too."""
    found = {(entry.group, entry.resource, entry.verb) for entry in seen if entry.resource}
    return found | {(entry.group, entry.resource, "create") for entry in seen if entry.resource and entry.code == 201}


def rights(documents: list[dict[str, Any]]) -> set[Right]:
    """What is bound to the operator's service account, in whatever namespace."""
    bound = {
        (document["roleRef"]["kind"], document["roleRef"]["name"])
        for document in documents
        if document["kind"] in ("RoleBinding", "ClusterRoleBinding")
        if any(
            f"system:serviceaccount:{who['namespace']}:{who['name']}" == installed.USER for who in document["subjects"]
        )
    }
    return {
        (group, resource, verb)
        for document in documents
        if (document["kind"], document["metadata"]["name"]) in bound
        for rule in document["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def remove(plane: Any, documents: list[dict[str, Any]]) -> None:
    """Take the rights away again."""
    kinds = ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
    items = [document for document in documents if document["kind"] in kinds]
    listing = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    kubectl(plane, "delete", "--wait=false", "-f", "-", stdin=listing)
