"""What the embedded node's programs are told: addresses, configuration files, command lines. No I/O here."""

from dataclasses import dataclass
from pathlib import Path

from paths import CLUSTER

NODE_NAME = "sixfold"
LINK = "sixfold0"
NODE_IP = "10.99.0.1"
POD_CIDR = "10.97.0.0/16"
SERVICE_CIDR = "10.98.0.0/16"
SERVICE_IP = "10.98.0.1"
API_PORT = 6443
DNS_PORT = 53
CLUSTER_DOMAIN = "cluster.local"
PAUSE_IMAGE = "localhost/sixfold-pause:1"
CGROUP = "sixfold"
USERS = {
    "kubelet": (f"system:node:{NODE_NAME}", "system:nodes"),
    "dns": ("sixfold-dns", ""),
}


@dataclass(frozen=True)
class Folders:
    """The state of one embedded node; images outlive it, everything in `run` goes with it."""

    run: Path = CLUSTER / "node"
    images: Path = CLUSTER / "containerd"

    @property
    def socket(self) -> Path:
        return self.run / "containerd.sock"

    @property
    def kubelet(self) -> Path:
        return self.run / "kubelet"

    @property
    def config(self) -> Path:
        return self.run / "config"


def containerd(folders: Folders) -> str:
    """containerd with its own folders and socket, so that it never meets a system-wide one (TOML).

    `restrict_oom_score_adj`: without CAP_SYS_RESOURCE no sandbox would start.
    """
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""
version = 2
root = "{folders.images}"
state = "{folders.run / "containerd"}"
[grpc]
  address = "{folders.socket}"
[{cri}]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [{cri}.cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folders.config / "cni"}"
  [{cri}.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [{cri}.containerd.runtimes.runc.options]
      Root = "{folders.run / "runc"}"
"""


def cni(folders: Folders) -> dict[str, object]:
    """One routed link a pod and no bridge, so that services work whether or not bridges are filtered."""
    ipam = {"type": "host-local", "subnet": POD_CIDR, "dataDir": str(folders.run / "ipam")}
    ipam["routes"] = [{"dst": "0.0.0.0/0"}]  # type: ignore[assignment]
    return {"cniVersion": "0.4.0", "name": "sixfold", "plugins": [{"type": "ptp", "ipam": ipam}]}


def kubelet(folders: Folders, ca: Path) -> dict[str, object]:
    """KubeletConfiguration. Images are never collected: there may be no registry to pull them from again."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": NODE_IP,
        "healthzPort": 0,
        "authentication": {"anonymous": {"enabled": False}, "x509": {"clientCAFile": str(ca)}},
        "containerRuntimeEndpoint": f"unix://{folders.socket}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{CGROUP}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "clusterDNS": [NODE_IP],
        "clusterDomain": CLUSTER_DOMAIN,
        "podLogsDir": str(folders.run / "pod-logs"),
        "volumePluginDir": str(folders.run / "volume-plugins"),
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1Gi", "imagefs.available": "1Gi"},
    }


def kube_proxy(kubeconfig: Path) -> dict[str, object]:
    """KubeProxyConfiguration: iptables; the connection tracker's limits stay as the machine has them."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "hostnameOverride": NODE_NAME,
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "clusterCIDR": POD_CIDR,
        "bindAddress": NODE_IP,
        "nodePortAddresses": [f"{NODE_IP}/32"],
        "metricsBindAddress": f"{NODE_IP}:10249",
        "healthzBindAddress": f"{NODE_IP}:10256",
        "oomScoreAdj": 0,
        "iptables": {"localhostNodePorts": False},
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }


def corefile(kubeconfig: Path, resolv_conf: str) -> str:
    """CoreDNS on the node's address; names outside the cluster go where the machine itself asks."""
    lines = (line.split() for line in resolv_conf.splitlines())
    servers = [words[1] for words in lines if len(words) > 1 and words[0] == "nameserver"]
    forward = f"  forward . {' '.join(servers)}\n" if servers else ""
    return (
        f".:{DNS_PORT} {{\n  bind {NODE_IP}\n  errors\n  cache 5\n"
        f"  kubernetes {CLUSTER_DOMAIN} in-addr.arpa ip6.arpa {{\n"
        f"    kubeconfig {kubeconfig}\n    fallthrough in-addr.arpa ip6.arpa\n  }}\n{forward}}}\n"
    )


def controller_manager_flags(kubeconfig: Path, ca: Path, service_accounts: Path) -> list[str]:
    """kube-controller-manager: one copy, no port."""
    return [
        f"--kubeconfig={kubeconfig}",
        f"--root-ca-file={ca}",
        f"--service-account-private-key-file={service_accounts}",
        "--use-service-account-credentials=true",
        "--leader-elect=false",
        "--secure-port=0",
    ]


def addons() -> list[dict[str, object]]:
    """Objects that a cluster is expected to have: the right of its DNS to read."""
    name = "sixfold-dns"
    rules = [
        {"apiGroups": [""], "resources": ["services", "namespaces"], "verbs": ["list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]
    group = "rbac.authorization.k8s.io"
    metadata = {"name": name}
    return [
        {"apiVersion": f"{group}/v1", "kind": "ClusterRole", "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": name},
            "subjects": [{"apiGroup": group, "kind": "User", "name": name}],
        },
    ]
