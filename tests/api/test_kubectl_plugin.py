"""`kubectl sixfold ...` is `sixfold ...`: through the real kubectl, with its kubeconfig."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "e2e" / "cluster"))

import binaries

from sixfold_api.kinds import POLICY


@pytest.fixture
def plain_kubectl(control_plane, monkeypatch: pytest.MonkeyPatch):
    """As a person types it: kubectl refuses flags before a plugin's name, so the kubeconfig is in the environment."""
    program = binaries.ensure(control_plane_only=True) / "kubectl"
    monkeypatch.setenv("KUBECONFIG", str(control_plane.kubeconfig))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(program), *arguments], capture_output=True, text=True, check=False, timeout=60)

    return run


def test_kubectl_finds_it(plain_kubectl) -> None:
    assert f"{Path(sys.executable).parent}/kubectl-sixfold" in plain_kubectl("plugin", "list").stdout


def test_it_is_the_same_command(plain_kubectl, api) -> None:
    assert api.create(POLICY, {"generation": {"variantRef": {"name": "chat"}}}, "plugged", dry_run=False).accepted
    try:
        done = plain_kubectl("sixfold", "explain", "policy", "plugged", "-n", "default")
    finally:
        api.delete(POLICY, "plugged")
    assert done.returncode == 0, done.stderr
    assert "plugged" in done.stdout


def test_exit_codes_pass_through(plain_kubectl, tmp_path: Path) -> None:
    done = plain_kubectl("sixfold", "gate", "--baseline", str(tmp_path / "cost.json"), "-f", "nowhere.yaml")
    assert (done.returncode, "there is no baseline" in done.stderr) == (2, True), done.stderr
