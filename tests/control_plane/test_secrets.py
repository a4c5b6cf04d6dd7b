"""No secret that the operator is given, or that lies in a Secret beside its objects, is in anything that it says."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from scenes import Scene, checked, eventually

SECRETS = {
    "sink": "sink-secret-1f6e",
    "github": "ghp-token-77c1",
    "prometheus": "prometheus-token-5d20",
    "alerts": "alerts-token-e3b9",
    "api key": "api-key-of-alice-40aa",
    "redis": "redis-password-aa93",
    "hub": "hf-token-6b17",
}


@pytest.fixture
def sink() -> Iterator[HTTPServer]:
    """It refuses everything, and repeats what it was told in its answer, as clumsy servers do."""

    class Echo(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            body = f"{dict(self.headers)} {SECRETS['sink']} {SECRETS['github']}".encode()
            self.send_response(401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.send_error(401, SECRETS["prometheus"])

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


@pytest.fixture
def alerts_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def settings(folder: Path, sink: HTTPServer, alerts_port: int) -> dict[str, str]:
    """Environment of an operator that has every secret there is."""
    for name, secret in SECRETS.items():
        (folder / name).write_text(secret)
    hook = {"name": "ops", "type": "Webhook", "url": f"http://127.0.0.1:{sink.server_port}/"}
    github = {"name": "hub", "type": "GitHub", "url": f"http://127.0.0.1:{sink.server_port}", "repository": "a/b"}
    sinks = [{**hook, "secretFile": str(folder / "sink")}, {**github, "secretFile": str(folder / "github")}]
    (folder / "sinks.yaml").write_text(json.dumps(sinks))
    return {
        "SIXFOLD_LOG_LEVEL": "DEBUG",
        "SIXFOLD_SINKS_FILE": str(folder / "sinks.yaml"),
        "SIXFOLD_PROMETHEUS_URL": f"http://127.0.0.1:{sink.server_port}/",
        "SIXFOLD_PROMETHEUS_BEARER_TOKEN_FILE": str(folder / "prometheus"),
        "SIXFOLD_ALERTS_PORT": str(alerts_port),
        "SIXFOLD_ALERTS_TOKEN_FILE": str(folder / "alerts"),
    }


def test_what_the_operator_says(
    operator: Any, make_scene: Callable[[], Scene], sink: HTTPServer, alerts_port: int, tmp_path: Path
) -> None:
    operator.stop()
    operator.start(**settings(tmp_path, sink, alerts_port))
    scene = make_scene()
    for name, key, secret in (("keys", "alice", "api key"), ("redis", "url", "redis"), ("hub", "token", "hub")):
        data = {key: base64.b64encode(SECRETS[secret].encode()).decode()}
        path = f"/api/v1/namespaces/{scene.api.namespace}/secrets"
        checked(scene.api.http.post(path, json={"metadata": {"name": name}, "data": data}))
    scene.claim()
    source = {"uri": f"hf://acme/chat@{'0' * 40}"}
    scene.variant(source=source, artifact={"claimName": "models"}, credentialsSecretRef={"name": "hub"})
    reuse = {"store": "Redis", "redis": {"urlSecretRef": {"name": "redis", "key": "url"}}}
    generation = {"variantRef": {"name": "chat"}, "kvCacheReuse": reuse}
    scene.policy(
        tickets={"sinks": ["ops", "hub"]}, generation=generation, gateway={"apiKeysSecretRef": {"name": "keys"}}
    )
    scene.finish_job(summary={"facts": scene.FACTS})
    policy = eventually("the policy is there", lambda: scene.api.get("InferencePolicy", "bot"))
    tickets = f"/apis/sixfold.dev/v1alpha1/namespaces/{scene.api.namespace}/optimizationtickets"
    checked(scene.api.http.post(tickets, json=ticket(policy)))
    headers = {"Content-Type": "application/merge-patch+json"}
    status = json.dumps({"status": {"phase": "Open", "occurrences": 1, "firstSeen": "2030-01-01T00:00:00Z"}})
    checked(scene.api.http.patch(f"{tickets}/bot-0123456789/status", content=status, headers=headers))

    def refused() -> bool:
        live = checked(scene.api.http.get(f"{tickets}/bot-0123456789"))
        told = {entry["name"]: entry for entry in live["status"].get("sinks", [])}
        return {"ops", "hub"} <= told.keys() and all(entry.get("message") for entry in told.values())

    eventually("both sinks have refused, and the ticket says so", refused)
    answers = []
    for token in (SECRETS["alerts"], SECRETS["alerts"] + "x", "none"):
        for body in ({"version": "4", "alerts": []}, {"version": "4", "alerts": [{"status": SECRETS["alerts"]}]}):
            url = f"http://127.0.0.1:{alerts_port}/alerts"
            answer = httpx.post(url, json=body, headers={"Authorization": f"Bearer {token}"}, trust_env=False)
            answers.append(f"{answer.status_code} {answer.headers} {answer.text}")
    scene.wait("InferencePolicy", "bot", "MetricsAvailable", "False")
    kinds = ("InferencePolicy", "ModelVariant", "Deployment", "ConfigMap", "Job", "Service", "Event")
    objects = json.dumps([scene.api.list(kind) for kind in kinds]) + scene.api.http.get(tickets).text
    said = httpx.get(f"http://127.0.0.1:{operator.port}/metrics", trust_env=False).text
    log = operator.log.read_text()
    assert '"level": "debug"' in log, "at DEBUG there is more to look through"
    everything = "\n".join([objects, said, log, *answers])
    encoded = {name: base64.b64encode(secret.encode()).decode() for name, secret in SECRETS.items()}
    found = {name for name, secret in SECRETS.items() if secret in everything or encoded[name] in everything}
    assert found == set()


def ticket(policy: dict[str, Any]) -> dict[str, Any]:
    owner = {"apiVersion": policy["apiVersion"], "kind": policy["kind"], "controller": True}
    owner |= {"name": "bot", "uid": policy["metadata"]["uid"]}
    labels = {"sixfold.dev/policy": "bot", "app.kubernetes.io/managed-by": "sixfold-operator"}
    return {
        "apiVersion": "sixfold.dev/v1alpha1",
        "kind": "OptimizationTicket",
        "metadata": {"name": "bot-0123456789", "labels": labels, "ownerReferences": [owner]},
        "spec": {
            "policyRef": {"name": "bot"},
            "fingerprint": "0123456789",
            "cause": "RecomputedPrefix",
            "evidence": {"signal": "WastedFlops", "query": "up", "value": "0.8", "threshold": "0.65", "window": "600s"},
            "recommendation": {"summary": "Keep keys and values."},
        },
    }
