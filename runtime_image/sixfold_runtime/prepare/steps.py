"""What a preparation does, in order: fetch, verify, adapt, quantise, train exit heads, make task slices, verify again,
compare with a target."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sixfold_api.exit_heads import ExitHeads
from sixfold_api.precision import Precision, QualityReport, Scheme, TextSource
from sixfold_api.scalars import Task
from sixfold_api.subgraphs import SliceSpec
from sixfold_api.variant import PreparationSummary
from sixfold_runtime.prepare import hub, sources
from sixfold_runtime.prepare.artifact import Workspace, copy_model, explained
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.files import EXITS
from sixfold_runtime.prepare.verify import Verified, count_parameters, verify

Log = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """The command line of a preparation."""

    source: str
    task: Task
    claims: Path
    hub: hub.Hub
    artifact: tuple[str, str] | None = None
    """Claim and folder that new weights are written to."""
    precision: Precision = field(default_factory=Precision)
    calibration: TextSource | None = None
    evaluation: TextSource | None = None
    budget: float | None = None
    lora: str | None = None
    draft_for: str | None = None
    target_name: str = ""
    exit_heads: ExitHeads | None = None
    slices: tuple[SliceSpec, ...] = ()

    @property
    def rewrites(self) -> bool:
        """Whether other files than the source's are made."""
        quantises = self.precision.scheme is not Scheme.NONE
        return quantises or self.lora is not None or self.exit_heads is not None or self.makes_slices

    @property
    def makes_slices(self) -> bool:
        return any(spec.is_made for spec in self.slices)


@dataclass
class Outcome:
    """What came of it, also where it failed on the way: the summary, and the report with the folder that it is for."""

    folder: Path | None = None
    summary: PreparationSummary = field(default_factory=PreparationSummary)
    report: dict[str, Any] = field(default_factory=dict)

    def failed(self, error: PreparationError) -> None:
        self.summary = self.summary.model_copy(update={"facts": None, "failure": error.failure()})
        self.report["failure"] = error.failure().to_dict()


def run(request: Request, outcome: Outcome, log: Log) -> None:
    """Do it, and fill in the outcome step by step. Raises PreparationError."""
    began = time.monotonic()
    outcome.report["source"] = request.source
    source = sources.parse(request.source)
    rewrites = request.rewrites
    place = _workspace(request) if rewrites or isinstance(source, sources.HubSource) else None
    folder, root = _locate(request, source, place, rewrites, log)
    outcome.folder = place.target if place else folder
    verified = _verify(folder, root, request, log)
    if rewrites and place is not None:
        _require_another_place(folder, place)
        with explained(place.target):
            try:
                place.publish(_rewrite(request, folder, verified, place, outcome, log))
            finally:
                place.clear()  # a claim that filled up has room again, for the report to begin with
        verified = _verify(place.target, _root(request, place), request, log)
    _verify_heads(request, outcome, verified, log)
    outcome.report |= {
        "facts": verified.facts.to_dict(),
        "files": verified.files,
        "unusedTensors": verified.unused_tensors,
    }
    if request.draft_for is not None:
        _compare_draft(request, outcome, verified, log)
    outcome.report["seconds"] = round(time.monotonic() - began, 3)
    outcome.summary = outcome.summary.model_copy(update={"facts": verified.facts})


def _workspace(request: Request) -> Workspace:
    if request.artifact is None:
        raise PreparationError(Reason.UNEXPECTED, "new weights need --artifact-claim and --artifact-path")
    claim, path = request.artifact
    root = sources.claim_root(request.claims, claim)
    sources.require_inside(root / path, root)
    return Workspace(root / path)


def _require_another_place(source: Path, place: Workspace) -> None:
    """Raises PreparationError: the artifact would take the place of what it is made from."""
    if source.resolve() == place.target.resolve():
        raise PreparationError(
            Reason.UNSAFE_PATH,
            f"the weights would be written over their source: {place.target.name} is the variant's name and the "
            "source's folder. Give the variant another name, or take another artifact.claimName",
        )


def _root(request: Request, place: Workspace) -> Path:
    """The root of the artifact's claim."""
    return place.target if request.artifact is None else sources.claim_root(request.claims, request.artifact[0])


def _locate(
    request: Request, source: sources.HubSource | sources.ClaimSource, place: Workspace | None, rewrites: bool, log: Log
) -> tuple[Path, Path]:
    """The folder of the source weights, fetched if need be, and the root of its claim."""
    if isinstance(source, sources.ClaimSource):
        return sources.folder_in_claim(request.claims, source), sources.claim_root(request.claims, source.claim)
    if place is None:
        raise PreparationError(Reason.UNEXPECTED, "a hub source needs --artifact-claim and --artifact-path")
    # Weights that become others stay hidden beside them: another try need not fetch them again.
    folder = place.target.with_name(f".{place.target.name}.source") if rewrites else place.target
    hub.fetch(request.hub, source, folder, log)
    return folder, _root(request, place)


def _verify(folder: Path, root: Path, request: Request, log: Log) -> Verified:
    try:
        verified = verify(folder, root, request.task, hub.expected_digests(folder), log, bare=bool(request.slices))
    except PreparationError as error:
        if error.reason is Reason.CORRUPT_WEIGHTS and hub.forget(folder):
            error.transient = True
        raise
    except OSError as error:
        raise PreparationError(Reason.READ_FAILED, f"{folder.name} can't be read: {error}") from error
    if verified.unused_tensors:
        names = verified.unused_tensors
        log(f"the model does not use {len(names)} tensors of the checkpoint, such as {names[0]}")
    return verified


