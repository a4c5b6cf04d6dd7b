"""A level reaches every pod within two seconds, and no request notices but by its headers."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from levels import LevelMeter
from stack import JOURNEY_KEY, Cluster, condition, wait_until
from traffic import Traffic, percentile, stream_chat

CHANGES = 20
GOAL_SECONDS = 2.0


async def test_levels_move_under_load(
    cluster: Cluster, namespace: str, gateway: str, capsys: pytest.CaptureFixture[str]
) -> None:
    meter = LevelMeter(cluster, namespace, "assistant")
    restarts = pod_starts(cluster, namespace)
    moves = []
    async with Traffic(gateway, JOURNEY_KEY, "assistant") as traffic:
        for change in range(CHANGES):
            moves.append(await asyncio.to_thread(meter.move, (2, 3, 0, 1)[change % 4]))
    seconds = [move.reported_seconds for move in moves]
    with capsys.disabled():
        print(
            f"\nlevels: {CHANGES} changes over {moves[0].pods} pods, p50 {percentile(seconds, 0.5):.2f} s, "
            f"p95 {percentile(seconds, 0.95):.2f} s, max {max(seconds):.2f} s (goal p95 < {GOAL_SECONDS} s); "
            f"{len(traffic.outcomes)} streams meanwhile, {len(traffic.failed)} failed"
        )
    assert moves[0].pods == 4
    assert not traffic.failed, traffic.failed[:3]
    assert len(traffic.outcomes) > CHANGES
    assert pod_starts(cluster, namespace) == restarts


async def test_a_request_runs_at_the_level_of_the_pods(cluster: Cluster, namespace: str, gateway: str) -> None:
    """Level 3 compresses streams, level 2 doesn't, and the status says which holds."""
    meter = LevelMeter(cluster, namespace, "assistant")
    async with httpx.AsyncClient(base_url=gateway, timeout=60) as http:
        for level, encoding in ((2, "identity"), (3, "zstd")):
            await asyncio.to_thread(meter.move, level)
            outcome = await stream_chat(http, JOURNEY_KEY, "assistant", "Who is there?", 24)
            assert (outcome.error, outcome.level, outcome.encoding) == ("", str(level), encoding)
            await asyncio.to_thread(wait_until, "status", lambda level=level: status_says(cluster, namespace, level))


def status_says(cluster: Cluster, namespace: str, level: int) -> bool:
    policy = cluster.get(namespace, "ipol", "assistant")
    assert policy is not None
    status = policy["status"]
    modes = {mode["name"]: mode["state"] for mode in status["modes"]}
    return (
        status["effectiveLevel"] == level
        and status["config"]["pods"] == status["config"]["applied"] == 4
        and modes["CompressedStreaming"] == ("Active" if level == 3 else "BelowLevel")
        and condition(policy, "ConfigApplied")["status"] == "True"
    )


def pod_starts(cluster: Cluster, namespace: str) -> dict[str, int]:
    """Restart count of each pod of the policy: a level change leaves both names and counts alone."""
    return {
        pod["metadata"]["name"]: pod["status"]["containerStatuses"][0]["restartCount"]
        for pod in cluster.list(namespace, "pods", "sixfold.dev/policy=assistant")
    }
