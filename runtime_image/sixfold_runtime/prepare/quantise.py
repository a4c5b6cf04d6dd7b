"""Quantise, measure, and give more bits to the worst layers until the loss is within the budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sixfold_api.precision import Precision, QualityReport, Scheme, TextSource
from sixfold_api.scalars import Task
from sixfold_runtime.engine.loader import LoadedModel
from sixfold_runtime.prepare import gptq, int8, layers, saturation, text_checks
from sixfold_runtime.prepare.artifact import Workspace, weight_bytes
from sixfold_runtime.prepare.evaluate import (
    DEFAULT_ACCURACY_POINTS,
    DEFAULT_PERPLEXITY_PERCENT,
    WINDOW_TOKENS,
    CausalScorer,
    Quality,
    compare_classification,
    compare_generation,
    load_weights,
)
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.kernels import check
from sixfold_runtime.prepare.layers import Grid, Plan
from sixfold_runtime.prepare.texts import Sample, TextReader, locate, read_samples, windows
from sixfold_runtime.prepare.verify import Verified

Log = Callable[[str], None]


@dataclass(frozen=True)
class Order:
    """What the user asks for.

    Attributes:
        budget: most percent of perplexity, or points of accuracy, that may be lost.
        claims: folder in which claims are mounted.
    """

    precision: Precision
    calibration: TextSource | None
    evaluation: TextSource
    budget: float
    claims: Path


@dataclass(frozen=True)
class Texts:
    """Checked text: calibration is empty where the scheme needs none."""

    calibration: list[Sample]
    held_out: list[Sample]
    order_nats: float | None


@dataclass(frozen=True)
class Try:
    """One precision that was tried, with what it cost."""

    name: str
    folder: Path
    plan: Plan
    quality: Quality
    seconds: float

    def report(self) -> dict[str, Any]:
        quality = {key: value for key, value in vars(self.quality).items() if value is not None}
        return {"try": self.name, "layers": layers.describe(self.plan), "bytes": weight_bytes(self.folder)} | {
            **quality,
            "seconds": round(self.seconds, 1),
        }


@dataclass
class Quantised:
    """What came out; the last try is the one to serve if it is within the budget."""

    tries: list[Try]
    quality: QualityReport
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.tries[-1].folder


def default_budget(task: Task) -> float:
    return DEFAULT_PERPLEXITY_PERCENT if task is Task.GENERATION else DEFAULT_ACCURACY_POINTS


def quantise(source: Path, verified: Verified, task: Task, order: Order, place: Workspace, log: Log) -> Quantised:
    """Quantise the verified model in `source` as ordered, into a folder of the workspace.

    Raises PreparationError: UnsupportedPrecision, UnusableCalibration, UnusableEvaluation, NonFiniteWeights and what
    writing raises. A loss over the budget is no error here: see `quality`.
    """
    plan = plan_for(verified, task, order.precision)
    original = load_weights(source, task)
    if order.precision.scheme is Scheme.GPTQ and original.decoder is None:
        raise PreparationError(
            Reason.UNSUPPORTED_PRECISION,
            f"the engine computes GPTQ weights of Llama, Qwen2 and Qwen3 decoders, and this is a "
            f"{verified.facts.architecture}: use scheme: INT8, or None",
        )
    scorer = CausalScorer(original) if task is Task.GENERATION else None
    texts = _read_texts(source, verified, order, scorer, log)
    judge = _Judge(original, scorer, texts)
    tries, losses = _try_out(source, plan, order, texts, judge, place, log)
    last = tries[-1]
    quality = last.quality.report(order.budget, len(texts.held_out), len(tries))
    done = Quantised(tries, quality)
    done.report = {
        "tries": [tried.report() for tried in tries],
        "layers": _layers(last, losses, judge.saturation(source, last.folder)),
        "kernels": check(source, last.folder),
        "bytesBefore": weight_bytes(source),
        "bytesAfter": weight_bytes(last.folder),
        "heldOut": {"samples": len(texts.held_out), "tokens": sum(len(sample.ids) for sample in texts.held_out)},
    }
    if texts.calibration:
        tokens = sum(len(sample.ids) for sample in texts.calibration)
        calibration = {"samples": len(texts.calibration), "tokens": tokens, "orderNats": texts.order_nats}
        done.report["calibration"] = calibration
    return done


def plan_for(verified: Verified, task: Task, precision: Precision) -> dict[str, Grid | None]:
    """Each linear's grid; of INT8 those that are rounded. Raises PreparationError(UnsupportedPrecision)."""
    if verified.facts.scheme is not Scheme.NONE:
        raise PreparationError(
            Reason.UNSUPPORTED_PRECISION,
            f"the source is quantised already ({verified.facts.scheme}): remove precision, or begin with full weights",
        )
    if precision.scheme is Scheme.INT8:
        return dict.fromkeys(verified.linears, Grid(8, -1))
    if task is Task.CLASSIFICATION:
        raise PreparationError(
            Reason.UNSUPPORTED_PRECISION,
            "GPTQ is for generators here (GPTQModel knows no classifier's head): use precision.scheme: INT8",
        )
    return layers.gptq_plan(verified.linears, precision)


