"""`sixfold prepare`: what the preparation Job runs."""

from __future__ import annotations

import json
import os
import time
import traceback
from pathlib import Path
from typing import Annotated

import typer

from sixfold_api.names import CLAIMS_DIRECTORY, CREDENTIALS_DIRECTORY
from sixfold_api.scalars import Task
from sixfold_api.variant import PERMANENT_FAILURE_EXIT_CODE, PreparationSummary
from sixfold_runtime.prepare import hub, sources, summary
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.files import REPORT
from sixfold_runtime.prepare.verify import Verified, verify

_TERMINATION_LOG = Path("/dev/termination-log")
_PUBLIC_HUB = "https://huggingface.co"


def prepare(
    source: Annotated[str, typer.Option(help="hf://org/name@commit or pvc://claim/path")],
    task: Annotated[Task, typer.Option(help="What the model must be able to do.")],
    claims: Annotated[Path, typer.Option(help="Each claim lies at <claims>/<claim>.")] = Path(CLAIMS_DIRECTORY),
    artifact_claim: Annotated[str | None, typer.Option(help="The claim that fetched weights are written to.")] = None,
    artifact_path: Annotated[str | None, typer.Option(help="The folder in it.")] = None,
    credentials: Annotated[Path, typer.Option(help="Folder with the hub's `token`.")] = Path(CREDENTIALS_DIRECTORY),
    endpoint: Annotated[str, typer.Option(envvar="HF_ENDPOINT", help="Address of the hub.")] = _PUBLIC_HUB,
    summary_path: Annotated[
        Path, typer.Option("--summary", help="Where the result goes, at most 4 KiB of JSON.")
    ] = _TERMINATION_LOG,
) -> None:
    """Fetch a model if its source is a hub, verify it, and write what was found.

    Exits with 0 if the model can be served, with 2 if another try would find the same fault, with 1 if it might not.
    """
    began = time.monotonic()
    try:
        folder, root = _locate(source, claims, artifact_claim, artifact_path, endpoint, credentials)
        verified = _verify(folder, root, task)
    except PreparationError as error:
        _finish(PreparationSummary(failure=error.failure()), summary_path)
        _log(f"{error.reason}: {error}")
        raise typer.Exit(1 if error.transient else PERMANENT_FAILURE_EXIT_CODE) from error
    except Exception as error:
        traceback.print_exc()
        unexpected = PreparationError(Reason.UNEXPECTED, f"{type(error).__name__}: {error} (the Job's log has more)")
        _finish(PreparationSummary(failure=unexpected.failure()), summary_path)
        raise typer.Exit(1) from error
    seconds = time.monotonic() - began
    _report(folder, source, verified, seconds)
    _finish(PreparationSummary(facts=verified.facts), summary_path)
    facts = verified.facts
    _log(f"ready in {seconds:.1f} s: {facts.architecture}, {facts.parameters} parameters, {facts.digest}")


def _locate(
    source: str, claims: Path, claim: str | None, path: str | None, endpoint: str, credentials: Path
) -> tuple[Path, Path]:
    """The folder of the weights, fetched if need be, and the root of its claim."""
    parsed = sources.parse(source)
    if isinstance(parsed, sources.ClaimSource):
        return sources.folder_in_claim(claims, parsed), sources.claim_root(claims, parsed.claim)
    if claim is None or path is None:
        raise PreparationError(Reason.UNEXPECTED, "a hub source needs --artifact-claim and --artifact-path")
    root = sources.claim_root(claims, claim)
    folder = root / path
    sources.require_inside(folder, root)
    hub.fetch(hub.Hub(endpoint.rstrip("/"), _token(credentials)), parsed, folder, _log)
    return folder, root


def _verify(folder: Path, root: Path, task: Task) -> Verified:
    try:
        verified = verify(folder, root, task, hub.expected_digests(folder), _log)
    except PreparationError as error:
        if error.reason is Reason.CORRUPT_WEIGHTS and hub.forget(folder):
            error.transient = True
        raise
    except OSError as error:
        raise PreparationError(Reason.READ_FAILED, f"{folder.name} can't be read: {error}") from error
    if verified.unused_tensors:
        names = verified.unused_tensors
        _log(f"the model does not use {len(names)} tensors of the checkpoint, such as {names[0]}")
    return verified


def _token(credentials: Path) -> str | None:
    path = credentials / "token"
    return path.read_text().strip() or None if path.is_file() else None


def _report(folder: Path, source: str, verified: Verified, seconds: float) -> None:
    """The full report beside the weights, where the claim can be written to."""
    content = {
        "source": source,
        "seconds": round(seconds, 3),
        "facts": verified.facts.to_dict(),
        "files": verified.files,
        "unusedTensors": verified.unused_tensors,
    }
    partial = folder / f".{REPORT}.{os.getpid()}"
    try:
        partial.write_text(json.dumps(content, indent=1, ensure_ascii=False))
        partial.rename(folder / REPORT)
    except OSError as error:
        _log(f"no {REPORT}: the claim is not writable ({error.strerror})")


def _finish(result: PreparationSummary, path: Path) -> None:
    if not summary.write(result, path):
        _log(f"no summary: {path} can't be written")


def _log(line: str) -> None:
    typer.echo(line, err=True)
