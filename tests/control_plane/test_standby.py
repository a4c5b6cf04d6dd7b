"""Two operators and one Lease: one acts, whatever is done to it, and the other takes over."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import audit
import httpx
import pytest

SHORT_SECONDS = 6
LOST_LEASE_EXIT_CODE = 3
NOW = "2030-01-01T00:00:00.000000Z"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/default/leases"


class Pair:
    """Two operators as processes that share a Lease."""

    def __init__(self, http: httpx.Client, start: Callable[..., Any], audit_log: Path, duration_seconds: int) -> None:
        self._http, self._audit_log, self._since = http, audit_log, time.time()
        # As a release leaves it: one that nobody ever took would be waited for.
        http.delete(f"{LEASES}/pair")
        http.post(LEASES, json={"metadata": {"name": "pair"}, "spec": {"acquireTime": NOW}}).raise_for_status()
        self.environment = {
            "SIXFOLD_LEASE": "default/pair",
            "SIXFOLD_LEASE_DURATION_SECONDS": str(duration_seconds),
        }
        self.processes = start(**self.environment)

    def again(self, name: str) -> None:
        """As the kubelet starts what ended."""
        self.processes[name].start(SIXFOLD_IDENTITY=name, **self.environment)

    def leader(self) -> str:
        """Name of the one that says so; empty while there is none."""
        leading: list[str] = [name for name, process in self.processes.items() if process.role() == "leader"]
        assert len(leading) <= 1
        return leading[0] if leading else ""

    def other(self, name: str) -> str:
        (found,) = set(self.processes) - {name}
        return found

    def lease(self) -> dict[str, Any]:
        spec: dict[str, Any] = self._http.get(f"{LEASES}/pair").raise_for_status().json()["spec"]
        return spec

    def metric(self, name: str, metric: str) -> float:
        """Sum of the series."""
        text = httpx.get(f"http://127.0.0.1:{self.processes[name].port}/metrics", trust_env=False).text
        return sum(float(value) for value in re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    def writers(self) -> list[str]:
        """Who wrote anything but the Lease, by turns, in the order in which kube-apiserver got it."""
        requests = [entry for entry in audit.requests(self._audit_log, self._since) if entry.writes]
        users = [entry.user for entry in sorted(requests) if entry.resource != "leases"]
        return [user.rpartition(":")[2] for user, _ in itertools.groupby(users)]


@pytest.fixture
def make_pair(http: httpx.Client, start_pair: Callable[..., Any], audit_log: Path) -> Callable[[int], Pair]:
    return lambda seconds: Pair(http, start_pair, audit_log, seconds)


def set_level(scene: Any, level: int) -> None:
    """Change a policy and wait until that is done."""
    scene.api.patch("InferencePolicy", "bot", {"spec": {"rollbackLevel": level}})
    scene.sequence(level)


def test_the_standby_takes_over(make_pair: Callable[[int], Pair], scene: Any) -> None:
    """With the chart's duration: at once from a leader that is stopped, within 15 s from one that is killed."""
    pair = make_pair(10)
    first = scene.eventually("one leads", pair.leader)
    second = pair.other(first)
    scene.ready_policy()
    scene.eventually("it knows", lambda: pair.processes[second].role() == f"standby, {first} leads")
    assert pair.metric(first, "sixfold_operator_leader") == 1
    for metric in ("leader", "reconciles_total", "queue_keys"):
        assert pair.metric(second, f"sixfold_operator_{metric}") == 0, metric

    began = time.monotonic()
    pair.processes[first].process.terminate()
    scene.eventually("the other one leads", lambda: pair.leader() == second)
    print(f"SIGTERM: the standby leads after {time.monotonic() - began:.1f} s")
    assert pair.processes[first].process.wait(10) == 0
    set_level(scene, 1)
    assert pair.lease()["leaseTransitions"] == 2

    pair.again(first)
    began = time.monotonic()
    pair.processes[second].kill()
    scene.api.patch("InferencePolicy", "bot", {"spec": {"rollbackLevel": 2}})
    scene.eventually("the first one leads", lambda: pair.leader() == first)
    leads_seconds = time.monotonic() - began
    scene.sequence(2)
    seconds = time.monotonic() - began
    print(f"SIGKILL: the standby leads after {leads_seconds:.1f} s, what was asked for is done after {seconds:.1f} s")
    assert pair.lease()["leaseTransitions"] == 3
    assert pair.writers() == [first, second, first]
    assert seconds < 15


def test_who_lost_the_lease_never_writes_again(
    make_pair: Callable[[int], Pair], scene: Any, control_plane: Any
) -> None:
    """A leader that hung wakes up with another one at work, and ends; one that hears nothing ends by itself."""
    pair = make_pair(SHORT_SECONDS)
    first = scene.eventually("one leads", pair.leader)
    second, hung = pair.other(first), pair.processes[first]
    scene.ready_policy()
    scene.api.patch("InferencePolicy", "bot", {"spec": {"rollbackLevel": 1}})
    hung.process.send_signal(signal.SIGSTOP)
    scene.eventually("the other one leads", lambda: pair.processes[second].role() == "leader")
    set_level(scene, 2)
    hung.process.send_signal(signal.SIGCONT)
    assert hung.process.wait(10) == LOST_LEASE_EXIT_CODE
    assert "the Lease is lost" in hung.log.read_text()
    set_level(scene, 3)
    assert pair.lease()["holderIdentity"] == second
    assert pair.writers() == [first, second]

    pair.again(first)
    apiserver = control_plane.apiserver.pid()
    os.kill(apiserver, signal.SIGSTOP)
    try:
        assert pair.processes[second].process.wait(10) == LOST_LEASE_EXIT_CODE
        assert pair.leader() == ""
    finally:
        os.kill(apiserver, signal.SIGCONT)
    scene.eventually("one leads again", lambda: pair.leader() == first)
    set_level(scene, 1)
    assert pair.writers() == [first, second, first]
