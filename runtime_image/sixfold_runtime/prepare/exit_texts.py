"""The labelled text that exit heads learn from, are calibrated on and are measured on: three files without overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sixfold_api.exit_heads import MIN_CALIBRATION_SAMPLES
from sixfold_api.precision import TextSource
from sixfold_runtime.engine.loader import LoadedModel
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.text_checks import MAX_ODD_SHARE, normal
from sixfold_runtime.prepare.texts import MIN_EVALUATED, Sample, TextReader, locate, read_samples, within

MIN_TRAINING_SAMPLES = 50
"""Fewer teach a head nothing that holds."""


@dataclass(frozen=True)
class ExitTexts:
    """Every sample has a label, at least one token, and fits into the model's context."""

    training: list[Sample]
    calibration: list[Sample]
    evaluation: list[Sample]
    left_out: int
    """Lines that also stand in another of the files."""
    cut: int
    """Texts that are longer than the context."""


def read_texts(
    folder: Path,
    model: LoadedModel,
    sources: tuple[TextSource, TextSource, TextSource],
    claims: Path,
    log: Callable[[str], None],
) -> ExitTexts:
    """Read training, calibration and evaluation text.

    Calibration lines that are trained on, and evaluation lines that are trained or calibrated on, would flatter the
    heads: they are left out, and refused where they are more than a tenth of their file.

    Raises PreparationError: UnusableTraining, UnusableCalibration, UnusableEvaluation, LabelMismatch, SourceNotFound,
        UnsafePath; each names the file and, where it can, the line.
    """
    reader = TextReader(folder, model.labels)
    training, calibration, evaluation = sources
    learn = _read(training, claims, reader, Reason.UNUSABLE_TRAINING, MIN_TRAINING_SAMPLES, model.labels)
    read = _read(calibration, claims, reader, Reason.UNUSABLE_CALIBRATION, MIN_CALIBRATION_SAMPLES, model.labels)
    calibrate = _unknown(read, [(learn, training)], calibration, Reason.UNUSABLE_CALIBRATION)
    _require_classes(calibrate, calibration, Reason.UNUSABLE_CALIBRATION, model.labels)
    if len(calibrate) < MIN_CALIBRATION_SAMPLES:
        raise PreparationError(
            Reason.UNUSABLE_CALIBRATION,
            f"{calibration.uri}: {len(calibrate)} samples are left without those that are trained on, and "
            f"{MIN_CALIBRATION_SAMPLES} are needed: add more",
        )
    held_out = _read(evaluation, claims, reader, Reason.UNUSABLE_EVALUATION, MIN_EVALUATED, ())
    measure = _unknown(held_out, [(learn, training), (read, calibration)], evaluation, Reason.UNUSABLE_EVALUATION)
    left_out = len(read) - len(calibrate) + len(held_out) - len(measure)
    if left_out:
        log(f"{left_out} lines of calibration and evaluation stand in another of the three files and are left out")
    context = model.context_tokens
    parts = [learn, calibrate, measure]
    cut = sum(len(sample.ids) > context for part in parts for sample in part)
    if cut:
        log(f"{cut} texts are longer than {context} tokens, the model's context, and are cut there")
    fitting = [[replace(sample, ids=within(sample.ids, context)) for sample in part] for part in parts]
    log(f"{len(learn)} texts to learn from, {len(calibrate)} to calibrate on, {len(measure)} held out")
    return ExitTexts(fitting[0], fitting[1], fitting[2], left_out, cut)


def _read(
    source: TextSource, claims: Path, reader: TextReader, reason: Reason, needed: int, labels: Sequence[str]
) -> list[Sample]:
    """With every one of `labels` in it."""
    samples = read_samples(locate(claims, source), source, reader, reason, labelled=True, needed=needed)
    empty = next((sample for sample in samples if not sample.ids), None)
    if empty is not None:
        raise PreparationError(reason, f"{source.uri}: line {empty.line}: the tokenizer makes nothing of its text")
    _require_classes(samples, source, reason, labels)
    return samples


def _require_classes(samples: Sequence[Sample], source: TextSource, reason: Reason, labels: Sequence[str]) -> None:
    present = {sample.label for sample in samples}
    missing = [label for index, label in enumerate(labels) if index not in present]
    if missing:
        raise PreparationError(
            reason, f"{source.uri} has no sample of {', '.join(missing[:8])}: heads can't tell what they never saw"
        )


def _unknown(
    samples: Sequence[Sample], others: Sequence[tuple[Sequence[Sample], TextSource]], source: TextSource, reason: Reason
) -> list[Sample]:
    """The samples that are in none of the other files."""
    known = {normal(sample.text): (sample.line, other.uri) for part, other in others for sample in part}
    kept = [sample for sample in samples if normal(sample.text) not in known]
    if len(samples) - len(kept) > MAX_ODD_SHARE * len(samples) or not kept:
        first = next(sample for sample in samples if normal(sample.text) in known)
        line, uri = known[normal(first.text)]
        raise PreparationError(
            reason,
            f"{source.uri}: {len(samples) - len(kept)} of {len(samples)} lines stand in another file too, such as line "
            f"{first.line} (line {line} of {uri}): calibrate and measure on text that nothing else has seen",
        )
    return kept
