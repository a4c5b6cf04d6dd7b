"""Built folders, kept under a hash of everything that went into them."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from tempfile import mkdtemp

from sources import Package, cache_root, sha256_of

LIBRARIES = ("numpy", "tokenizers", "torch", "transformers")


def content_key(modules: Iterable[str], packages: Iterable[Package]) -> str:
    """Twelve hex digits over modules (paths from this folder), the data's digests and the libraries' versions."""
    here = Path(__file__).parent
    facts = [sha256_of(here / f"{module}.py") for module in sorted(modules)]
    facts += sorted(package.sha256 for package in packages)
    facts += [f"{library}=={version(library)}" for library in LIBRARIES]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def cached_folder(name: str, key: str, build: Callable[[Path], None]) -> Path:
    """The folder ``models/<name>-<key>`` of the cache; ``build`` fills it on the first call.

    A build that fails or is interrupted leaves nothing behind under that name.
    """
    folder = cache_root() / "models" / f"{name}-{key}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        build(scratch)
        scratch.chmod(0o755)
        if not folder.exists():  # another process may have been faster
            scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
