"""ONNX Runtime as a peer. Its environment sees the product's packages too: torch exports the model."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

from peer import Peer, environment

PACKAGES = ("onnxruntime==1.32.0", "onnx==1.23.2", "onnxscript==0.7.2")


class Onnx(Peer):
    """A running session over a classifier's folder, with its graph optimised as ONNX Runtime does by default."""

    def __init__(self, folder: Path, threads: int) -> None:
        """Raises PeerError."""
        own = environment(PACKAGES[0].replace("==", "-"), PACKAGES)
        packages = own / "lib" / "python3.11" / "site-packages"
        (packages / "product.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        super().__init__(own, "onnx_peer.py", folder, threads)

    def label(self, texts: Sequence[str], batch: int) -> tuple[list[str], float, float]:
        """Labels, and the seconds and seconds of CPU time that they took."""
        answer = self.ask({"texts": list(texts), "batch": batch})
        return answer["labels"], answer["seconds"], answer["cpu_seconds"]
