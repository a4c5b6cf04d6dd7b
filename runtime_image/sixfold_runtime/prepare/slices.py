"""The task slices of a model: made as a ModelVariant asks for them, and verified with the weights beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sixfold_api.scalars import Task
from sixfold_api.subgraphs import SliceReport, SliceSpec
from sixfold_runtime.engine.slice_file import SLICES_FOLDER, SUFFIX, slice_info, slice_path
from sixfold_runtime.prepare import sources
from sixfold_runtime.prepare.evaluate import device
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.slice_trunk import SliceTrunk, open_trunk

Log = Callable[[str], None]


def make(folder: Path, specs: Sequence[SliceSpec], task: Task, claims: Path, log: Log) -> list[SliceReport]:
    """Make the slices that have a checkpoint or training text, in folder/slices, and verify all of `specs`.

    Args:
        task: of the variant, for slices that name none.
        claims: each claim lies at <claims>/<claim>.

    Raises PreparationError: UnusableSlice, UnusableTraining, SourceNotFound, UnsafePath; each says for which slice.
    """
    trunk = open_trunk(folder, device())
    reports = []
    for spec in specs:
        wanted = spec.task or task
        try:
            _make(trunk, spec, wanted, claims, log)
            reports.append(_verified(trunk, spec.name, wanted))
        except PreparationError as error:
            raise PreparationError(error.reason, f"slice {spec.name}: {error}", transient=error.transient) from error
    return reports


def verify(folder: Path) -> list[SliceReport]:
    """Check every slice that lies in folder/slices: finite, for these weights, of their shapes.

    Raises PreparationError(UnusableSlice).
    """
    paths = sorted((folder / SLICES_FOLDER).glob(f"*{SUFFIX}"))
    if not paths:
        return []
    trunk = open_trunk(folder, device())
    return [_verified(trunk, path.name.removesuffix(SUFFIX), None) for path in paths]


def _make(trunk: SliceTrunk, spec: SliceSpec, task: Task, claims: Path, log: Log) -> None:
    target = slice_path(trunk.folder, spec.name)
    if spec.checkpoint is not None:
        from sixfold_runtime.prepare.slice_cut import cut

        source = sources.parse(spec.checkpoint)
        if not isinstance(source, sources.ClaimSource):
            raise PreparationError(Reason.SOURCE_NOT_FOUND, f"{spec.checkpoint}: a checkpoint lies on a claim")
        log(f"cutting {spec.name} out of {spec.checkpoint}")
        cut(trunk, sources.folder_in_claim(claims, source), target, log, task)
    elif spec.training is not None:
        from sixfold_runtime.prepare.slice_train import Recipe, train
        from sixfold_runtime.prepare.texts import locate

        log(f"training {spec.name} on {spec.training.uri}")
        recipe = Recipe() if spec.adapter is None else Recipe(adapter=spec.adapter)
        train(trunk, locate(claims, spec.training), target, task, log, limit=spec.training.samples, recipe=recipe)


def _verified(trunk: SliceTrunk, name: str, task: Task | None) -> SliceReport:
    path = slice_path(trunk.folder, name)
    loaded = trunk.load(path)
    if task is not None and loaded.task is not task:
        raise PreparationError(
            Reason.UNUSABLE_SLICE, f"{path.name} is for {loaded.task}, and the variant says {task}: correct its task"
        )
    return SliceReport(name=name, task=loaded.task, size_bytes=slice_info(path).size_bytes)
