"""A real Kubernetes of one node on this machine: every program started here, and all of it removable."""

import json
import os
import socket
import tempfile
from pathlib import Path

import binaries
import leftovers
import node_config
from console import HarnessError, say, step
from control_plane import ControlPlane
from node_config import API_PORT, LINK, NODE_IP, NODE_NAME, Folders
from paths import KUBECONFIG
from processes import Daemon, run, wait_until

FOLDERS = Folders()
NAMESPACE = "k8s.io"  # where the kubelet's containerd keeps its containers and images
READY_SECONDS = 90.0
DAEMONS = ("kube-proxy", "coredns", "kubelet", "kube-scheduler", "kube-controller-manager")


def up() -> None:
    """Start the node, or say that it runs; what an earlier, cut-off run left behind is removed first.

    Raises HarnessError when not root, when another Kubernetes uses the machine, or when a program does not start.
    """
    if os.geteuid():
        raise HarnessError(
            "starting Kubernetes on this machine itself needs root. Either run this as root, or export KUBECONFIG "
            "for a running cluster, or install Docker and kind"
        )
    programs = binaries.ensure()
    if _healthy(programs):
        say("  the embedded node already runs")
        return
    down(quiet=True)
    if leftovers.other_kubernetes():
        raise HarnessError("another Kubernetes runs on this machine (its iptables chains are there); stop it first")
    try:
        _start(programs)
    except BaseException:
        say(f"  logs: {FOLDERS.run}/*.log; `down` cleans up")
        raise


def down(quiet: bool = False) -> None:
    """Stop all that `up` started and remove its traces; built programs, images and models stay cached."""
    if not FOLDERS.run.exists():
        if not quiet:
            say("  nothing runs here")
        return
    with step("stopping the embedded node"):
        for name in DAEMONS:
            _daemon(name).stop()
        _purge_containers()
        for name in ("containerd", "kube-apiserver", "etcd"):
            _daemon(name).stop()
        leftovers.remove(FOLDERS)
        KUBECONFIG.unlink(missing_ok=True)


def restart_apiserver() -> None:
    """End kube-apiserver and start it again: same address, same data. Raises HarnessError when the node doesn't run."""
    programs = binaries.ensure()
    if not _daemon("kube-apiserver").running():
        raise HarnessError("the embedded node doesn't run")
    with step("restarting kube-apiserver"):
        plane = _control_plane(programs)
        plane.apiserver.stop()
        plane.start()


def ctr(*arguments: str | Path) -> str:
    """Run containerd's own client at this node's containerd."""
    return run(*ctr_command(*arguments))


def ctr_command(*arguments: str | Path) -> list[str]:
    """The command line of `ctr`."""
    return ["ctr", "--address", str(FOLDERS.socket), "--namespace", NAMESPACE, *map(str, arguments)]


def _daemon(name: str) -> Daemon:
    return Daemon(name, FOLDERS.run)


def _start(programs: Path) -> None:
    for folder in (FOLDERS.config / "cni", FOLDERS.images):
        folder.mkdir(parents=True, exist_ok=True)
    with step("etcd and kube-apiserver"):
        _make_network()
        plane = _control_plane(programs)
        plane.start()
    with step("containerd"):
        _start_containerd(programs)
    with step("controller manager, scheduler, kubelet, proxy, DNS"):
        _start_kubernetes(programs, plane)
    with step("the node is Ready"):
        wait_until("the node is Ready", lambda: _ready(programs), READY_SECONDS)
    KUBECONFIG.touch(mode=0o600)
    KUBECONFIG.write_bytes(plane.kubeconfig.read_bytes())


def _control_plane(programs: Path) -> ControlPlane:
    return ControlPlane(
        FOLDERS.run,
        programs,
        address=NODE_IP,
        port=API_PORT,
        service_cidr=node_config.SERVICE_CIDR,
        service_ip=node_config.SERVICE_IP,
        users=node_config.USERS,
    )


def _make_network() -> None:
    """An address of the node's own (a bridge without ports, which every kernel has), and a way out for pods."""
    run("ip", "link", "add", LINK, "type", "bridge")
    run("ip", "address", "add", f"{NODE_IP}/32", "dev", LINK)
    run("ip", "link", "set", LINK, "up")
    leftovers.allow_pods_out(FOLDERS)
    _write_json(FOLDERS.config / "cni" / "10-sixfold.conflist", node_config.cni(FOLDERS))


def _start_containerd(programs: Path) -> None:
    config = FOLDERS.config / "containerd.toml"
    config.write_text(node_config.containerd(FOLDERS))
    daemon = _daemon("containerd")

    def start() -> None:
        daemon.start(["containerd", "--config", config])
        daemon.wait_ready(_containerd_answers, READY_SECONDS)

    start()
    if _purge_containers():  # those of a run that was cut off; CRI must not find them
        daemon.stop()
        start()
    if node_config.PAUSE_IMAGE not in ctr("images", "list", "--quiet"):
        _import_pause(programs)


