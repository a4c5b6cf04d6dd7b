"""Remove what an embedded node leaves on the machine, by names and paths that are only its own."""

import json
import os
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path

from console import HarnessError
from node_config import CGROUP, LINK, POD_CIDR, Folders
from processes import run, wait_until

MARK = "sixfold"  # the comment on the iptables rules that the harness adds itself
TABLES = ("nat", "filter", "mangle")
# Places that containerd and kubelet write to, wherever their own folders are; removed when nothing else is in them.
SOCKET_FOLDERS = ("/run/containerd/s", "/var/lib/kubelet/device-plugins")
CNI_RESULTS = "/var/lib/cni/results"
FIXED_FOLDERS: tuple[str, ...] = (
    *SOCKET_FOLDERS,
    "/run/containerd/runc/k8s.io",
    "/run/containerd/runc",
    "/run/containerd",
)
FIXED_FOLDERS += (CNI_RESULTS, "/var/lib/cni", "/var/log/containers", "/var/lib/kubelet")
IP_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")


def remove(folders: Folders) -> None:
    """End pods and shims, unmount, remove links, rules, cgroups and files.

    Nothing happens unless the node's folder exists: without it, a Kubernetes on this machine is someone else's.
    """
    if not folders.run.exists():
        return
    _end_processes(folders)
    _unmount(folders)
    if any(link["ifname"] == LINK for link in json.loads(run("ip", "-json", "link", "show"))):
        run("ip", "link", "delete", LINK)
    for command in ("iptables", "ip6tables"):
        _remove_rules(command)
    _remove_cgroups()
    _restore_forwarding(folders)
    _remove_files(folders)


def other_kubernetes() -> bool:
    """Whether the machine's packet filter holds chains of a Kubernetes."""
    return any(f":{chain}" in run("iptables-save") for chain in ("KUBE-SERVICES", "KUBE-FORWARD"))


def _end_processes(folders: Folders) -> None:
    """Kill every process in the pods' cgroups, and the shims of this containerd (known by its socket)."""
    for _ in range(3):  # a shim may have been starting a container
        pids = {int(pid) for file in _cgroup_files("cgroup.procs") for pid in file.read_text().split()}
        pids |= set(_shims(folders))
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if not pids:
            return
        wait_until("the pods' processes end", lambda gone=pids: not any(map(_alive, gone)), 20)  # type: ignore[misc]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _shims(folders: Folders) -> Iterable[int]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "containerd-shim" in command[0] and str(folders.socket) in command:
            yield int(process.name)


def cgroup_folders() -> list[Path]:
    """The node's own top cgroup in each hierarchy (one hierarchy with cgroup v2)."""
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        return [root / CGROUP]
    hierarchies = [path for path in root.iterdir() if path.is_dir() and not path.is_symlink()]
    return [path / CGROUP for path in hierarchies if (path / "cgroup.procs").exists()]


def _cgroup_files(name: str) -> Iterable[Path]:
    for folder in cgroup_folders():
        yield from folder.rglob(name)


def _remove_cgroups() -> None:
    for folder in cgroup_folders():
        inner = sorted((path for path in folder.rglob("*") if path.is_dir()), key=lambda path: -len(path.parts))
        for path in [*inner, folder]:
            if path.exists():
                path.rmdir()


def _unmount(folders: Folders) -> None:
    """Unmount everything below the node's folder, innermost first."""
    for target in sorted(_mounts(folders), key=len, reverse=True):
        run("umount", "--lazy", target)


def _mounts(folders: Folders) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    targets = (line.split()[4].replace("\\040", " ") for line in lines)
    return [target for target in targets if Path(target).is_relative_to(folders.run)]


def _remove_rules(command: str) -> None:
    """Delete the chains of Kubernetes, the rules that lead to them, and the harness's own, table by table."""
    if not shutil.which(command):
        return
    for table in TABLES:
        saved = run(f"{command}-save", "-t", table).splitlines()
        chains = [line[1:].split()[0] for line in saved if line.startswith(":KUBE-")]
        rules = [line for line in saved if line.startswith("-A ") and not line.startswith("-A KUBE-")]
        ours = [rule for rule in rules if "-j KUBE-" in rule or f"--comment {MARK}" in rule]
        if not chains and not ours:
            continue
        script = [f"*{table}", *(f":{chain} - [0:0]" for chain in chains)]
        script += ["-D " + rule.removeprefix("-A ") for rule in ours]
        script += [*(f"-X {chain}" for chain in chains), "COMMIT", ""]
        run(f"{command}-restore", "--noflush", stdin="\n".join(script))


def allow_pods_out(folders: Folders) -> None:
    """Forward packets of pods, and let them out under the machine's address; the earlier setting is kept."""
    (folders.run / "ip_forward").write_text(IP_FORWARD.read_text())
    IP_FORWARD.write_text("1")
    comment = ("-m", "comment", "--comment", MARK)
    outside = ("-s", POD_CIDR, "!", "-d", POD_CIDR)
    run("iptables", "-t", "nat", "-A", "POSTROUTING", *outside, *comment, "-j", "MASQUERADE")
    for direction in ("-s", "-d"):
        run("iptables", "-I", "FORWARD", direction, POD_CIDR, *comment, "-j", "ACCEPT")


def _restore_forwarding(folders: Folders) -> None:
    kept = folders.run / "ip_forward"
    if kept.exists():
        IP_FORWARD.write_text(kept.read_text())
        kept.unlink()


def _remove_files(folders: Folders) -> None:
    """Delete the node's state, and what was written elsewhere: log links, CNI results, sockets without a listener."""
    for link in Path("/var/log/containers").glob("*.log"):
        if link.is_symlink() and str(link.readlink()).startswith(str(folders.run)):
            link.unlink()
    for sandbox in (folders.images / "io.containerd.grpc.v1.cri" / "sandboxes").glob("*"):
        for result in Path(CNI_RESULTS).glob(f"*-{sandbox.name}-*"):
            result.unlink()
    listening = Path("/proc/net/unix").read_text()
    for folder in map(Path, SOCKET_FOLDERS):
        for path in folder.glob("*"):
            if path.is_socket() and str(path) not in listening:
                path.unlink(missing_ok=True)
    for fixed in map(Path, FIXED_FOLDERS):
        if fixed.is_dir() and not any(fixed.iterdir()):
            fixed.rmdir()
    if still_mounted := _mounts(folders):
        raise HarnessError("could not unmount " + ", ".join(still_mounted))
    shutil.rmtree(folders.run)
