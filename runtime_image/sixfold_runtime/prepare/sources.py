"""Where weights come from and where they lie: URIs, and paths inside mounted claims."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sixfold_api.variant import CLAIM_SCHEME, HUB_SCHEME, URI_PATTERN
from sixfold_runtime.prepare.failures import PreparationError, Reason


@dataclass(frozen=True)
class HubSource:
    """A repository of a hub at one commit."""

    repository: str
    commit: str


@dataclass(frozen=True)
class ClaimSource:
    """A folder of a PersistentVolumeClaim."""

    claim: str
    path: str


def parse(uri: str) -> HubSource | ClaimSource:
    """The source that a URI names. Raises PreparationError(SourceNotFound) for anything else."""
    if re.fullmatch(URI_PATTERN, uri) is None:
        raise PreparationError(
            Reason.SOURCE_NOT_FOUND,
            f"{uri!r} is no source: write hf://org/name@<40 hex digits of a commit> or pvc://claim/path",
        )
    if uri.startswith(CLAIM_SCHEME):
        claim, _, path = uri.removeprefix(CLAIM_SCHEME).partition("/")
        return ClaimSource(claim, path)
    repository, _, commit = uri.removeprefix(HUB_SCHEME).partition("@")
    return HubSource(repository, commit)


def claim_root(claims: Path, claim: str) -> Path:
    """Where a claim is mounted. Raises PreparationError(SourceNotFound) if it is not."""
    root = claims / claim
    if not root.is_dir():
        raise PreparationError(Reason.SOURCE_NOT_FOUND, f"the claim {claim!r} is not mounted at {root}")
    return root


def folder_in_claim(claims: Path, source: ClaimSource) -> Path:
    """The folder of a claim's source; links may not lead out of the claim.

    Raises PreparationError: SourceNotFound if there is no such folder, UnsafePath if it lies elsewhere.
    """
    root = claim_root(claims, source.claim)
    folder = root / source.path
    if not folder.is_dir():
        raise PreparationError(
            Reason.SOURCE_NOT_FOUND, f"the claim {source.claim!r} has no folder {source.path!r}: check the path"
        )
    require_inside(folder, root)
    return folder


def require_inside(path: Path, root: Path) -> None:
    """Raises PreparationError(UnsafePath) if `path` leads out of `root` through a link."""
    if not path.resolve().is_relative_to(root.resolve()):
        raise PreparationError(
            Reason.UNSAFE_PATH, f"{path.name!r} is a link that leads out of the claim: copy the files into it"
        )
