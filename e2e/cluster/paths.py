"""Where the harness keeps what it builds and what it runs."""

import os
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
NODE_SOURCE = HERE / "node"
PROMETHEUS_SOURCE = HERE / "prometheus"
KWOK_SOURCE = HERE / "kwok"

CACHE = Path(os.environ.get("SIXFOLD_CACHE") or Path.home() / ".cache" / "sixfold").absolute()
BINARIES = CACHE / "bin"
CLUSTER = CACHE / "cluster"
KUBECONFIG = CLUSTER / "kubeconfig"
IMAGES_FILE = CLUSTER / "images.json"
MODELS = CLUSTER / "models"
