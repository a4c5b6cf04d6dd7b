"""One installed product for all journeys, and helpers to put a policy into a namespace of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from prepare import take
from stack import REPOSITORY, Cluster, forget_models, wait_ready


@pytest.fixture(scope="session")
def place() -> tuple[Cluster, str]:
    """The cluster at hand with the operator installed from the chart and the images of this tree, and a namespace with
    the examples."""
    return take()


@pytest.fixture(scope="session")
def cluster(place: tuple[Cluster, str]) -> Cluster:
    return place[0]


@pytest.fixture(scope="session")
def namespace(place: tuple[Cluster, str]) -> Iterator[str]:
    """A namespace with the models, one API key, and a Ready policy `assistant` from examples/."""
    cluster, name = place
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
