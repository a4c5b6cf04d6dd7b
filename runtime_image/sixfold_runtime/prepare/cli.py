"""`sixfold prepare`: what the preparation Job runs, and `sixfold prepare lora` for people."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from pydantic import TypeAdapter, ValidationError

from sixfold_api.exit_heads import ExitHeads
from sixfold_api.names import CLAIMS_DIRECTORY, CREDENTIALS_DIRECTORY
from sixfold_api.precision import Precision, TextSource
from sixfold_api.scalars import Task
from sixfold_api.subgraphs import SliceSpec
from sixfold_api.variant import PERMANENT_FAILURE_EXIT_CODE, PreparationSummary
from sixfold_runtime.logs import quiet_torchao
from sixfold_runtime.prepare import hub, report, steps, summary
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.files import REPORT

_TERMINATION_LOG = Path("/dev/termination-log")
_PUBLIC_HUB = "https://huggingface.co"
_Value = TypeVar("_Value")


def prepare(
    source: Annotated[str, typer.Option(help="hf://org/name@commit or pvc://claim/path")],
    task: Annotated[Task, typer.Option(help="What the model must be able to do.")],
    claims: Annotated[Path, typer.Option(help="Each claim lies at <claims>/<claim>.")] = Path(CLAIMS_DIRECTORY),
    artifact_claim: Annotated[str | None, typer.Option(help="The claim that new weights are written to.")] = None,
    artifact_path: Annotated[str | None, typer.Option(help="The folder in it.")] = None,
    precision: Annotated[str | None, typer.Option(help="`precision` of a ModelVariant, as JSON.")] = None,
    calibration: Annotated[str | None, typer.Option(help="`calibration` of a ModelVariant, as JSON.")] = None,
    evaluation: Annotated[str | None, typer.Option(help="`evaluation` of a ModelVariant, as JSON.")] = None,
    budget: Annotated[
        float | None, typer.Option(help="Most that quantising may cost: percent of perplexity, points of accuracy.")
    ] = None,
    lora: Annotated[str | None, typer.Option(help="pvc:// of a LoRA adapter to put on the weights.")] = None,
    draft_for: Annotated[str | None, typer.Option(help="pvc:// of the prepared target of this draft.")] = None,
    target_name: Annotated[str, typer.Option(help="Name of the target's ModelVariant.")] = "target",
    exit_heads: Annotated[str | None, typer.Option(help="`exitHeads` of a ModelVariant, as JSON.")] = None,
    slices: Annotated[str | None, typer.Option(help="`slices` of a ModelVariant, as JSON.")] = None,
    credentials: Annotated[Path, typer.Option(help="Folder with the hub's `token`.")] = Path(CREDENTIALS_DIRECTORY),
    endpoint: Annotated[str, typer.Option(envvar="HF_ENDPOINT", help="Address of the hub.")] = _PUBLIC_HUB,
    summary_path: Annotated[
        Path, typer.Option("--summary", help="Where the result goes, at most 4 KiB of JSON.")
    ] = _TERMINATION_LOG,
) -> None:
    """Fetch a model, adapt and quantise it as asked, train exit heads and task slices, verify all of it, and write what
    was found.

    Exits with 0 if the model can be served, with 2 if another try would find the same fault, with 1 if it might not.
    `sixfold prepare lora --help` tells how an adapter is retrained for quantised weights.
    """
    quiet_torchao()
    request = steps.Request(
        source=source,
        task=task,
        claims=claims,
        hub=hub.Hub(endpoint.rstrip("/"), _token(credentials)),
        artifact=(artifact_claim, artifact_path) if artifact_claim and artifact_path else None,
        precision=_parse(Precision, precision, "--precision") or Precision(),
        calibration=_parse(TextSource, calibration, "--calibration"),
        evaluation=_parse(TextSource, evaluation, "--evaluation"),
        budget=budget,
        lora=lora,
        draft_for=draft_for,
        target_name=target_name,
        exit_heads=_parse(ExitHeads, exit_heads, "--exit-heads"),
        slices=_parse(tuple[SliceSpec, ...], slices, "--slices") or (),
    )
    _run(request, summary_path)


def _run(request: steps.Request, summary_path: Path) -> None:
    outcome = steps.Outcome()
    try:
        steps.run(request, outcome, _log)
    except PreparationError as error:
        outcome.failed(error)
        if outcome.summary.quality is not None and outcome.folder is not None:
            _report(outcome)
        _finish(outcome.summary, summary_path)
        _log(f"{error.reason}: {error}")
        raise typer.Exit(1 if error.transient else PERMANENT_FAILURE_EXIT_CODE) from error
    except Exception as error:
        traceback.print_exc()
        outcome.failed(PreparationError(Reason.UNEXPECTED, f"{type(error).__name__}: {error} (the Job's log has more)"))
        _finish(outcome.summary, summary_path)
        raise typer.Exit(1) from error
    steps.forget_source(outcome)
    _report(outcome)
    _finish(outcome.summary, summary_path)
    facts = outcome.summary.facts
    assert facts is not None
    seconds = outcome.report["seconds"]
    _log(f"ready in {seconds:.1f} s: {facts.architecture}, {facts.parameters} parameters, {facts.digest}")


def retrain(
    base: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder of the quantised weights.")],
    adapter: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder of the adapter, PEFT's format.")],
    text: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="JSON lines of your own text.")],
    out: Annotated[Path, typer.Option(help="Folder for the retrained adapter.")],
    learning_rate: Annotated[
        float, typer.Option(min=0, help="Of the original training; a fifth of it is used.")
    ] = 2e-4,
    training_steps: Annotated[int, typer.Option("--steps", min=1, help="Optimiser steps of 4 windows.")] = 200,
) -> None:
    """Retrain a LoRA adapter for quantised weights; one that doesn't get better is not written."""
    from sixfold_runtime.prepare import lora

    try:
        lora.retrain(base, adapter, text, out, learning_rate, training_steps, _log)
    except PreparationError as error:
        _log(f"{error.reason}: {error}")
        raise typer.Exit(PERMANENT_FAILURE_EXIT_CODE) from error
    _log(f"written to {out}: give it as `lora` of a variant with these weights")


def _parse(kind: type[_Value], text: str | None, option: str) -> _Value | None:
    if text is None:
        return None
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise typer.BadParameter(problems, param_hint=option) from error


def _token(credentials: Path) -> str | None:
    path = credentials / "token"
    return path.read_text().strip() or None if path.is_file() else None


def _report(outcome: steps.Outcome) -> None:
    if outcome.folder is not None and (problem := report.write(outcome.report, outcome.folder)):
        _log(f"no {REPORT}: the claim is not writable ({problem})")


def _finish(result: PreparationSummary, path: Path) -> None:
    if not summary.write(result, path):
        _log(f"no summary: {path} can't be written")


def _log(line: str) -> None:
    typer.echo(line, err=True)
