"""Parts are killed, cut off, filled up and edited behind the operator's back, while clients keep asking."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import target
from levels import LevelMeter
from stack import CLUSTER_TOOL, JOURNEY_KEY, SYSTEM_NAMESPACE, Cluster, CommandError, condition, wait_ready, wait_until
from traffic import Traffic
from watching import SMALL_POD, Watched

DAY_MILLISECONDS = 86_400_000


def leader(cluster: Cluster) -> str:
    """Name of the operator's pod that acts."""
    (lease,) = cluster.list(SYSTEM_NAMESPACE, "leases", "app.kubernetes.io/name=sixfold")
    holder: str = lease["spec"].get("holderIdentity", "").partition("_")[0]
    return holder


def gateways(cluster: Cluster, namespace: str) -> list[str]:
    """Names of the policy's gateways; those that are leaving don't count."""
    found = cluster.list(namespace, "pods", "sixfold.dev/policy=assistant,sixfold.dev/component=gateway")
    return [pod["metadata"]["name"] for pod in found if "deletionTimestamp" not in pod["metadata"]]


def needs_embedded() -> None:
    if target.in_use().kind != "embedded":
        pytest.skip("reaches into the machine of the embedded node; this cluster is another one")


def kill(cluster: Cluster, namespace: str, pod: str) -> None:
    """SIGKILL to what runs in the pod, which its kubelet starts again. On another cluster than the embedded node the
    pod is deleted without grace, which leaves its processes a moment."""
    if target.in_use().kind != "embedded":
        cluster.kubectl("delete", "pod", "-n", namespace, pod, "--grace-period=0", "--force")
        return
    document = cluster.get(namespace, "pod", pod)
    assert document is not None
    killed = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_in_it = document["metadata"]["uid"] in (process / "cgroup").read_text()
            if is_in_it and not (process / "cmdline").read_text().startswith("/pause"):
                os.kill(int(process.name), signal.SIGKILL)
                killed += 1
        except (FileNotFoundError, ProcessLookupError):
            continue
    assert killed, f"{pod} runs no process"


async def test_a_killed_operator_is_missed_by_nobody(cluster: Cluster, namespace: str, gateway: str) -> None:
    meter = LevelMeter(cluster, namespace, "assistant")
    before = leader(cluster)
    async with Traffic(gateway, JOURNEY_KEY, "assistant", clients=4) as traffic:
        killed = time.monotonic()
        kill(cluster, SYSTEM_NAMESPACE, before)
        move = await asyncio.to_thread(meter.move, 2, 60)
        moved_seconds = time.monotonic() - killed
        await asyncio.to_thread(meter.move, 3)
    print(
        f"\noperator killed: a level reaches all pods {moved_seconds:.1f} s later (goal 15; {move.pods} pods);"
        f" {before} led, now {leader(cluster)}; {len(traffic.outcomes)} streams, {len(traffic.failed)} failed"
    )
    assert not traffic.failed, traffic.failed[:3]


async def test_a_killed_gateway_takes_only_what_it_was_sending(cluster: Cluster, namespace: str, gateway: str) -> None:
    names = gateways(cluster, namespace)
    assert len(names) == 2
    clients = 6
    async with Traffic(gateway, JOURNEY_KEY, "assistant", clients=clients) as traffic:
        await asyncio.sleep(2)
        killed = time.monotonic()
        await asyncio.to_thread(kill, cluster, namespace, names[0])
        await asyncio.sleep(2)  # until somebody notices
        await asyncio.to_thread(wait_ready, cluster, namespace, "assistant")
        back_seconds = time.monotonic() - killed
        await asyncio.sleep(1)
    print(
        f"\ngateway killed: two again after {back_seconds:.1f} s; {len(traffic.outcomes)} streams,"
        f" {len(traffic.failed)} cut off in the middle"
    )
    assert len(traffic.failed) <= clients
    assert all(outcome.started < killed + 1.5 for outcome in traffic.failed), traffic.failed


async def test_a_drained_gateway_fails_nobody(cluster: Cluster, namespace: str, gateway: str) -> None:
    """Eviction, as `kubectl drain` asks for it: one at a time, by the budget; streams end first."""
    names = gateways(cluster, namespace)
    async with Traffic(gateway, JOURNEY_KEY, "assistant", clients=6) as traffic:
        await asyncio.to_thread(evict, cluster, namespace, names[0])
        with pytest.raises(CommandError, match="disruption budget"):
            await asyncio.to_thread(evict, cluster, namespace, names[1])
        await asyncio.to_thread(
            wait_until,
            "the evicted gateway is replaced",
            lambda: cluster.get(namespace, "pod", names[0]) is None,
        )
        await asyncio.to_thread(wait_ready, cluster, namespace, "assistant")
    print(f"\ngateway evicted: {len(traffic.outcomes)} streams, {len(traffic.failed)} failed")
    assert not traffic.failed, traffic.failed[:3]


def evict(cluster: Cluster, namespace: str, pod: str) -> None:
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
    cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))


async def test_the_api_server_restarts(cluster: Cluster, namespace: str, gateway: str) -> None:
    needs_embedded()
    meter = LevelMeter(cluster, namespace, "assistant")
    async with Traffic(gateway, JOURNEY_KEY, "assistant", clients=4) as traffic:
        restart = (sys.executable, str(CLUSTER_TOOL), "restart-apiserver")
        await asyncio.to_thread(subprocess.run, restart, check=True)
        started = time.monotonic()
        await asyncio.to_thread(meter.move, 1, 90)
        recovered_seconds = time.monotonic() - started
        await asyncio.to_thread(meter.move, 3, 30)
    print(
        f"\nkube-apiserver restarted: a level reaches all pods {recovered_seconds:.1f} s later;"
        f" {len(traffic.outcomes)} streams, {len(traffic.failed)} failed"
    )
    assert not traffic.failed, traffic.failed[:3]


