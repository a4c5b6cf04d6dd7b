"""What exits do to labelled text: accuracy, disagreement, calibration error, and the surface to choose a depth from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sixfold_runtime.modes.early_exit import Calibration, Choice, Exits, exit_depths, measure

BINS = 15
_RATE_STEPS = 20
_Z95 = 1.959964


@dataclass(frozen=True)
class Answers:
    """What heads and model say about labelled text.

    Attributes:
        calibration: confidences, agreement and lengths of the texts.
        predicted: int64 [texts, depths], the heads' labels.
        full: int64 [texts], the full model's.
        labels: int64 [texts].
    """

    calibration: Calibration
    predicted: NDArray[np.int64]
    full: NDArray[np.int64]
    labels: NDArray[np.int64]

    @property
    def full_accuracy(self) -> float:
        return float((self.full == self.labels).mean())


@dataclass(frozen=True)
class HeldOut:
    """Given exits on held-out text.

    Attributes:
        loss, interval: accuracy that exits cost, and the 95% interval of that, paired by text.
        calibration_error: of the confidences at exits; 0 where no text exits.
        exits: texts by the depth they left at; the number of layers stands for the rest.
    """

    choice: Choice
    accuracy: float
    full_accuracy: float
    loss: float
    interval: tuple[float, float]
    calibration_error: float
    exits: Mapping[int, int]


def held_out(answers: Answers, exits: Exits) -> HeldOut:
    """Measure exits on text that no threshold was chosen from."""
    calibration = answers.calibration
    leaves = exit_depths(calibration, exits)
    early = leaves < calibration.layers
    places = np.searchsorted(calibration.depths, leaves[early])
    labels = answers.full.copy()
    labels[early] = answers.predicted[early, places]
    right, full_right = labels == answers.labels, answers.full == answers.labels
    difference = full_right.astype(np.float64) - right
    half = _Z95 * float(difference.std()) / math.sqrt(len(difference))
    loss = float(difference.mean())
    return HeldOut(
        choice=measure(calibration, exits),
        accuracy=float(right.mean()),
        full_accuracy=answers.full_accuracy,
        loss=loss,
        interval=(loss - half, loss + half),
        calibration_error=calibration_error(calibration.confidences[early, places], right[early]),
        exits={int(depth): int(count) for depth, count in zip(*np.unique(leaves, return_counts=True), strict=True)},
    )


def calibration_error(confidences: NDArray[np.floating], right: NDArray[np.bool_]) -> float:
    """Expected calibration error: mean distance of confidence and accuracy over 15 equal bins, weighted by texts."""
    if not len(confidences):
        return 0.0
    bins = np.minimum((confidences * BINS).astype(int), BINS - 1)
    gaps = np.bincount(bins, weights=confidences - right, minlength=BINS)
    return float(np.abs(gaps).sum() / len(confidences))


def surface(answers: Answers) -> list[dict[str, Any]]:
    """Depth x exit rate x accuracy, with one exit at a time: the surest texts leave there, the others run through."""
    calibration = answers.calibration
    texts = len(answers.labels)
    scores = calibration.confidences + calibration.length_relaxation * np.log(calibration.lengths)[:, None]
    points = []
    for index, depth in enumerate(calibration.depths):
        order = np.argsort(-scores[:, index], kind="stable")
        right = (answers.predicted[order, index] == answers.labels[order]).astype(int)
        full_right = (answers.full[order] == answers.labels[order]).astype(int)
        gained = np.concatenate([[0], np.cumsum(right - full_right)]) + full_right.sum()
        wrong = np.concatenate([[0], np.cumsum(~calibration.agrees[order, index])])
        for step in range(_RATE_STEPS + 1):
            leaving = round(texts * step / _RATE_STEPS)
            points.append(
                {
                    "depth": depth,
                    "exitRate": step / _RATE_STEPS,
                    "threshold": round(float(scores[order[leaving - 1], index]), 6) if leaving else None,
                    "accuracy": round(float(gained[leaving]) / texts, 6),
                    "disagreement": round(float(wrong[leaving]) / texts, 6),
                    "meanLayers": round(calibration.layers - (calibration.layers - depth) * leaving / texts, 6),
                }
            )
    return points
