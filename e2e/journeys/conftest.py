"""One installed product for all journeys, and helpers to put a policy into a namespace of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

E2E = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(E2E))

from stack import (
    JOURNEY_KEY,
    REPOSITORY,
    Cluster,
    bring_up,
    fill_models_claim,
    forget_models,
    model_folders,
    wait_ready,
)

NAMESPACE = f"journeys-{uuid4().hex[:6]}"


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The cluster at hand with the operator installed from the chart and the images of this tree."""
    return bring_up(NAMESPACE)


@pytest.fixture(scope="session")
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace with the models, one API key, and a Ready policy `assistant` from examples/."""
    name = NAMESPACE
    fill_models_claim(name, model_folders())
    cluster.kubectl("apply", "-n", name, "-f", str(REPOSITORY / "examples"))
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "demo-api-keys"},
        "stringData": {"alice": JOURNEY_KEY},
    }
    cluster.apply(name, secret)
    wait_ready(cluster, name, "assistant")
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")
    forget_models(name)


@pytest.fixture(scope="session")
def gateway(cluster: Cluster, namespace: str) -> Iterator[str]:
    """Base URL of the policy's gateway."""
    with cluster.reach(namespace, "assistant-gateway", 8000) as url:
        yield url


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The times of the stages of `make test`, before pytest's closing line."""
    stages = REPOSITORY / ".cache" / "stages"
    if stages.exists():
        terminalreporter.section("stages before the journeys")
        for line in stages.read_text().splitlines():
            name, seconds = line.split()
            terminalreporter.write_line(f"{name:>14} {seconds:>5} s")
