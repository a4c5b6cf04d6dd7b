"""ONNX Runtime as a peer: in a virtual environment of its own, made at first use, run as a subprocess.

It is never a dependency of the product. The environment sees the product's packages too: torch exports the model.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paths import CACHE

PACKAGES = ("onnxruntime==1.32.0", "onnx==1.23.2", "onnxscript==0.7.2")
ENVIRONMENT = CACHE / "peers" / PACKAGES[0].replace("==", "-")


class OnnxError(Exception):
    """ONNX Runtime can't be installed or doesn't start here; the message says why."""


def _install() -> None:
    """Raises OnnxError."""
    done = ENVIRONMENT / "installed"
    own = ENVIRONMENT / "lib" / "python3.11" / "site-packages"
    if not done.exists():
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        try:
            subprocess.run(["uv", "venv", "-q", "--python", "3.11", str(ENVIRONMENT)], check=True)
            python = str(ENVIRONMENT / "bin" / "python")
            subprocess.run(["uv", "pip", "install", "-q", "--python", python, *PACKAGES], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise OnnxError(f"ONNX Runtime can't be installed: {error}") from error
        done.touch()
    (own / "product.pth").write_text(f"{sysconfig.get_path('purelib')}\n")


class Onnx:
    """A running session over a classifier's folder, with its graph optimised as ONNX Runtime does by default."""

    def __init__(self, folder: Path, threads: int) -> None:
        """Raises OnnxError."""
        _install()
        log = CACHE / "logs" / "onnx.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [ENVIRONMENT / "bin" / "python", Path(__file__).with_name("onnx_peer.py"), folder, str(threads)]
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        try:
            self._answer()
        except OnnxError:
            self.stop()
            lines = log.read_text().strip().splitlines()
            raise OnnxError(f"it doesn't start: {lines[-1] if lines else 'no output'} (see {log})") from None

    def label(self, texts: Sequence[str], batch: int) -> tuple[list[str], float, float]:
        """Labels, and the seconds and seconds of CPU time that they took."""
        assert self._process.stdin is not None
        print(json.dumps({"texts": list(texts), "batch": batch}), file=self._process.stdin, flush=True)
        answer = self._answer()
        return answer["labels"], answer["seconds"], answer["cpu_seconds"]

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise OnnxError("ONNX Runtime ended")
        return json.loads(line)