def _containerd_answers() -> bool:
    try:
        return bool(ctr("version"))
    except HarnessError:
        return False


def _purge_containers() -> bool:
    """Remove every container of this containerd; False if there were none (or it does not run)."""
    if not _daemon("containerd").running():
        return False
    containers = ctr("containers", "list", "--quiet").split()
    for task in ctr("tasks", "list", "--quiet").split():
        try:
            ctr("tasks", "delete", "--force", task)
        except HarnessError:  # it ended by itself in between
            continue
    if containers:
        ctr("containers", "delete", *containers)
    return bool(containers)


def _import_pause(programs: Path) -> None:
    """The pods' first container, from scratch: there is no registry to pull it from."""
    storage = FOLDERS.run / "pause-image"
    buildah = ("buildah", "--root", storage, "--runroot", storage / "run", "--storage-driver", "vfs")
    with tempfile.TemporaryDirectory() as context:
        dockerfile = Path(context) / "Dockerfile"
        dockerfile.write_text('FROM scratch\nCOPY pause /pause\nUSER 65535:65535\nENTRYPOINT ["/pause"]\n')
        (Path(context) / "pause").write_bytes((programs / "pause").read_bytes())
        (Path(context) / "pause").chmod(0o755)
        archive = Path(context) / "pause.tar"
        run(*buildah, "build", "--quiet", "--isolation", "chroot", "--tag", node_config.PAUSE_IMAGE, context)
        run(*buildah, "push", "--quiet", node_config.PAUSE_IMAGE, f"oci-archive:{archive}:{node_config.PAUSE_IMAGE}")
        ctr("images", "import", archive)


def _start_kubernetes(programs: Path, plane: ControlPlane) -> None:
    keys = plane.keys
    flags = node_config.controller_manager_flags(
        plane.kubeconfig_of("controller-manager"), keys.ca, keys.service_accounts
    )
    scheduler = [f"--kubeconfig={plane.kubeconfig_of('scheduler')}", "--leader-elect=false", "--secure-port=0"]
    _daemon("kube-controller-manager").start([programs / "kube-controller-manager", *flags])
    _daemon("kube-scheduler").start([programs / "kube-scheduler", *scheduler])

    for cgroup in leftovers.cgroup_folders():
        cgroup.mkdir(exist_ok=True)
    kubelet = _write_json(FOLDERS.config / "kubelet.json", node_config.kubelet(FOLDERS, keys.ca))
    arguments = [f"--config={kubelet}", f"--kubeconfig={plane.kubeconfig_of('kubelet')}"]
    arguments += [f"--root-dir={FOLDERS.kubelet}", f"--cert-dir={FOLDERS.kubelet / 'pki'}"]
    arguments += [f"--hostname-override={NODE_NAME}", f"--node-ip={NODE_IP}"]
    _daemon("kubelet").start([programs / "kubelet", *arguments])

    proxy = _write_json(FOLDERS.config / "kube-proxy.json", node_config.kube_proxy(plane.kubeconfig_of("proxy")))
    _daemon("kube-proxy").start([programs / "kube-proxy", f"--config={proxy}"])

    addons = {"apiVersion": "v1", "kind": "List", "items": node_config.addons()}
    kubectl = (programs / "kubectl", "--kubeconfig", plane.kubeconfig)
    run(*kubectl, "apply", "--server-side", "--filename", "-", stdin=json.dumps(addons))
    corefile = FOLDERS.config / "Corefile"
    resolv_conf = Path("/etc/resolv.conf").read_text()
    corefile.write_text(node_config.corefile(plane.kubeconfig_of("dns"), resolv_conf))
    dns = _daemon("coredns")
    dns.start([programs / "coredns", "-conf", corefile])
    dns.wait_ready(_dns_listens, READY_SECONDS)


def _dns_listens() -> bool:
    try:
        socket.create_connection((NODE_IP, node_config.DNS_PORT), timeout=1).close()
    except OSError:
        return False
    return True


def _ready(programs: Path) -> bool:
    path = 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'
    kubectl = (programs / "kubectl", "--kubeconfig", FOLDERS.run / "admin.kubeconfig")
    try:
        return run(*kubectl, "get", "node", NODE_NAME, "--request-timeout=5s", "--output", path) == "True"
    except HarnessError:
        return False


def _healthy(programs: Path) -> bool:
    names = (*DAEMONS, "containerd", "kube-apiserver", "etcd")
    return KUBECONFIG.exists() and all(_daemon(name).running() for name in names) and _ready(programs)


def _write_json(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content, indent=2))
    return path
