"""What users create in a namespace, and the reports of the controllers and kubelets that don't run in these tests."""

from __future__ import annotations

import itertools
import json
import threading
import time
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from sixfold_api.runtime_config import PodState
from sixfold_api.variant import PERMANENT_FAILURE_EXIT_CODE

Manifest = dict[str, Any]
IMAGE = "registry.example/sixfold-runtime:test"
WAIT_SECONDS = 30.0
NOW = "2030-01-01T00:00:00Z"

PATHS = {
    "InferencePolicy": "/apis/sixfold.dev/v1alpha1/{}/inferencepolicies",
    "OptimizationTicket": "/apis/sixfold.dev/v1alpha1/{}/optimizationtickets",
    "ModelVariant": "/apis/sixfold.dev/v1alpha1/{}/modelvariants",
    "Deployment": "/apis/apps/v1/{}/deployments",
    "Job": "/apis/batch/v1/{}/jobs",
    "Service": "/api/v1/{}/services",
    "ConfigMap": "/api/v1/{}/configmaps",
    "Pod": "/api/v1/{}/pods",
    "PersistentVolumeClaim": "/api/v1/{}/persistentvolumeclaims",
    "Event": "/api/v1/{}/events",
    "PodDisruptionBudget": "/apis/policy/v1/{}/poddisruptionbudgets",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/{}/networkpolicies",
    "Ingress": "/apis/networking.k8s.io/v1/{}/ingresses",
    "HTTPRoute": "/apis/gateway.networking.k8s.io/v1/{}/httproutes",
    "HorizontalPodAutoscaler": "/apis/autoscaling/v2/{}/horizontalpodautoscalers",
    "ScaledObject": "/apis/keda.sh/v1alpha1/{}/scaledobjects",
}


class Api:
    """kube-apiserver as an administrator, in one namespace."""

    def __init__(self, http: httpx.Client, namespace: str) -> None:
        self.http, self.namespace = http, namespace

    def path(self, kind: str, name: str = "") -> str:
        base = PATHS[kind].format(f"namespaces/{self.namespace}")
        return f"{base}/{name}" if name else base

    def create(self, manifest: Manifest) -> Manifest:
        return checked(self.http.post(self.path(manifest["kind"]), json=manifest))

    def get(self, kind: str, name: str) -> Manifest | None:
        answer = self.http.get(self.path(kind, name))
        return None if answer.status_code == 404 else checked(answer)

    def list(self, kind: str) -> list[Manifest]:
        items: list[Manifest] = checked(self.http.get(self.path(kind)))["items"]
        return items

    def patch(self, kind: str, name: str, change: Manifest, subresource: str = "") -> Manifest:
        path = self.path(kind, name) + (f"/{subresource}" if subresource else "")
        headers = {"Content-Type": "application/merge-patch+json"}
        return checked(self.http.patch(path, content=json.dumps(change), headers=headers))

    def set_status(self, kind: str, name: str, status: Manifest) -> Manifest:
        return self.patch(kind, name, {"status": status}, "status")

    def delete(self, kind: str, name: str) -> None:
        checked(
            self.http.request(
                "DELETE", self.path(kind, name), json={"gracePeriodSeconds": 0, "propagationPolicy": "Background"}
            )
        )

    def condition(self, kind: str, name: str, type_: str) -> Manifest:
        conditions = ((self.get(kind, name) or {}).get("status") or {}).get("conditions", [])
        return next((entry for entry in conditions if entry["type"] == type_), {"status": "", "reason": ""})


def checked(answer: httpx.Response) -> Manifest:
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

    def warnings(self) -> set[str]:
        """Reasons of the Events that people were warned with."""
        return {event["reason"] for event in self.api.list("Event") if event["type"] == "Warning"}

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
        known = {"role": "engine", "pod": self.address, "ready": True}
        self._body = json.dumps(PodState.model_validate(known | fields).to_dict()).encode()
