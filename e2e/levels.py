"""How long a level takes from `kubectl patch` to every pod reporting it."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import kubernetes
from stack import Cluster

POLL_SECONDS = 0.02
PORTS = {"gateway": 8000, "engine": 8001, "classifier": 8001}


@dataclass(frozen=True)
class Move:
    """One level change. Seconds count from the moment before the patch was sent."""

    level: int
    reported_seconds: float
    pods: int


class LevelMeter:
    """Patches the level of a policy and asks every pod for its /state until all report it.

    The pods are asked through kube-apiserver's proxy, so this works from outside of any cluster."""

    def __init__(self, cluster: Cluster, namespace: str, policy: str) -> None:
        api = kubernetes.config.new_client_from_config(cluster.environment["KUBECONFIG"])
        self._core = kubernetes.client.CoreV1Api(api)
        self._custom = kubernetes.client.CustomObjectsApi(api)
        self._namespace, self._policy = namespace, policy

    def pods(self) -> list[tuple[str, int]]:
        """Name and port of each running pod of the policy that isn't being deleted."""
        listing = self._core.list_namespaced_pod(self._namespace, label_selector=f"sixfold.dev/policy={self._policy}")
        return [
            (pod.metadata.name, PORTS[pod.metadata.labels["sixfold.dev/component"]])
            for pod in listing.items
            if pod.status.phase == "Running" and pod.metadata.deletion_timestamp is None
        ]

    def move(self, level: int, timeout_seconds: float = 30) -> Move:
        """Set spec.rollbackLevel and wait until every pod reports it; TimeoutError names those that don't."""
        pods = self.pods()
        started = time.monotonic()
        self._custom.patch_namespaced_custom_object(
            "sixfold.dev",
            "v1alpha1",
            self._namespace,
            "inferencepolicies",
            self._policy,
            {"spec": {"rollbackLevel": level}},
        )
        waiting = set(pods)
        with ThreadPoolExecutor(max_workers=max(1, len(pods))) as pool:
            while waiting:
                levels = dict(zip(waiting, pool.map(self._level, list(waiting)), strict=True))
                waiting = {pod for pod, seen in levels.items() if seen != level}
                if time.monotonic() - started > timeout_seconds:
                    raise TimeoutError(f"level {level} not reported within {timeout_seconds:.0f} s by {waiting}")
                time.sleep(POLL_SECONDS if waiting else 0)
        return Move(level, time.monotonic() - started, len(pods))

    def _level(self, pod: tuple[str, int]) -> int:
        """The level that a pod reports; -1 where it doesn't answer."""
        name, port = pod
        try:
            answer = self._core.connect_get_namespaced_pod_proxy_with_path(
                f"{name}:{port}", self._namespace, "state", _preload_content=False
            )
        except kubernetes.client.ApiException:
            return -1
        return int(json.loads(answer.data)["level"])
