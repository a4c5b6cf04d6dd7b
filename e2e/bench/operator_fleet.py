"""Policies and variants by the hundred, and the operator as a process whose figures can be read."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from installed import Installed

from sixfold_operator.kube import Kube

Manifest = dict[str, Any]
A_NAMESPACE = 50
PARALLEL = 8
POLL_SECONDS = 1.0
PATIENCE_SECONDS = 900.0
_MIB = 1024


def ground(count: int) -> list[Manifest]:
    """What is there before `fleet(count)`: a few namespaces, each with a bound claim for weights."""
    made: list[Manifest] = []
    for namespace in _namespaces(count):
        made.append({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        spec = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
        claim = {"namespace": namespace, "name": "models"}
        volume = {**spec, "capacity": {"storage": "1Gi"}, "claimRef": claim, "hostPath": {"path": "/models"}}
        made.append({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": namespace}, "spec": volume})
        spec |= {"volumeName": namespace, "resources": {"requests": {"storage": "1Gi"}}}
        made.append(_object("v1", "PersistentVolumeClaim", namespace, "models", spec))
    return made


def _namespaces(count: int) -> list[str]:
    return [f"team-{number}" for number in range(-(-count // A_NAMESPACE))]


def fleet(count: int) -> list[Manifest]:
    """`count` variants, and as many policies that use one each."""
    made: list[Manifest] = []
    for number in range(count):
        namespace = f"team-{number // A_NAMESPACE}"
        variant = {"task": "Generation", "source": {"uri": f"pvc://models/m{number}"}}
        policy = {"generation": {"variantRef": {"name": f"m{number}"}}, "engine": {"accelerator": {"type": "CPU"}}}
        made.append(_object("sixfold.dev/v1alpha1", "ModelVariant", namespace, f"m{number}", variant))
        made.append(_object("sixfold.dev/v1alpha1", "InferencePolicy", namespace, f"p{number}", policy))
    return made


def _object(api_version: str, kind: str, namespace: str, name: str, spec: Manifest) -> Manifest:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}


def is_settled(policy: Manifest, level: int) -> bool:
    """Whether everything of a policy runs, and every pod with that level."""
    status = policy.get("status", {})
    conditions = {entry["type"]: entry["status"] for entry in status.get("conditions", [])}
    config = status.get("config", {})
    return (
        conditions.get("Ready") == conditions.get("ConfigApplied") == "True"
        and status.get("effectiveLevel") == level
        and config.get("applied") == config.get("pods") != 0
    )


async def until(what: str, holds: Callable[[], Awaitable[bool]]) -> float:
    """Seconds until it holds, as far as looking once a second tells."""
    started = time.monotonic()
    while not await holds():
        if time.monotonic() - started > PATIENCE_SECONDS:
            raise TimeoutError(f"not after {PATIENCE_SECONDS:.0f} s: {what}")
        await asyncio.sleep(POLL_SECONDS)
    return time.monotonic() - started


async def all_settled(kube: Kube, count: int, level: int) -> bool:
    policies, _ = await kube.list("InferencePolicy", None)
    return sum(is_settled(policy, level) for policy in policies) == count


async def all_available(kube: Kube, count: int) -> bool:
    """Whether as many Deployments have all of their pods, and no Job is under way."""
    for kind, done in (("Job", _is_complete), ("Deployment", _is_available)):
        items, _ = await kube.list(kind, None, "app.kubernetes.io/managed-by=sixfold-operator")
        if sum(map(done, items)) < (count if kind == "Job" else 2 * count):
            return False
    return True


def _is_complete(job: Manifest) -> bool:
    return bool(job.get("status", {}).get("succeeded"))


def _is_available(deployment: Manifest) -> bool:
    return bool(deployment.get("status", {}).get("availableReplicas", 0) == deployment["spec"]["replicas"])


class Operator:
    """The operator's process, from its start; it ends with this one at the latest."""

    def __init__(self, chart: Installed, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        environment = {**chart.environment, "SIXFOLD_METRICS_PORT": str(self.port), "SIXFOLD_LOG_LEVEL": "WARNING"}
        with log.open("wb") as output:
            command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "sixfold_operator.main"]
            self._process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=30)

    def memory_mib(self, field: str = "VmRSS") -> float:
        """Resident memory now, or with VmHWM at its highest."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / _MIB for line in lines if line.startswith(f"{field}:"))

    def cpu_seconds(self) -> float:
        """Of the process so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def reconciles(self) -> float:
        """How many there have been."""
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{self.port}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("sixfold_operator_reconciles_total{"))
