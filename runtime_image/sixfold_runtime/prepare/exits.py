"""The exit heads of a classifier: trained, calibrated, measured, written beside the weights, and verified there.

A fifth of the calibration text (from 250 texts on) fits temperatures, the rest proves thresholds. Measured on the
example model: an expected calibration error of 0.02 on held-out text instead of 0.07, and not more layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sixfold_api.exit_heads import MIN_CALIBRATION_SAMPLES, ExitReport, ExitTraining
from sixfold_api.exit_heads import ExitHeads as ExitHeadsSpec
from sixfold_api.precision import TextSource
from sixfold_api.scalars import Task
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.exit_heads import EXITS_FILE, ExitHeads, load_exit_heads, write_exit_heads
from sixfold_runtime.engine.fingerprint import trunk_fingerprint
from sixfold_runtime.engine.loader import LoadedModel
from sixfold_runtime.engine.trunk import Trunk
from sixfold_runtime.modes.early_exit import Calibration
from sixfold_runtime.prepare import exit_features, exit_report, exit_training
from sixfold_runtime.prepare.evaluate import load_weights
from sixfold_runtime.prepare.exit_measures import Answers
from sixfold_runtime.prepare.exit_texts import ExitTexts, read_texts
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.texts import Sample

Log = Callable[[str], None]
_TEMPERATURE_EVERY = 5


@dataclass(frozen=True)
class Order:
    """What is to be made, and from which text."""

    spec: ExitHeadsSpec
    calibration: TextSource
    evaluation: TextSource
    claims: Path


@dataclass(frozen=True)
class _Maker:
    """A model with the heads' place in it."""

    folder: Path
    model: LoadedModel
    trunk: Trunk
    depths: tuple[int, ...]
    order: Order
    log: Log

    def features(self, samples: Sequence[Sample]) -> exit_features.Features:
        return exit_features.compute(self.trunk, self.depths, samples, self.folder.parent, self.log)


def make(folder: Path, order: Order, log: Log) -> tuple[ExitReport, dict[str, Any]]:
    """Train and calibrate exit heads for the model in `folder`, and write them there with a plot.

    `train: Trunk` rewrites the folder's weights first; task slices for the old ones are removed.

    Returns: what the status shows, and the whole report.

    Raises PreparationError: WrongArchitecture, UnsupportedPrecision, InvalidDepths, NonFiniteWeights, LabelMismatch,
        UnusableTraining, UnusableCalibration, UnusableEvaluation, and what reading and writing raise.
    """
    maker = _open(folder, order, log)
    texts = read_texts(
        folder, maker.model, (order.spec.training, order.calibration, order.evaluation), order.claims, log
    )
    joint: dict[str, Any] = {}
    if order.spec.train is ExitTraining.TRUNK:
        from sixfold_runtime.prepare import exit_trunk

        joint = exit_trunk.train(folder, maker.model, maker.depths, texts, order.spec, log)
        maker = _open(folder, order, log)
    training = maker.features(texts.training)
    trained = [_train(maker, training, index) for index in range(len(maker.depths))]
    del training
    for_temperatures, for_thresholds = _split(texts.calibration)
    if for_temperatures:
        unseen = maker.features(for_temperatures)
        trained = [
            exit_training.recalibrated(head, unseen.at(index, unseen.logits.device), unseen.labels)
            for index, head in enumerate(trained)
        ]
    calibrated = maker.features(for_thresholds)
    heads = _assemble(maker, trained, calibrated)
    write_exit_heads(folder, heads, trunk_fingerprint(TensorStore(folder)))
    heads = _read_back(folder, maker.model, maker.trunk)
    measured = exit_report.Measured(
        heads=trained,
        calibration=_answers(heads, calibrated, maker.model.device),
        held_out=_answers(heads, maker.features(texts.evaluation), maker.model.device),
    )
    report, content = exit_report.make(measured, order.spec)
    exit_report.plot(folder, content)
    counts = _counts(texts) | {"temperatures": len(for_temperatures)}
    return report, content | {"texts": counts} | ({"training": joint} if joint else {})


def _split(calibration: list[Sample]) -> tuple[list[Sample], list[Sample]]:
    """For temperatures every fifth text, if that is enough of them; for thresholds all others, whose labels nothing has
    seen then."""
    part = calibration[::_TEMPERATURE_EVERY]
    if len(part) < MIN_CALIBRATION_SAMPLES:
        return [], calibration
    return part, [sample for index, sample in enumerate(calibration) if index % _TEMPERATURE_EVERY]


