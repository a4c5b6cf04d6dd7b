"""A peer in a virtual environment of its own, made at first use: a subprocess that answers JSON lines.

Peers are never dependencies of the product.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paths import CACHE


class PeerError(Exception):
    """A peer can't be installed or doesn't start here; the message says why."""


def environment(name: str, packages: Sequence[str], overrides: Sequence[str] = ()) -> Path:
    """The folder of a virtual environment with these packages. Raises PeerError."""
    folder = CACHE / "peers" / name
    done = folder / "installed"
    if done.exists():
        return folder
    print(f"installing {', '.join(packages)} in {folder} (once)", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    forced = folder / "overrides.txt"
    install = ["uv", "pip", "install", "-q", "--python", str(folder / "bin" / "python"), "--override", str(forced)]
    try:
        subprocess.run(["uv", "venv", "-q", "--python", "3.11", str(folder)], check=True)
        forced.write_text("".join(f"{requirement}\n" for requirement in overrides))
        subprocess.run([*install, *packages], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PeerError(f"{packages[0]} can't be installed: {error}") from error
    done.touch()
    return folder


class Peer:
    """A script of this folder that runs in such an environment, prints a line when it is ready, and then answers."""

    def __init__(self, environment: Path, script: str, *arguments: object) -> None:
        """Raises PeerError."""
        self._name = Path(script).stem
        log = CACHE / "logs" / f"{self._name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [environment / "bin" / "python", Path(__file__).with_name(script), *map(str, arguments)]
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        try:
            self._answer()
        except PeerError:
            self.stop()
            lines = log.read_text().strip().splitlines()
            raise PeerError(f"{self._name} doesn't start: {lines[-1] if lines else 'no output'} (see {log})") from None

    def ask(self, question: Any) -> Any:
        """One line to it, and its answer. Raises PeerError."""
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._answer()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"{self._name} ended")
        return json.loads(line)
