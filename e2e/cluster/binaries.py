"""The programs of a cluster: Debian packages, and Go programs built once and cached by their sources."""

import hashlib
import os
import re
import shutil
from pathlib import Path

import packages
from console import HarnessError, step
from paths import BINARIES, KWOK_SOURCE, NODE_SOURCE, PROMETHEUS_SOURCE
from processes import exclusive, run

HELM = "helm.sh/helm/v3/cmd/helm@v3.22.0"
KUBERNETES_PROGRAMS = (
    *("kube-apiserver", "kube-controller-manager", "kube-scheduler"),
    *("kubelet", "kube-proxy", "kubectl"),
)

# What each needs, by the program that shows it is there, and the Debian package that brings it.
CONTROL_PLANE_PACKAGES = {"etcd": "etcd-server", "openssl": "openssl", "setpriv": "util-linux"}
NODE_PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "buildah": "buildah",
    "skopeo": "skopeo",
    "debootstrap": "debootstrap",
    "iptables": "iptables",
    "ip": "iproute2",
    "conntrack": "conntrack",
    "mount": "mount",
}


def ensure(control_plane_only: bool = False) -> Path:
    """The folder of the programs; builds and installs what is missing, one caller at a time.

    Raises HarnessError when a build or an installation fails, or when there is no Go.
    """
    folder = BINARIES / source_hash()
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / ".lock"):
        packages.install(CONTROL_PLANE_PACKAGES if control_plane_only else CONTROL_PLANE_PACKAGES | NODE_PACKAGES)
        _build(folder, "node", "the Kubernetes programs (minutes, the first time)", ".", _version_flags())
        for name in KUBERNETES_PROGRAMS:
            if not (folder / name).exists():
                (folder / name).symlink_to("node")
        if not control_plane_only:
            _build(folder, "pause", "pause", "./pause")
            _build(folder, "coredns", "coredns", "./coredns")
            _install_helm(folder)
    return folder


def helm() -> Path:
    """The helm of the machine, else one that is built here."""
    if found := shutil.which("helm"):
        return Path(found)
    folder = BINARIES / source_hash()
    with exclusive(folder / ".lock"):
        _install_helm(folder)
    return folder / "helm"


def prometheus() -> Path:
    """The folder of a prometheus and a promtool that know Kubernetes; built here once, in minutes."""
    folder = _module_folder(PROMETHEUS_SOURCE)
    with exclusive(folder / ".lock"):
        for name, what in (("prometheus", "Prometheus (minutes, the first time)"), ("promtool", "promtool")):
            _build(folder, name, what, f"github.com/prometheus/prometheus/cmd/{name}", source=PROMETHEUS_SOURCE)
    return folder


def kwok() -> Path:
    """The kwok of the machine, else one that is built here: fake nodes, for scale."""
    if found := shutil.which("kwok"):
        return Path(found)
    folder = _module_folder(KWOK_SOURCE)
    with exclusive(folder / ".lock"):
        _build(folder, "kwok", "kwok", "sigs.k8s.io/kwok/cmd/kwok", source=KWOK_SOURCE)
    return folder / "kwok"


def kubectl() -> Path:
    """The kubectl of the machine, else the one that is built here."""
    return Path(shutil.which("kubectl") or ensure(control_plane_only=True) / "kubectl")


def kubernetes_version() -> str:
    """The version that go.mod names, as 1.2.3."""
    found = re.search(r"^\tk8s\.io/kubernetes v(\d+\.\d+\.\d+)$", (NODE_SOURCE / "go.mod").read_text(), re.M)
    if found is None:
        raise HarnessError(f"{NODE_SOURCE / 'go.mod'} requires no released k8s.io/kubernetes")
    return found[1]


def source_hash() -> str:
    """12 hex digits that name the sources and versions that the programs are built from."""
    digest = hashlib.sha256(HELM.encode())
    for path in sorted(path for path in NODE_SOURCE.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(NODE_SOURCE)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _module_folder(source: Path) -> Path:
    """Where the programs of a module of its own are kept, by the versions that it names."""
    digest = hashlib.sha256((source / "go.mod").read_bytes())
    folder = BINARIES / f"{source.name}-{digest.hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _version_flags() -> str:
    """Linker flags that put the Kubernetes version where `kubectl version` and Helm look for it."""
    version = kubernetes_version()
    major, minor, _ = version.split(".")
    values = {"gitVersion": f"v{version}", "gitMajor": major, "gitMinor": minor}
    return " ".join(f"-X k8s.io/component-base/version.{name}={value}" for name, value in values.items())


def _go_environment() -> dict[str, str]:
    if shutil.which("go") is None:
        raise HarnessError("Go 1.24 or newer is needed to build Kubernetes, and there is no `go` in PATH")
    return {**os.environ, "CGO_ENABLED": "0", "GOWORK": "off"}


def _build(
    folder: Path, name: str, what: str, package: str, linker_flags: str = "", source: Path = NODE_SOURCE
) -> None:
    """Build one program of a module, unless the cache has it."""
    if (folder / name).exists():
        return
    partial = folder / f"{name}.partial"
    with step(f"building {what}"):
        flags = f"-s -w {linker_flags}".strip()
        command = ("go", "-C", source, "build", "-mod=readonly", "-trimpath", "-buildvcs=false")
        run(*command, "-ldflags", flags, "-o", partial, package, env=_go_environment())
    partial.rename(folder / name)


def _install_helm(folder: Path) -> None:
    if (folder / "helm").exists():
        return
    partial = folder / "partial"
    with step("building helm"):
        run("go", "install", "-trimpath", "-ldflags", "-s -w", HELM, env=_go_environment() | {"GOBIN": str(partial)})
    (partial / "helm").rename(folder / "helm")
    partial.rmdir()