def _read_texts(source: Path, verified: Verified, order: Order, scorer: CausalScorer | None, log: Log) -> Texts:
    reader = TextReader(source, verified.facts.labels)
    path = locate(order.claims, order.evaluation)
    labelled = scorer is None
    held_out = read_samples(path, order.evaluation, reader, Reason.UNUSABLE_EVALUATION, labelled=labelled)
    if order.precision.scheme is not Scheme.GPTQ or order.calibration is None or scorer is None:
        return Texts([], held_out, None)
    path = locate(order.claims, order.calibration)
    calibration = read_samples(path, order.calibration, reader, Reason.UNUSABLE_CALIBRATION, labelled=False)
    cut = [replace(sample, ids=sample.ids[: verified.facts.context_tokens]) for sample in calibration]
    text_checks.require_varied(cut, path.name, max(shape.inputs for shape in verified.linears.values()))
    text_checks.require_held_out(calibration, held_out)
    worth = text_checks.require_meaningful(cut, path.name, scorer.loss)
    tokens = sum(len(sample.ids) for sample in cut)
    log(f"calibrating on {len(cut)} samples, {tokens} tokens; their order is worth {worth:.2f} nats a token")
    return Texts(cut, held_out, round(worth, 3))


class _Judge:
    """Measures weights against the source's."""

    def __init__(self, original: LoadedModel, scorer: CausalScorer | None, texts: Texts) -> None:
        self._original, self._scorer, self._texts = original, scorer, texts
        self._window_tokens = min(original.context_tokens, WINDOW_TOKENS)
        self._windows = windows(texts.held_out, self._window_tokens)

    def __call__(self, folder: Path) -> Quality:
        if self._scorer is None:
            prepared = load_weights(folder, Task.CLASSIFICATION)
            return compare_classification(self._original, prepared, self._texts.held_out)
        scorer = CausalScorer(load_weights(folder, Task.GENERATION))
        return compare_generation(self._scorer, scorer, self._windows)

    def output_errors(self, source: Path, prepared: Path) -> dict[str, float]:
        return {linear: seen.output_error for linear, seen in self.saturation(source, prepared).items()}

    def saturation(self, source: Path, prepared: Path) -> dict[str, saturation.Activations]:
        task = Task.CLASSIFICATION if self._scorer is None else Task.GENERATION
        calibration = windows(self._texts.calibration, self._window_tokens)
        return saturation.measure(source, prepared, task, calibration, self._windows)