@pytest.mark.parametrize("edit", ["nonsense", "from a clock that is a day ahead"])
async def test_a_config_map_that_is_edited_by_hand(cluster: Cluster, namespace: str, gateway: str, edit: str) -> None:
    """What can't be read is not taken; what can lasts until the operator puts it right; the next change arrives."""
    meter = LevelMeter(cluster, namespace, "assistant")
    await asyncio.to_thread(meter.move, 3)
    text = "{not json"
    if edit != "nonsense":
        config = written(cluster, namespace)
        config["sequence"] += DAY_MILLISECONDS
        config["stable"]["level"] = 0
        text = json.dumps(config)
    async with Traffic(gateway, JOURNEY_KEY, "assistant", clients=4) as traffic:
        patch = {"data": {"config.json": text}}
        await asyncio.to_thread(cluster.patch, namespace, "configmap", "assistant-runtime", patch)
        await asyncio.to_thread(
            wait_until, "it is put right", lambda: written(cluster, namespace).get("stable", {}).get("level") == 3, 30
        )
        for level in (2, 3):
            await asyncio.to_thread(meter.move, level)
    assert not traffic.failed, traffic.failed[:3]


def written(cluster: Cluster, namespace: str) -> dict[str, Any]:
    """What config.json says; nothing where it can't be read."""
    config_map = cluster.get(namespace, "configmap", "assistant-runtime") or {}
    try:
        config: dict[str, Any] = json.loads(config_map["data"]["config.json"])
    except ValueError:
        return {}
    return config


@pytest.fixture
def small_claim(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[Path]:
    """A claim `small` on a file system of 512 KiB; yields where that is mounted."""
    needs_embedded()
    folder = tmp_path / "small"
    folder.mkdir()
    for parent in (folder, *folder.parents[:3]):
        parent.chmod(0o755)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k,mode=777", "tmpfs", str(folder)], check=True)
    name = f"small-{namespace}"
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    cluster.apply(
        namespace,
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": common | {"capacity": {"storage": "1Mi"}, "hostPath": {"path": str(folder), "type": "Directory"}},
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "small"},
            "spec": common | {"volumeName": name, "resources": {"requests": {"storage": "1Mi"}}},
        },
    )
    yield folder
    cluster.kubectl("delete", "mvar", "fills-up", "-n", namespace, "--ignore-not-found")
    cluster.kubectl("delete", "pvc", "small", "-n", namespace)
    cluster.kubectl("delete", "pv", name)
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_fills_up_in_a_job(cluster: Cluster, namespace: str, small_claim: Path) -> None:
    """The variant says so and serves nothing half-written; with room, deleting the Job makes it try again."""
    spec = {
        "task": "Generation",
        "source": {"variantRef": {"name": "chat"}},
        "precision": {"scheme": "INT8"},
        "evaluation": {"uri": "pvc://models/text/heldout.jsonl"},
        "artifact": {"claimName": "small"},
    }
    kind = {"apiVersion": "sixfold.dev/v1alpha1", "kind": "ModelVariant"}
    cluster.apply(namespace, {**kind, "metadata": {"name": "fills-up"}, "spec": spec})

    def prepared() -> dict[str, Any]:
        return condition(cluster.get(namespace, "mvar", "fills-up"), "Prepared")

    wait_until("the variant says why", lambda: prepared()["reason"] == "DiskFull", 180)
    wait_until(
        "nothing half-written stays (it may be tried again meanwhile)",
        lambda: not any(path.is_file() for path in small_claim.rglob("*")),
        60,
    )
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_claim)], check=True)
    cluster.kubectl("delete", "jobs", "-n", namespace, "-l", "sixfold.dev/variant=fills-up")
    wait_until("it is prepared", lambda: prepared()["status"] == "True", 400)


async def test_engines_sleep_and_a_request_wakes_them(cluster: Cluster, namespace: str) -> None:
    policy = Watched(cluster, namespace, "sleeper")
    scaling = {"minReplicas": 0, "maxReplicas": 2, "cpuPercent": 80, "idleAfter": "3s", "scaler": "HPA"}
    policy.apply(
        {
            "engine": {"accelerator": {"type": "CPU"}, "pod": SMALL_POD, "autoscaling": scaling},
            "gateway": {"pod": SMALL_POD},
            "generation": {"variantRef": {"name": "chat"}},
        }
    )
    try:
        await asyncio.to_thread(
            policy.wait, "engines sleep", lambda: policy.condition("Ready").get("reason") == "Asleep", 180
        )
        engines = "sixfold.dev/policy=sleeper,sixfold.dev/component=engine"
        await asyncio.to_thread(
            policy.wait, "the last one has gone", lambda: not cluster.list(namespace, "pods", engines)
        )
        body = {"model": "sleeper", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 4}
        with cluster.reach(namespace, "sleeper-gateway", 8000) as url:
            async with httpx.AsyncClient(base_url=url, timeout=180) as http:
                started = time.monotonic()
                answer = await http.post("/v1/chat/completions", json=body)
                waited_seconds = time.monotonic() - started
        assert answer.status_code == 200, answer.text
        print(f"\nengines asleep: the request that woke them had its answer after {waited_seconds:.1f} s")
        await asyncio.to_thread(
            policy.wait, "they sleep again", lambda: policy.condition("Ready").get("reason") == "Asleep", 60
        )
    finally:
        cluster.kubectl("delete", "ipol", "sleeper", "-n", namespace)
