"""Fetch a model from a hub into a claim: only the files that a model is made of, all of them or none."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub import errors as hub_errors
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.tqdm import disable_progress_bars

from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.files import model_files
from sixfold_runtime.prepare.sources import HubSource

MANIFEST = ".sixfold-source.json"
_CONNECTIONS = 4
# What the hub's HTTP client raises; the package re-exports it without saying so.
_TRANSPORT_ERROR: type[Exception] = hub_errors.HTTPError  # type: ignore[attr-defined]

Log = Callable[[str], None]


@dataclass(frozen=True)
class Hub:
    """A hub and the right to read from it."""

    endpoint: str
    token: str | None

    def list_files(self, source: HubSource) -> dict[str, RepoFile]:
        """The model's files by name. Raises PreparationError."""
        api = huggingface_hub.HfApi(endpoint=self.endpoint, token=self.token or False)
        with _explained(self, source):
            entries = list(api.list_repo_tree(source.repository, revision=source.commit, recursive=True))
        files = {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}
        return {name: files[name] for name in model_files(files)}

    def download(self, source: HubSource, name: str, folder: Path) -> None:
        """Fetch one file into `folder`; returns at once if an earlier run did. Raises PreparationError."""
        with _explained(self, source):
            huggingface_hub.hf_hub_download(
                source.repository,
                name,
                revision=source.commit,
                local_dir=folder,
                token=self.token or False,
                endpoint=self.endpoint,
            )


def fetch(hub: Hub, source: HubSource, target: Path, log: Log) -> None:
    """Bring a commit's files to the folder `target`. A folder that already holds this commit stays as it is.

    Files go to a hidden folder beside it first, which an interrupted run finds again. Raises PreparationError.
    """
    uri = f"{hub.endpoint}/{source.repository}@{source.commit}"
    if _manifest(target).get("uri") == uri:
        log(f"{target.name} already holds {source.repository}@{source.commit[:12]}")
        return
    files = hub.list_files(source)
    partial = target.with_name(f".{target.name}.{source.commit[:12]}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        _require_space(partial, sum(file.size for file in files.values()))
        _download_all(hub, source, files, partial, log)
        _require_sizes(files, partial)
        shutil.rmtree(partial / ".cache", ignore_errors=True)
        manifest = {"uri": uri, "sha256": {name: file.lfs.sha256 for name, file in files.items() if file.lfs}}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
        _swap(partial, target)
    except OSError as error:
        raise _disk_failure(error, target) from error


def expected_digests(folder: Path) -> dict[str, str]:
    """File name -> SHA-256 that the hub listed when the folder was fetched; empty for folders from elsewhere."""
    digests = _manifest(folder).get("sha256")
    return digests if isinstance(digests, dict) else {}


def forget(folder: Path) -> bool:
    """Let the next run fetch the folder anew; False if it was never fetched."""
    if not (folder / MANIFEST).exists():
        return False
    (folder / MANIFEST).unlink()
    return True


def _manifest(folder: Path) -> dict[str, object]:
    try:
        content = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _download_all(hub: Hub, source: HubSource, files: dict[str, RepoFile], folder: Path, log: Log) -> None:
    disable_progress_bars()  # a bar for a terminal is noise in a pod's log
    total = sum(file.size for file in files.values())
    log(f"fetching {len(files)} files, {total} bytes, of {source.repository}@{source.commit[:12]}")
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        pending = {pool.submit(hub.download, source, name, folder): name for name in files}
        try:
            for count, future in enumerate(as_completed(pending), start=1):
                future.result()
                log(f"fetched {pending[future]} ({count} of {len(files)})")
        finally:
            pool.shutdown(cancel_futures=True)


def _require_space(folder: Path, needed_bytes: int) -> None:
    there = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free
    if needed_bytes - there > free:
        raise PreparationError(
            Reason.DISK_FULL,
            f"the claim has {free} bytes left and the model needs {needed_bytes - there} more: use a larger claim",
        )


def _require_sizes(files: dict[str, RepoFile], folder: Path) -> None:
    for name, file in files.items():
        size = (folder / name).stat().st_size
        if size != file.size:
            (folder / name).unlink()
            raise PreparationError(
                Reason.CORRUPT_WEIGHTS,
                f"{name} arrived with {size} of {file.size} bytes: the fetch must be repeated",
                transient=True,
            )


def _swap(partial: Path, target: Path) -> None:
    """Put the finished folder in place of an older one, which goes, as do leftovers of other commits."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    for leftover in target.parent.glob(f".{target.name}.*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _explained(hub: Hub, source: HubSource) -> Iterator[None]:
    """Turns the hub's errors into PreparationErrors."""
    try:
        yield
    except Exception as error:
        failure = explain(error, hub, source)
        if failure is None:
            raise
        raise failure from error


def explain(error: Exception, hub: Hub, source: HubSource) -> PreparationError | None:
    """What an error of the hub's client means; None for one that is no matter of the hub."""
    what = f"{source.repository}@{source.commit[:12]} at {hub.endpoint}"
    for cause in _causes(error):
        if isinstance(cause, hub_errors.GatedRepoError):
            return PreparationError(
                Reason.UNAUTHORIZED,
                f"{what} is gated: accept its terms at the hub and set credentialsSecretRef to a Secret with `token`",
            )
        if isinstance(cause, hub_errors.RevisionNotFoundError):
            return PreparationError(Reason.SOURCE_NOT_FOUND, f"{what}: the repository has no such commit")
        if isinstance(cause, hub_errors.HfHubHTTPError):
            return _explain_status(cause.response.status_code, what, hub.token is not None)
        if isinstance(cause, _TRANSPORT_ERROR):
            return PreparationError(
                Reason.SOURCE_UNREACHABLE, f"{what} can't be reached ({type(cause).__name__}: {cause})"
            )
    if isinstance(error, OSError) and error.errno is None:
        return PreparationError(Reason.SOURCE_UNREACHABLE, f"{what}: the fetch failed ({error})")
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _explain_status(status: int, what: str, has_token: bool) -> PreparationError:
    match status:
        case 401 | 403:
            advice = (
                "the token of credentialsSecretRef gives no access to it"
                if has_token
                else "if the name is right, it needs a token: set credentialsSecretRef to a Secret with `token`"
            )
            return PreparationError(Reason.UNAUTHORIZED, f"{what} answers {status}: {advice}")
        case 404:
            return PreparationError(Reason.SOURCE_NOT_FOUND, f"{what} answers 404: check the name and the commit")
        case _:
            return PreparationError(Reason.SOURCE_UNREACHABLE, f"{what} answers {status}")


def _disk_failure(error: OSError, target: Path) -> PreparationError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return PreparationError(Reason.DISK_FULL, f"the claim is full while writing {target.name}: use a larger claim")
    return PreparationError(
        Reason.CLAIM_NOT_WRITABLE, f"{target.name} can't be written to the claim: {error.strerror or error}"
    )