def _try_out(
    source: Path, plan: Plan, order: Order, texts: Texts, judge: _Judge, place: Workspace, log: Log
) -> tuple[list[Try], dict[str, float]]:
    """The precision that was asked for; while it is over the budget, more bits for the worst layers, by `ROUNDS`.

    Returns: every try, and the losses by which layers were ranked (empty where there was no need to).
    """
    maker = _Maker(source, order.precision, texts, place)
    began = time.monotonic()
    first = maker.first(plan)
    tries = [_judged("as asked", first.folder, plan, judge, began, order, log)]
    losses = first.losses
    for name, share in maker.rounds(plan):
        if tries[-1].quality.loss <= order.budget:
            break
        began = time.monotonic()
        losses = losses or judge.output_errors(source, first.folder)
        folder, mixed = maker.raised(first.folder, plan, layers.worst(losses, share), name)
        tries.append(_judged(f"more for the {name}", folder, mixed, judge, began, order, log))
    return tries, losses


def _judged(name: str, folder: Path, plan: Plan, judge: _Judge, began: float, order: Order, log: Log) -> Try:
    quality = judge(folder)
    tried = Try(name, folder, plan, quality, time.monotonic() - began)
    verdict = "within" if quality.loss <= order.budget else "over"
    log(
        f"{name}: {layers.describe(plan)}, {weight_bytes(folder)} bytes; {quality.metric} {quality.source:.4f} -> "
        f"{quality.prepared:.4f}, loss {quality.loss:.3f}, {verdict} the budget of {order.budget:g} "
        f"({tried.seconds:.0f} s)"
    )
    return tried


class _Maker:
    """Writes quantised checkpoints. The one with the most bits is made once, when the first round needs it."""

    def __init__(self, source: Path, precision: Precision, texts: Texts, place: Workspace) -> None:
        self._source, self._precision, self._place = source, precision, place
        self._calibration = [sample.ids for sample in texts.calibration]
        self._most: Path | None = None

    def rounds(self, plan: Plan) -> tuple[tuple[str, float], ...]:
        """8 bits are the most of GPTQ; beyond INT8 there is full precision, for all of them no quantisation at all."""
        if self._precision.scheme is Scheme.INT8:
            return layers.ROUNDS[:-1]
        below = any(grid is not None and grid.bits < layers.MOST_BITS for grid in plan.values())
        return layers.ROUNDS if below else ()

    def first(self, plan: Plan) -> gptq.Made:
        folder = self._place.folder("asked")
        if self._precision.scheme is Scheme.INT8:
            int8.quantise(self._source, folder, list(plan))
            return gptq.Made(folder, {})
        return self._gptq(folder, plan)

    def raised(self, first: Path, plan: Plan, raised: set[str], name: str) -> tuple[Path, dict[str, Grid | None]]:
        folder = self._place.folder(name.replace(" ", "-"))
        if self._precision.scheme is Scheme.INT8:
            kept = {linear: None if linear in raised else grid for linear, grid in plan.items()}
            int8.quantise(self._source, folder, [linear for linear, grid in kept.items() if grid is not None])
            return folder, kept
        most = layers.widened(plan)
        if self._most is None:
            self._most = self._gptq(self._place.folder("most-bits"), most).folder
        mixed = {linear: most[linear] if linear in raised else grid for linear, grid in plan.items()}
        gptq.mix(first, self._most, folder, raised, mixed)
        return folder, mixed

    def _gptq(self, folder: Path, plan: Plan) -> gptq.Made:
        scratch = self._place.folder("scratch")
        return gptq.quantise(self._source, folder, scratch, plan, self._precision, self._calibration)


def _layers(last: Try, losses: Mapping[str, float], seen: Mapping[str, saturation.Activations]) -> list[dict[str, Any]]:
    """A row for each linear: precision, GPTQ's loss as it was first tried, and what happens to its activations."""
    return [
        {"name": name}
        | ({"bits": grid.bits, "groupSize": grid.group_size} if grid is not None else {"full": True})
        | ({"loss": losses[name]} if name in losses else {})
        | (seen[name].report() if name in seen else {})
        for name, grid in last.plan.items()
    ]
