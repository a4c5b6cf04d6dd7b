"""`make demo-down`: remove the demo. A cluster that the demo started goes whole; a cluster of yours keeps the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from demo import NAMESPACE
from stack import CLUSTER_TOOL, SYSTEM_NAMESPACE, CommandError, connect


def main() -> None:
    try:
        cluster = connect()
        cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found")
        cluster.run("helm", "uninstall", "sixfold", "--namespace", SYSTEM_NAMESPACE, "--ignore-not-found", "--wait")
        cluster.kubectl("delete", "namespace", SYSTEM_NAMESPACE, "--ignore-not-found")
    except CommandError as problem:
        print(f"nothing removed from the cluster: {problem}", file=sys.stderr)
    subprocess.run([sys.executable, str(CLUSTER_TOOL), "down"], check=True)


if __name__ == "__main__":
    main()