def verify(folder: Path) -> ExitHeads:
    """The exit heads in a folder, if they fit the model there. Raises PreparationError(UnusableExits)."""
    model = load_weights(folder, Task.CLASSIFICATION)
    return _read_back(folder, model, _require_trunk(folder, model))


def _read_back(folder: Path, model: LoadedModel, trunk: Trunk) -> ExitHeads:
    try:
        heads = load_exit_heads(folder, trunk, trunk_fingerprint(TensorStore(folder)), model.labels)
    except ModelLoadError as error:
        raise PreparationError(Reason.UNUSABLE_EXITS, str(error)) from error
    if heads is None:
        raise PreparationError(Reason.UNUSABLE_EXITS, f"{folder.name} has no {EXITS_FILE}")
    return heads


def _open(folder: Path, order: Order, log: Log) -> _Maker:
    model = load_weights(folder, Task.CLASSIFICATION)
    trunk = _require_trunk(folder, model)
    depths = tuple(sorted(order.spec.depths)) or tuple(range(1, trunk.layers))
    if not depths or depths[-1] >= trunk.layers:
        raise PreparationError(
            Reason.INVALID_DEPTHS,
            f"a head can stand behind layers 1 to {trunk.layers - 1} of this model, and exitHeads.depths has "
            f"{depths[-1]}"
            if depths
            else f"the model has {trunk.layers} layer: there is none to stop behind",
        )
    return _Maker(folder, model, trunk, depths, order, log)


def _require_trunk(folder: Path, model: LoadedModel) -> Trunk:
    if model.trunk is None or model.trunk.own_head is None:
        raise PreparationError(
            Reason.WRONG_ARCHITECTURE,
            f"{folder.name.strip('.')}: exit heads need a classifier with a head that the engine computes itself: a "
            "…ForSequenceClassification of BERT, RoBERTa, DistilBERT, Llama, Qwen2 or Qwen3",
        )
    return model.trunk


def _train(maker: _Maker, training: exit_features.Features, index: int) -> exit_training.TrainedHead:
    spec = maker.order.spec
    epochs = spec.epochs if spec.epochs is not None and spec.train is ExitTraining.HEADS else None
    head = exit_training.train(
        training.at(index, maker.model.device),
        training.labels,
        training.logits,
        float(spec.distillation),
        epochs or exit_training.DEFAULT_EPOCHS,
    )
    maker.log(f"the head behind layer {maker.depths[index]} agrees on {head.agreement:.1%} of unseen training texts")
    return head


def _assemble(
    maker: _Maker, trained: Sequence[exit_training.TrainedHead], calibrated: exit_features.Features
) -> ExitHeads:
    """Heads with what they say about calibration text."""
    spec = maker.order.spec
    by_depth = dict(zip(maker.depths, trained, strict=True))
    nothing = Calibration(
        depths=maker.depths,
        layers=maker.trunk.layers,
        confidences=np.empty((0, len(trained))),
        agrees=np.empty((0, len(trained)), bool),
        lengths=np.empty(0, np.int64),
        max_disagreement=float(spec.max_disagreement),
        length_relaxation=float(spec.length_relaxation),
        sharpness=tuple(head.sharpness for head in trained),
    )
    heads = ExitHeads(
        labels=maker.model.labels,
        weights={depth: head.weight.to(maker.model.device) for depth, head in by_depth.items()},
        biases={depth: head.bias.to(maker.model.device) for depth, head in by_depth.items()},
        temperatures={depth: head.temperature for depth, head in by_depth.items()},
        calibration=nothing,
    )
    return replace(heads, calibration=_answers(heads, calibrated, maker.model.device).calibration)


@torch.inference_mode()
def _answers(heads: ExitHeads, features: exit_features.Features, device: torch.device) -> Answers:
    """What the heads say, computed as the engine does."""
    scores = [heads.scores(depth, features.at(index, device)).cpu() for index, depth in enumerate(heads.depths)]
    predicted = torch.stack([score.argmax(dim=1) for score in scores], dim=1)
    confidences = torch.stack([score.amax(dim=1) for score in scores], dim=1)
    full = features.answers
    calibration = replace(
        heads.calibration,
        confidences=confidences.numpy().astype(np.float64),
        agrees=(predicted == full[:, None]).numpy(),
        lengths=features.lengths,
    )
    return Answers(calibration, predicted.numpy(), full.numpy(), features.labels.numpy())


def _counts(texts: ExitTexts) -> dict[str, int]:
    return {
        "training": len(texts.training),
        "calibration": len(texts.calibration),
        "evaluation": len(texts.evaluation),
        "leftOut": texts.left_out,
        "cut": texts.cut,
    }
