"""The operator as a process tells a sink about a ticket, and writes down that it has."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from scenes import Scene, checked, eventually


def test_a_ticket_reaches_the_sink_that_its_policy_names(
    operator: Any, make_scene: Callable[[], Scene], tmp_path: Path
) -> None:
    events: list[Any] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            events.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(500 if len(events) == 1 else 204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "secret").write_text("hush")
    sink = {"name": "ops", "type": "Webhook", "url": f"http://127.0.0.1:{server.server_port}/"}
    (tmp_path / "sinks.yaml").write_text(json.dumps([{**sink, "secretFile": str(tmp_path / "secret")}]))
    operator.stop()
    operator.start(SIXFOLD_SINKS_FILE=str(tmp_path / "sinks.yaml"))
    scene = make_scene()
    try:
        scene.claim()
        scene.variant()
        scene.policy()
        path = f"/apis/sixfold.dev/v1alpha1/namespaces/{scene.api.namespace}/optimizationtickets"
        policy = scene.api.get("InferencePolicy", "bot")
        assert policy is not None
        checked(scene.api.http.post(path, json=ticket(policy)))
        status = {"phase": "Open", "occurrences": 1, "firstSeen": "2030-01-01T00:00:00Z"}
        headers = {"Content-Type": "application/merge-patch+json"}
        body = json.dumps({"status": status})
        checked(scene.api.http.patch(f"{path}/bot-0123456789/status", content=body, headers=headers))
        # Only now: a ticket is told as it is, also before it has a status.
        scene.api.patch("InferencePolicy", "bot", {"spec": {"tickets": {"sinks": ["nowhere", "ops"]}}})

        def sinks() -> dict[str, Any]:
            live = checked(scene.api.http.get(f"{path}/bot-0123456789"))
            return {entry["name"]: entry for entry in live["status"].get("sinks", [])}

        eventually("the sink was told", lambda: sinks().get("ops", {}).get("state") == "Delivered")
        assert sinks()["ops"]["phase"] == "Open"
        assert sinks()["nowhere"]["message"] == "the chart's values have no sink nowhere"
        assert [event["id"] for event in events[:2]] == ["0123456789-open-1"] * 2, "a repeat is recognisable"
        assert "hush" not in operator.log.read_text()
    finally:
        server.shutdown()


def ticket(policy: dict[str, Any]) -> dict[str, Any]:
    owner = {"apiVersion": policy["apiVersion"], "kind": policy["kind"], "controller": True}
    owner |= {"name": "bot", "uid": policy["metadata"]["uid"]}
    labels = {"sixfold.dev/policy": "bot", "app.kubernetes.io/managed-by": "sixfold-operator"}
    evidence = {"signal": "WastedFlops", "query": "up", "value": "0.8", "threshold": "0.65", "window": "600s"}
    return {
        "apiVersion": "sixfold.dev/v1alpha1",
        "kind": "OptimizationTicket",
        "metadata": {"name": "bot-0123456789", "labels": labels, "ownerReferences": [owner]},
        "spec": {
            "policyRef": {"name": "bot"},
            "fingerprint": "0123456789",
            "cause": "RecomputedPrefix",
            "evidence": evidence,
            "recommendation": {"summary": "Keep keys and values."},
        },
    }
