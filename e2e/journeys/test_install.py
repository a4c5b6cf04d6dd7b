"""What was installed: images that carry what they need and no more, rights, and words for the person who looks."""

from __future__ import annotations

import os
import subprocess

import pytest
from stack import REPOSITORY, SYSTEM_NAMESPACE, Cluster, CommandError

OPERATOR = "deployment/sixfold-operator"
LARGEST_OPERATOR_MEGABYTES = 200
"""Above the base image."""


def test_the_operator_image_is_small(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    said = cluster.kubectl(
        "exec", "-n", SYSTEM_NAMESPACE, OPERATOR, "--", "du", "--summarize", "--block-size=1M", "/opt/sixfold", "/app"
    )
    megabytes = sum(int(line.split()[0]) for line in said.splitlines())
    with capsys.disabled():
        print(f"\noperator image: {megabytes} MB above its base (goal at most {LARGEST_OPERATOR_MEGABYTES})")
    assert 0 < megabytes <= LARGEST_OPERATOR_MEGABYTES


def test_images_carry_only_their_own(cluster: Cluster, namespace: str) -> None:
    for where, target, absent in (
        (SYSTEM_NAMESPACE, OPERATOR, "torch"),
        (namespace, "deployment/assistant-engine", "kopf"),
    ):
        with pytest.raises(CommandError, match=f"No module named '{absent}'"):
            cluster.kubectl("exec", "-n", where, target, "--", "python", "-c", f"import {absent}")


def test_explain_says_what_holds_and_why(cluster: Cluster, namespace: str) -> None:
    cluster.patch(namespace, "ipol", "assistant", {"spec": {"rollbackLevel": 2}})
    try:
        said = subprocess.run(
            [str(REPOSITORY / ".venv/bin/sixfold"), "explain", "policy", "assistant", "-n", namespace],
            env={**cluster.environment, "COLUMNS": "160", "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    finally:
        cluster.patch(namespace, "ipol", "assistant", {"spec": {"rollbackLevel": 3}})
    assert "CompressedStreaming" in said
    assert "BelowLevel" in said
    assert "on from level 3; the level is 2" in said


def test_the_examples_are_told_apart_from_mistakes(cluster: Cluster, namespace: str) -> None:
    """A misspelt field never reaches the operator."""
    wrong = {
        "apiVersion": "sixfold.dev/v1alpha1",
        "kind": "InferencePolicy",
        "metadata": {"name": "typo"},
        "spec": {"generation": {"variantRef": {"name": "chat"}}, "rollbackLevle": 2},
    }
    with pytest.raises(CommandError, match=r'unknown field "(spec\.)?rollbackLevle"'):
        cluster.apply(namespace, wrong)
