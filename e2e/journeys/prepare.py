"""What all journeys share: the product in the cluster at hand, and a namespace with the examples.

Run by itself it only begins: the Jobs that prepare the models take minutes, and go on while other tests run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from uuid import uuid4

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from stack import JOURNEY_KEY, REPOSITORY, Cluster, bring_up, fill_models_claim, model_folders

BEGUN = REPOSITORY / ".cache" / "journeys-namespace"
"""Names the namespace that was begun and that no run of the journeys has taken."""


def begin() -> tuple[Cluster, str]:
    """The cluster, and a new namespace in which models, an API key and the examples are."""
    name = f"journeys-{uuid4().hex[:6]}"
    cluster = bring_up(name)
    fill_models_claim(name, model_folders())
    cluster.kubectl("apply", "-n", name, "-f", str(REPOSITORY / "examples"))
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "demo-api-keys"},
        "stringData": {"alice": JOURNEY_KEY},
    }
    cluster.apply(name, secret)
    return cluster, name


def take() -> tuple[Cluster, str]:
    """What was begun, with the operator and the images of this tree; else as `begin`."""
    if BEGUN.exists():
        name = BEGUN.read_text()
        BEGUN.unlink()
        cluster = bring_up(name)
        if cluster.get(name, "ipol", "assistant") is not None:
            return cluster, name
    return begin()


if __name__ == "__main__":
    _, begun = begin()
    BEGUN.parent.mkdir(exist_ok=True)
    BEGUN.write_text(begun)
