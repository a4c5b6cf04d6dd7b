"""Seconds from `kubectl patch` of a level to every pod reporting it, over a file in a ConfigMap that nobody pokes.

Both run on the cluster at hand, in turns. The peer is the usual way: a pod that mounts a ConfigMap and waits for its
kubelet to look at it again (a minute, give or take).
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import kubernetes
from levels import LevelMeter
from stack import IMAGES_FILE, REPOSITORY, Cluster, bring_up, fill_models_claim, model_folders, wait_ready, wait_until

GOAL = 10.0
NAMESPACE = "sixfold-bench"
POLICY = "assistant"


def peer_pod() -> dict[str, Any]:
    """Serves the files of a mounted ConfigMap over HTTP, read anew for each request."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "unpoked"},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {
                    "name": "files",
                    "image": json.loads(IMAGES_FILE.read_text())["operator"],
                    "command": ["python", "-m", "http.server", "8080", "--directory", "/config"],
                    "volumeMounts": [{"name": "config", "mountPath": "/config"}],
                }
            ],
            "volumes": [{"name": "config", "configMap": {"name": "unpoked"}}],
        },
    }


def config_map(value: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "unpoked"}, "data": {"value": value}}


def peer_seconds(cluster: Cluster, core: kubernetes.client.CoreV1Api, value: str) -> float:
    def shown() -> bool:
        try:
            answer = core.connect_get_namespaced_pod_proxy_with_path(
                "unpoked:8080", NAMESPACE, "value", _preload_content=False
            )
        except kubernetes.client.ApiException:
            return False
        return bool(answer.data.decode() == value)

    started = time.monotonic()
    cluster.apply(NAMESPACE, config_map(value))
    wait_until(f"the file says {value}", shown, timeout_seconds=300, interval_seconds=0.02)
    return time.monotonic() - started


def run(quick: bool) -> dict[str, Any]:
    cluster = bring_up()
    cluster.apply("default", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    fill_models_claim(NAMESPACE, model_folders())
    cluster.kubectl("apply", "-n", NAMESPACE, "-f", str(REPOSITORY / "examples"))
    cluster.apply(NAMESPACE, config_map("start"), peer_pod())
    wait_ready(cluster, NAMESPACE, POLICY)
    meter = LevelMeter(cluster, NAMESPACE, POLICY)
    core = kubernetes.client.CoreV1Api(kubernetes.config.new_client_from_config(cluster.environment["KUBECONFIG"]))
    wait_until("the peer answers", lambda: peer_seconds(cluster, core, "ready"), 300)
    own, peer = [], []
    for turn in range(2 if quick else 8):
        own += [meter.move(level).reported_seconds for level in (0, 3)]
        peer.append(peer_seconds(cluster, core, f"turn {turn}"))
        print(f"turn {turn}: {own[-2]:.2f} s and {own[-1]:.2f} s to all pods, unpoked {peer[-1]:.1f} s", flush=True)
    cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")
    return {
        "ratio": round(statistics.median(peer) / statistics.median(own), 1),
        "goal": GOAL,
        "own_seconds": [round(seconds, 2) for seconds in own],
        "peer_seconds": [round(seconds, 2) for seconds in peer],
    }