def _rewrite(request: Request, folder: Path, verified: Verified, place: Workspace, outcome: Outcome, log: Log) -> Path:
    """The whole new folder, in a hidden place. Raises PreparationError, also OverBudget."""
    place.clear()
    if request.lora is not None:
        from sixfold_runtime.prepare import adapter

        found = sources.parse(request.lora)
        if not isinstance(found, sources.ClaimSource):
            raise PreparationError(Reason.SOURCE_NOT_FOUND, f"{request.lora}: an adapter lies on a claim")
        adapted = place.folder("adapted")
        adapter.put_on(folder, verified.facts.scheme, sources.folder_in_claim(request.claims, found), adapted, log)
        folder = adapted
    if request.precision.scheme is not Scheme.NONE:
        folder = _quantise(request, folder, verified, place, outcome, log)
    if request.exit_heads is None and not request.makes_slices:
        return folder
    extended = place.folder("extended")
    copy_model(folder, extended)
    if request.exit_heads is not None:
        _make_exits(request, request.exit_heads, extended, outcome, log)
    if request.makes_slices:
        _make_slices(request, extended, outcome, log)
    return extended


def _make_exits(request: Request, spec: ExitHeads, folder: Path, outcome: Outcome, log: Log) -> None:
    from sixfold_runtime.prepare import exit_report, exits

    if request.calibration is None or request.evaluation is None:
        raise PreparationError(Reason.UNEXPECTED, "--exit-heads needs --calibration and --evaluation")
    order = exits.Order(spec, request.calibration, request.evaluation, request.claims)
    report, content = exits.make(folder, order, log)
    outcome.summary = outcome.summary.model_copy(update={"exits": report})
    outcome.report["exits"] = content
    exit_report.show(content)


def _make_slices(request: Request, folder: Path, outcome: Outcome, log: Log) -> None:
    """Make those that are to be made, and check that all fit the weights in `folder`."""
    from sixfold_runtime.prepare import slices

    reports = slices.make(folder, request.slices, request.task, request.claims, log)
    outcome.summary = outcome.summary.model_copy(update={"slices": reports})
    outcome.report["slices"] = [report.to_dict() for report in reports]


def _verify_heads(request: Request, outcome: Outcome, verified: Verified, log: Log) -> None:
    """What lies beside the weights that are served: exit heads, and slices that were made before."""
    assert outcome.folder is not None
    if EXITS in verified.files:
        from sixfold_runtime.prepare import exits

        exits.verify(outcome.folder)
    if request.slices and not request.makes_slices:
        _make_slices(request, outcome.folder, outcome, log)


def _quantise(request: Request, folder: Path, verified: Verified, place: Workspace, outcome: Outcome, log: Log) -> Path:
    from sixfold_runtime.prepare import quantise, report

    if request.evaluation is None or (request.precision.scheme is Scheme.GPTQ and request.calibration is None):
        raise PreparationError(Reason.UNEXPECTED, "--precision needs --evaluation, and GPTQ also --calibration")
    budget = quantise.default_budget(request.task) if request.budget is None else request.budget
    order = quantise.Order(request.precision, request.calibration, request.evaluation, budget, request.claims)
    done = quantise.quantise(folder, verified, request.task, order, place, log)
    outcome.summary = outcome.summary.model_copy(update={"quality": done.quality})
    outcome.report |= done.report | {"quality": done.quality.to_dict()}
    report.show(done.report)
    if not done.quality.within_budget:
        raise _over_budget(done.quality)
    return done.folder


def _over_budget(quality: QualityReport) -> PreparationError:
    unit = "percent of perplexity" if quality.metric == "perplexity" else "points of accuracy"
    return PreparationError(
        Reason.OVER_BUDGET,
        f"quantising costs {quality.loss} {unit}, and {quality.budget} may be lost; {quality.tries} precisions were "
        "tried (the report has each). Take more bits, smaller groups, a larger budget, or calibration text that is "
        "closer to the evaluation's",
    )


def _compare_draft(request: Request, outcome: Outcome, verified: Verified, log: Log) -> None:
    from sixfold_runtime.prepare import draft_check

    found = sources.parse(request.draft_for or "")
    if not isinstance(found, sources.ClaimSource) or request.evaluation is None or outcome.folder is None:
        raise PreparationError(Reason.UNEXPECTED, "--draft-for needs a pvc:// target and --evaluation")
    target = sources.folder_in_claim(request.claims, found)
    parameters = (verified.facts.parameters, count_parameters(target))
    draft = draft_check.compare(
        outcome.folder, target, request.target_name, parameters, request.evaluation, request.claims
    )
    outcome.summary = outcome.summary.model_copy(update={"draft": draft})
    outcome.report["draft"] = draft.to_dict()
    log(
        f"draft for {draft.target}: a step takes {draft.latency_ratio} of the target's, {draft.parameter_ratio} of its "
        f"parameters, KL {draft.kl} nats a token"
    )
    for warning in draft.warnings:
        log(f"warning: {warning}")


def forget_source(outcome: Outcome) -> None:
    """Free the space of fetched weights that others were made of."""
    if outcome.folder is not None:
        shutil.rmtree(outcome.folder.with_name(f".{outcome.folder.name}.source"), ignore_errors=True)
