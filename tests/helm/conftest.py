"""The chart, a real helm, and a kube-apiserver of its own to install it on."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "e2e" / "cluster"))

import binaries
from control_plane import ControlPlane, temporary_control_plane

CHART = ROOT / "helm" / "sixfold"
KUBERNETES = "1.34.4"


@pytest.fixture(scope="session")
def helm_program() -> Path:
    return Path(binaries.helm())


@pytest.fixture(scope="session")
def monitoring_programs() -> Path:
    """The folder of a prometheus and a promtool that know Kubernetes."""
    return binaries.prometheus()


@pytest.fixture(scope="session")
def promtool(monitoring_programs: Path) -> Callable[..., str]:
    """promtool, which must be content; returns what it says."""

    def run(*arguments: str | Path, stdin: str | None = None) -> str:
        done = _run(monitoring_programs / "promtool", *arguments, stdin=stdin)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def _run(*command: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], input=stdin, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.fixture(scope="session")
def render(helm_program: Path) -> Callable[..., list[dict[str, Any]]]:
    """Manifests of the chart with the given arguments of helm."""

    def render(*arguments: str, chart: Path = CHART, version: str = KUBERNETES) -> list[dict[str, Any]]:
        command = [helm_program, "template", "sixfold", chart, "--namespace=sixfold-system"]
        done = _run(*command, f"--kube-version={version}", *arguments)
        if done.returncode:
            raise ValueError(done.stderr)
        return [document for document in yaml.safe_load_all(done.stdout) if document]

    return render


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    with temporary_control_plane() as control_plane:
        yield control_plane


@pytest.fixture(scope="session")
def kubectl(control_plane: ControlPlane) -> Callable[..., str]:
    program = binaries.ensure(control_plane_only=True) / "kubectl"
    options = [f"--kubeconfig={control_plane.kubeconfig}", f"--cache-dir={control_plane.folder / 'kubectl'}"]

    def run(*arguments: str, stdin: str | None = None) -> str:
        done = _run(program, *options, *arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def helm(control_plane: ControlPlane, helm_program: Path) -> Callable[..., str]:
    """helm against the test's own API server."""

    def run(*arguments: str) -> str:
        done = _run(helm_program, *arguments, f"--kubeconfig={control_plane.kubeconfig}", "--namespace=sixfold-system")
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def http(control_plane: ControlPlane) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=control_plane.url,
        headers={"Authorization": f"Bearer {control_plane.token}"},
        verify=ssl.create_default_context(cafile=str(control_plane.ca_file)),
        trust_env=False,
        timeout=30,
    ) as client:
        yield client


@pytest.fixture
def chart_copy(tmp_path: Path) -> Path:
    """A copy of the chart that a test may change, as an older or a newer version would be."""
    return Path(shutil.copytree(CHART, tmp_path / "sixfold"))


@pytest.fixture
def release(helm: Callable[..., str], kubectl: Callable[..., str]) -> Iterator[Callable[..., str]]:
    """Install or upgrade the release; it is gone with its CRDs after the test."""

    def install(*arguments: str, chart: Path = CHART) -> str:
        return helm("upgrade", "--install", "sixfold", str(chart), "--create-namespace", *arguments)

    yield install
    helm("uninstall", "sixfold", "--ignore-not-found")
    crds = [f"crd/{kind}.sixfold.dev" for kind in ("inferencepolicies", "modelvariants", "optimizationtickets")]
    kubectl("delete", "--ignore-not-found", *crds)
    kubectl("wait", "--for=delete", "--timeout=30s", *crds)
