"""Tells weights apart by their content, so that nothing computed with other weights is taken for theirs."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.fingerprint import trunk_fingerprint
from sixfold_runtime.engine.lora import ADAPTER_FOLDER

log = logging.getLogger(__name__)
_PATTERNS = ("config.json", "*.safetensors", f"{ADAPTER_FOLDER}/*")
Stamps = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class WeightFiles:
    """The files of a model folder as they were at one moment."""

    folder: Path
    stamps: Stamps
    """Name, inode, size in bytes and time of the last change in nanoseconds."""

    @classmethod
    def of(cls, folder: Path) -> WeightFiles:
        """As they are now. One that goes at this moment is none of them."""
        return cls(folder, tuple(stamp for path in _paths(folder) if (stamp := _stamp(folder, path)) is not None))

    def digest(self, recorded: str = "") -> str:
        """A digest of the content. With `recorded`, that of the preparation, a sample is read beside it, which shows
        that the weights were exchanged since then; without, every byte.

        Raises:
            ModelLoadError: a file can't be read, or was changed since that moment.
        """
        try:
            content = f"{recorded} {trunk_fingerprint(TensorStore(self.folder))}" if recorded else self._every_byte()
            is_same = WeightFiles.of(self.folder) == self
        except OSError as error:
            raise ModelLoadError(f"{self.folder}: the weight files can't be read: {error}") from error
        if not is_same:
            raise ModelLoadError(
                f"{self.folder}: the weight files were changed after they were loaded: restart to serve the new ones"
            )
        return content

    def _every_byte(self) -> str:
        digest = hashlib.sha256()
        for path in _paths(self.folder):
            with path.open("rb") as file:
                digest.update(f"{path.relative_to(self.folder)} ".encode())
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return f"sha256:{digest.hexdigest()}"


def _paths(folder: Path) -> Sequence[Path]:
    return sorted({path for pattern in _PATTERNS for path in folder.glob(pattern) if path.is_file()})


def _stamp(folder: Path, path: Path) -> tuple[str, int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return str(path.relative_to(folder)), stat.st_ino, stat.st_size, stat.st_mtime_ns


class ContentDigest:
    """A digest that a thread computes once somebody wants it, since all of the weights may have to be read.

    Attributes:
        value: "" while it isn't there.
        problem: why there will be none; "" while that isn't known.
    """

    def __init__(self, files: WeightFiles, recorded: str, wake: Callable[[], None]) -> None:
        """`wake` is called in the thread when it is done."""
        self.value = self.problem = ""
        self._files, self._recorded, self._wake = files, recorded, wake
        self._thread: threading.Thread | None = None

    def want(self) -> None:
        """Start the thread, the first time."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._compute, name="weights-digest", daemon=True)
            self._thread.start()

    def wait(self, seconds: float) -> None:
        """Until it is there, at most so long; not at all where nobody wants it."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _compute(self) -> None:
        try:
            self.value = self._files.digest(self._recorded)
        except ModelLoadError as error:
            log.warning("keys and values can't be reused: %s", error)
            self.problem = str(error)
        except Exception as error:  # whatever foreign files raise: the weights answer without it
            log.exception("keys and values can't be reused: no digest of %s", self._files.folder)
            self.problem = f"{type(error).__name__}: {error}"
        self._wake()
