"""A cluster without kubelets: kube-apiserver, controllers, scheduler, and kwok's nodes, whose pods run at once.

Pods get loopback addresses of `POD_CIDR`, so that a process of this machine can answer for them.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import binaries
from control_plane import ControlPlane, temporary_control_plane
from node_config import controller_manager_flags
from paths import KWOK_SOURCE
from processes import Daemon, run, wait_until

POD_CIDR = "127.45.0.0/16"
READY_SECONDS = 60.0
REQUESTS_A_SECOND = 2000
"""What the cluster's own parts may ask for: their usual limits are for a server shared with others."""
FEATURES = "--feature-gates=WatchList=false"
"""etcd 3.4 can't stream lists; a server that doesn't offer it spares its clients trying."""


@contextmanager
def kwok_cluster(*extra_flags: str, users: dict[str, tuple[str, str]] | None = None) -> Iterator[ControlPlane]:
    """Gone with its data at the end, or with this process. Arguments as for `temporary_control_plane`."""
    kwok = binaries.kwok()
    limits = f"--max-requests-inflight={REQUESTS_A_SECOND}", f"--max-mutating-requests-inflight={REQUESTS_A_SECOND}"
    with temporary_control_plane(FEATURES, *limits, *extra_flags, users=users) as plane:
        daemons: list[Daemon] = []
        try:
            for name, command in _commands(plane, kwok).items():
                daemons.append(Daemon(name, plane.folder))
                daemons[-1].start(command, die_with_parent=True)
            _add_node(plane)
            yield plane
        finally:
            for daemon in reversed(daemons):
                daemon.stop()


def _commands(plane: ControlPlane, kwok: Path) -> dict[str, list[str | Path]]:
    programs = binaries.ensure(control_plane_only=True)
    rate = [f"--kube-api-qps={REQUESTS_A_SECOND}", f"--kube-api-burst={REQUESTS_A_SECOND}"]
    controllers = controller_manager_flags(
        plane.kubeconfig_of("controller-manager"), plane.keys.ca, plane.keys.service_accounts
    )
    scheduler = [f"--kubeconfig={plane.kubeconfig_of('scheduler')}", "--leader-elect=false", "--secure-port=0"]
    return {
        "kube-controller-manager": [programs / "kube-controller-manager", *controllers, *rate],
        "kube-scheduler": [programs / "kube-scheduler", *scheduler, *rate],
        "kwok": [
            kwok,
            f"--kubeconfig={plane.kubeconfig}",
            f"--config={KWOK_SOURCE / 'stages.yaml'}",
            f"--cidr={POD_CIDR}",
            "--manage-all-nodes",
            "--node-lease-duration-seconds=40",
        ],
    }


def _add_node(plane: ControlPlane) -> None:
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "kwok"}, "spec": {"podCIDR": POD_CIDR}}
    kubectl = binaries.kubectl(), "--kubeconfig", plane.kubeconfig
    run(*kubectl, "apply", "--server-side", "--filename", "-", stdin=json.dumps(node))
    path = 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'
    wait_until(
        "kwok's node is Ready", lambda: run(*kubectl, "get", "node", "kwok", "--output", path) == "True", READY_SECONDS
    )
