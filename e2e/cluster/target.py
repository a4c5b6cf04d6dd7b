"""Which cluster is meant: a running one, else kind, else the embedded node; the same answer for every verb."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import binaries
from console import HarnessError, say
from paths import CLUSTER, KUBECONFIG
from processes import run

KIND_CLUSTER = "sixfold"
CHOICE = CLUSTER / "target.json"


@dataclass(frozen=True)
class Target:
    """A cluster to use. `given` is one that the person runs; the others are ours to start and to stop."""

    kind: Literal["given", "kind", "embedded"]
    kubeconfig: Path

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl against this cluster and nothing else; HarnessError with its words if it fails."""
        program = binaries.ensure() / "kubectl" if self.kind == "embedded" else binaries.kubectl()
        return run(program, "--kubeconfig", self.kubeconfig, *arguments, stdin=stdin)

    def announce(self) -> None:
        """Say which cluster is in use, by the name of its context."""
        words = {
            "given": "the running cluster of the exported KUBECONFIG",
            "kind": "kind, in Docker",
            "embedded": "a single node embedded in this machine",
        }
        context = self.kubectl("config", "current-context").strip()
        say(f"cluster: {words[self.kind]} (context {context}; export KUBECONFIG={self.kubeconfig})")


def choose() -> Target:
    """The cluster that `up` takes. Raises HarnessError when an exported KUBECONFIG leads to no cluster."""
    exported = os.environ.get("KUBECONFIG")
    if exported and Path(exported).absolute() != KUBECONFIG:
        given = Target("given", Path(exported).absolute())
        given.kubectl("version", "--request-timeout=10s")
        return given
    with_kind = shutil.which("kind") is not None and docker_answers()
    return Target("kind" if with_kind else "embedded", KUBECONFIG)


def in_use() -> Target:
    """The cluster that an earlier `up` took. Raises HarnessError when there is none."""
    exported = os.environ.get("KUBECONFIG")
    if exported and Path(exported).absolute() != KUBECONFIG:
        return choose()
    if not CHOICE.exists() or not KUBECONFIG.exists():
        raise HarnessError("no cluster is up: run `cluster.py up` first, or export KUBECONFIG")
    return Target(json.loads(CHOICE.read_text())["kind"], KUBECONFIG)


def remember(target: Target) -> None:
    """Keep the choice for the verbs that follow."""
    CLUSTER.mkdir(parents=True, exist_ok=True)
    if target.kind != "given":
        CHOICE.write_text(json.dumps({"kind": target.kind}))


def docker_answers() -> bool:
    """Whether a Docker engine answers here."""
    if shutil.which("docker") is None:
        return False
    try:
        run("docker", "info")
    except HarnessError:
        return False
    return True


def kind_up() -> None:
    """Create the kind cluster, or take the one that is there."""
    if KIND_CLUSTER in run("kind", "get", "clusters").split():
        run("kind", "export", "kubeconfig", "--name", KIND_CLUSTER, "--kubeconfig", KUBECONFIG)
        return
    run("kind", "create", "cluster", "--name", KIND_CLUSTER, "--kubeconfig", KUBECONFIG, "--wait", "120s")


def kind_down() -> None:
    """Delete the kind cluster and its kubeconfig."""
    run("kind", "delete", "cluster", "--name", KIND_CLUSTER)
    KUBECONFIG.unlink(missing_ok=True)
