"""etcd and kube-apiserver alone: for API tests, and as the lower half of the embedded node.

A test needs three lines::

    with temporary_control_plane() as control_plane:
        os.environ["KUBECONFIG"] = str(control_plane.kubeconfig)   # an administrator
        control_plane.restart_apiserver()                          # same address, same data
"""

import base64
import json
import secrets
import socket
import ssl
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import binaries
from pki import Keys
from processes import Daemon

LOOPBACK = "127.0.0.1"
READY_SECONDS = 90.0
USERS = {
    "admin": ("sixfold-admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
    "proxy": ("system:kube-proxy", ""),
}


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody listens on at the moment."""
    sockets = [socket.create_server((LOOPBACK, 0)) for _ in range(count)]
    try:
        return [listener.getsockname()[1] for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()


class ControlPlane:
    """etcd (no fsync: nothing here outlives the machine) and kube-apiserver with RBAC and token users.

    `kubeconfig`, `url`, `token` and `ca_file` are an administrator's way in. Nothing listens on more than
    `address` (kube-apiserver) and the loopback address (etcd, both sides with certificates).
    """

    def __init__(
        self,
        folder: Path,
        programs: Path,
        *,
        address: str = LOOPBACK,
        port: int = 0,
        service_cidr: str = "10.98.0.0/16",
        service_ip: str = "10.98.0.1",
        users: Mapping[str, tuple[str, str]] | None = None,
        extra_flags: tuple[str, ...] = (),
        die_with_parent: bool = False,
    ) -> None:
        self.folder = folder
        self.address = address
        self.keys = Keys(folder / "pki")
        self._programs = programs
        self._service_cidr, self._service_ip = service_cidr, service_ip
        self._users = {**USERS, **(users or {})}
        self._extra_flags = extra_flags
        self._die_with_parent = die_with_parent
        self._etcd_port, self._peer_port, free_port = self._ports()
        self.port = port or free_port
        self.etcd = Daemon("etcd", folder)
        self.apiserver = Daemon("kube-apiserver", folder)
        self.url = f"https://{address}:{self.port}"
        self.ca_file = self.keys.ca
        self.kubeconfig = folder / "admin.kubeconfig"
        self.token = ""

    def start(self) -> None:
        """Start what is not running and wait until kube-apiserver is ready; HarnessError with its log if not."""
        self.keys.ensure(sorted({LOOPBACK, self.address, self._service_ip}))
        tokens = self._tokens()
        self.token = tokens["admin"]
        for user, token in tokens.items():
            self._write_kubeconfig(user, token)
        self.etcd.start(self._etcd_command(), die_with_parent=self._die_with_parent)
        self._start_apiserver()

    def stop(self) -> None:
        """End both processes; the data stays in `folder`."""
        self.apiserver.stop()
        self.etcd.stop()

    def restart_apiserver(self) -> None:
        """End kube-apiserver and start it again at the same address with the same data."""
        self.apiserver.stop()
        self._start_apiserver()

    def kubeconfig_of(self, user: str) -> Path:
        """The kubeconfig of one of the users that this control plane knows."""
        return self.folder / f"{user}.kubeconfig"

    def _start_apiserver(self) -> None:
        self.apiserver.start(self._apiserver_command(), die_with_parent=self._die_with_parent)
        trust = ssl.create_default_context(cafile=str(self.ca_file))
        request = urllib.request.Request(f"{self.url}/readyz", headers={"Authorization": f"Bearer {self.token}"})

        def ready() -> bool:
            try:
                with urllib.request.urlopen(request, timeout=5, context=trust) as answer:
                    return bool(answer.status == 200)
            except (OSError, urllib.error.URLError):
                return False

        self.apiserver.wait_ready(ready, READY_SECONDS)

    def _ports(self) -> list[int]:
        """etcd's two ports and one for kube-apiserver, kept in the folder for as long as its data is."""
        kept = self.folder / "ports.json"
        if kept.exists():
            ports: list[int] = json.loads(kept.read_text())
            return ports
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        ports = free_ports(3)
        kept.write_text(json.dumps(ports))
        return ports

    def _tokens(self) -> dict[str, str]:
        """A random token for each user, kept in kube-apiserver's token file."""
        path = self.folder / "tokens.csv"
        if not path.exists():
            lines = [
                f'{secrets.token_urlsafe(32)},{name},{user},"{groups}"\n'
                for user, (name, groups) in self._users.items()
            ]
            path.touch(mode=0o600)
            path.write_text("".join(lines))
        rows = [line.split(",") for line in path.read_text().splitlines()]
        return {row[2]: row[0] for row in rows}

    def _write_kubeconfig(self, user: str, token: str) -> None:
        authority = base64.b64encode(self.ca_file.read_bytes()).decode()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "sixfold-embedded",
            "clusters": [{"name": "sixfold", "cluster": {"server": self.url, "certificate-authority-data": authority}}],
            "users": [{"name": user, "user": {"token": token}}],
            "contexts": [{"name": "sixfold-embedded", "context": {"cluster": "sixfold", "user": user}}],
        }
        path = self.kubeconfig_of(user)
        path.touch(mode=0o600)
        path.write_text(json.dumps(config, indent=2))

    def _etcd_command(self) -> list[str]:
        keys, client, peer = (
            self.keys,
            f"https://{LOOPBACK}:{self._etcd_port}",
            f"https://{LOOPBACK}:{self._peer_port}",
        )
        command = ["etcd", "--name=default", f"--data-dir={self.folder / 'etcd'}", "--unsafe-no-fsync"]
        command += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
        command += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
        command += [f"--initial-cluster=default={peer}", "--logger=zap", "--log-level=warn"]
        for side in ("", "peer-"):
            command += [f"--{side}cert-file={keys.certificate}", f"--{side}key-file={keys.key}"]
            command += [f"--{side}trusted-ca-file={keys.ca}", f"--{side}client-cert-auth"]
        return command

    def _apiserver_command(self) -> list[str]:
        keys = self.keys
        return [
            str(self._programs / "kube-apiserver"),
            f"--bind-address={self.address}",
            f"--advertise-address={self.address}",
            f"--secure-port={self.port}",
            f"--tls-cert-file={keys.certificate}",
            f"--tls-private-key-file={keys.key}",
            f"--etcd-servers=https://{LOOPBACK}:{self._etcd_port}",
            f"--etcd-cafile={keys.ca}",
            f"--etcd-certfile={keys.certificate}",
            f"--etcd-keyfile={keys.key}",
            f"--kubelet-client-certificate={keys.certificate}",
            f"--kubelet-client-key={keys.key}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=Node,RBAC",
            "--anonymous-auth=false",
            f"--service-cluster-ip-range={self._service_cidr}",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={keys.service_accounts_public}",
            f"--service-account-signing-key-file={keys.service_accounts}",
            "--allow-privileged=true",
            "--profiling=false",
            *self._extra_flags,
        ]


@contextmanager
def temporary_control_plane(
    *extra_flags: str, users: Mapping[str, tuple[str, str]] | None = None
) -> Iterator[ControlPlane]:
    """A fresh control plane on random loopback ports, gone with its data at the end (or with this process).

    No controllers run, so nothing creates service accounts: pods are admitted without one.
    """
    programs = binaries.ensure(control_plane_only=True)
    with tempfile.TemporaryDirectory(prefix="sixfold-control-plane-") as folder:
        control_plane = ControlPlane(
            Path(folder),
            programs,
            users=users,
            extra_flags=(
                "--endpoint-reconciler-type=none",
                "--disable-admission-plugins=ServiceAccount",
                *extra_flags,
            ),
            die_with_parent=True,
        )
        try:
            control_plane.start()
            yield control_plane
        finally:
            control_plane.stop()
