"""The operator with 500 policies and 500 variants on a cluster of kwok's nodes, beside a loop that applies the same.

Both begin with the policies there and nothing else, and end when all Jobs are done and all Deployments available; the
operator also when every policy is Ready and each of its pods reports its level. The loop knows what to apply before it
begins, and waits for nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import audit
import bare_loop
import binaries
import installed
import operator_fleet as fleet
from control_plane import ControlPlane
from kwok_cluster import kwok_cluster
from processes import Daemon
from processes import run as run_command

from sixfold_operator.controller import CHILD_SELECTOR
from sixfold_operator.kube import Kube

GOAL = 0.5
"""At most twice the time of the loop."""
MOST_REQUESTS_A_MINUTE, MOST_MEMORY_MIB = 60.0, 150.0
DEFAULT_LEVEL, CHANGED_LEVEL = 3, 2
WORKERS = 8
QUIET_SECONDS = 5.0


@dataclass(frozen=True)
class Phase:
    """What a change cost, and the rest after it.

    Attributes:
        seconds: until everything ran as it should.
        writes: to the API, a policy, its variant's included.
        cpu_seconds: of the operator.
        rest_requests_a_minute: of all kinds, the Lease's included.
        rest_writes: of objects other than the Lease, while every policy and variant was reconciled once more.
        memory_mib: resident at the end.
    """

    seconds: float
    writes: float
    cpu_seconds: float
    rest_requests_a_minute: float
    rest_writes: int
    memory_mib: float


@dataclass(frozen=True)
class Measured:
    """One size of fleet."""

    policies: int
    cold: Phase
    change: Phase
    highest_memory_mib: float
    bare_seconds: float
    bare_apply_seconds: float


def run(quick: bool) -> dict[str, Any]:
    sizes, rest_seconds = ((10, 50), 30.0) if quick else ((50, 500), 300.0)
    small, large = (asyncio.run(measure(count, rest_seconds)) for count in sizes)
    phases = large.cold, large.change
    print(
        f"growth from {small.policies} to {large.policies}: time {large.cold.seconds / small.cold.seconds:.1f} times,"
    )
    print(f"  memory {large.cold.memory_mib - small.cold.memory_mib:+.0f} MiB")
    return {
        "ratio": round(large.bare_seconds / large.cold.seconds, 2),
        "goal": GOAL,
        "holds_at_rest": all(
            phase.rest_writes == 0
            and phase.rest_requests_a_minute < MOST_REQUESTS_A_MINUTE
            and phase.memory_mib < MOST_MEMORY_MIB
            for phase in phases
        ),
        "large": asdict(large),
        "small": asdict(small),
    }


def show(what: str, phase: Phase) -> None:
    print(
        f"  {what}: {phase.seconds:.1f} s, {phase.writes:.1f} writes a policy, {phase.cpu_seconds:.1f} s of CPU; then"
    )
    print(
        f"    {phase.rest_requests_a_minute:.0f} requests a minute, {phase.rest_writes} writes in a second reconcile",
        end="",
    )
    print(f" of all, {phase.memory_mib:.0f} MiB", flush=True)


async def measure(count: int, rest_seconds: float) -> Measured:
    """Two clusters, one after the other: the operator's, and the loop's."""
    with (
        tempfile.TemporaryDirectory(prefix="sixfold-bench-") as folder,
        _cluster(Path(folder), count, rest_seconds) as made,
    ):
        plane, chart = made
        kube = await _connect(plane, count)
        operator = fleet.Operator(chart, plane.folder / "operator.log")
        try:
            own = Own(Path(folder), kube, operator, count, rest_seconds)
            print(f"{count} policies and as many variants", flush=True)
            show("from cold", cold := await own.phase(DEFAULT_LEVEL))
            show("level of all", change := await own.phase(CHANGED_LEVEL))
            highest = operator.memory_mib("VmHWM")
        finally:
            operator.stop()
        manifests = await bare_loop.applied_objects(kube, CHILD_SELECTOR)
        await kube.close()
    with (
        tempfile.TemporaryDirectory(prefix="sixfold-bench-") as folder,
        _cluster(Path(folder), count, rest_seconds) as made,
    ):
        kube = await _connect(made[0], count)
        began = time.monotonic()
        await bare_loop.apply_all(kube, manifests, WORKERS)
        apply_seconds = time.monotonic() - began
        await fleet.until("all is available", lambda: fleet.all_available(kube, count))
        bare_seconds = time.monotonic() - began
        await kube.close()
    print(
        f"  highest memory {highest:.0f} MiB; bare loop {bare_seconds:.1f} s, of which {apply_seconds:.1f} s to apply"
    )
    return Measured(count, cold, change, highest, bare_seconds, apply_seconds)


@contextmanager
def _cluster(folder: Path, count: int, resync_seconds: float) -> Iterator[tuple[ControlPlane, installed.Installed]]:
    """With the chart, and somebody who answers for the pods."""
    with kwok_cluster(*audit.flags(folder, installed.USER)) as plane:
        values = f"--set=operator.resyncSeconds={resync_seconds:.0f}", f"--set=operator.workers={WORKERS}"
        chart = installed.install(plane, *values)
        kubectl = binaries.kubectl(), "--kubeconfig", plane.kubeconfig
        listing = {"apiVersion": "v1", "kind": "List", "items": fleet.ground(count)}
        run_command(*kubectl, "apply", "--server-side", "--filename", "-", stdin=json.dumps(listing))
        pods = Daemon("fake-pods", plane.folder)
        command = [sys.executable, Path(__file__).parent / "fake_pods.py", plane.kubeconfig]
        pods.start(command, die_with_parent=True)
        try:
            yield plane, chart
        finally:
            pods.stop()


async def _connect(plane: ControlPlane, count: int) -> Kube:
    """As an administrator, to a cluster where users have created their objects."""
    os.environ["KUBECONFIG"] = str(plane.kubeconfig)
    kube = await Kube.connect()
    await bare_loop.apply_all(kube, fleet.fleet(count), WORKERS)
    return kube


@dataclass
class Own:
    """The operator's side of a measurement."""

    folder: Path
    kube: Kube
    operator: fleet.Operator
    count: int
    rest_seconds: float

    async def phase(self, level: int) -> Phase:
        """Ask for the level and measure until all is at rest again, and a resync has passed since."""
        began_unix, began, cpu_seconds = time.time(), time.monotonic(), self.operator.cpu_seconds()
        if level != DEFAULT_LEVEL:
            await self._ask_for(level)
        await fleet.until("all is settled", lambda: fleet.all_settled(self.kube, self.count, level))
        seconds, cpu_seconds = time.monotonic() - began, self.operator.cpu_seconds() - cpu_seconds
        await self._quiet()
        rests_unix, reconciles = time.time(), await self.operator.reconciles()
        await asyncio.sleep(self.rest_seconds)
        rested = time.time() - rests_unix
        await fleet.until("a resync has passed", lambda: self._reconciled_again(reconciles))
        writes = sum(_counts(self.folder, began_unix, rests_unix).values())
        requests = sum(1 for _ in audit.requests(audit.log_file(self.folder), rests_unix, rests_unix + rested))
        again = sum(_counts(self.folder, rests_unix, time.time()).values())
        return Phase(
            seconds=round(seconds, 1),
            writes=round(writes / self.count, 2),
            cpu_seconds=round(cpu_seconds, 1),
            rest_requests_a_minute=round(60 * requests / rested, 1),
            rest_writes=again,
            memory_mib=round(self.operator.memory_mib(), 1),
        )

    async def _ask_for(self, level: int) -> None:
        policies, _ = await self.kube.list("InferencePolicy", None)
        manifests = [
            {
                "apiVersion": policy["apiVersion"],
                "kind": policy["kind"],
                "metadata": {key: policy["metadata"][key] for key in ("name", "namespace")},
                "spec": {**policy["spec"], "rollbackLevel": level},
            }
            for policy in policies
        ]
        await bare_loop.apply_all(self.kube, manifests, WORKERS)

    async def _quiet(self) -> None:
        """Until nothing was written for a while: pods that lag are asked until they report."""

        async def is_quiet() -> bool:
            return not _counts(self.folder, time.time() - QUIET_SECONDS, time.time())

        await fleet.until("nothing is written", is_quiet)

    async def _reconciled_again(self, before: float) -> bool:
        return await self.operator.reconciles() >= before + 2 * self.count


def _counts(folder: Path, since: float, until: float) -> Counter[str]:
    """Writes by verb and resource, the Lease's left out."""
    found = audit.requests(audit.log_file(folder), since, until)
    return Counter(f"{entry.verb} {entry.resource}" for entry in found if entry.writes and entry.resource != "leases")
