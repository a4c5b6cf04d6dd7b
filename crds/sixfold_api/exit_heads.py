"""Exit heads of a classifier: how the preparation trains and calibrates them, and what it reports."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from sixfold_api.base import ApiModel, Rule, StatusModel
from sixfold_api.precision import TextSource
from sixfold_api.scalars import Decimal, Fraction, NoFloat, Unquoted

MIN_CALIBRATION_SAMPLES = 50
"""Fewer tell nothing about how often an exit disagrees with the full model."""
CONFIDENCE = 0.95
"""Of the bound on that disagreement."""


class ExitTraining(StrEnum):
    HEADS = "Heads"
    TRUNK = "Trunk"


class ExitHeads(ApiModel):
    """Linear heads behind some layers: a text whose label is sure enough there runs no further. Thresholds are
    calibrated so that, at 95% confidence, labels disagree with the full model's in at most `maxDisagreement`."""

    depths: Annotated[list[Annotated[int, Field(ge=1, le=256), Unquoted, NoFloat]], Field(max_length=64)] = []
    """Layers after which a head stands, counted from 1; absent means all but the last."""
    training: TextSource
    """Labelled text that the heads learn from; all of it unless `samples` says less."""
    train: ExitTraining = ExitTraining.HEADS
    """Heads leaves the model as it is and computes its layers once. Trunk trains the layers too: exits get better,
    the model becomes another one, and it takes longer."""
    epochs: Annotated[int, Field(ge=1, le=1000), Unquoted] | None = None
    """Passes over the training text; absent means 100 for Heads (of cached features) and 1 for Trunk."""
    distillation: Fraction = "0"
    """Share of the loss that comes from the full model's answer instead of the label."""
    max_disagreement: Fraction = "0.03"
    """Most labels, as a share, that may differ from the full model's."""
    length_relaxation: Fraction = "0.01"
    """Taken from a threshold, times the natural logarithm of the text's tokens; calibrated with it."""

    rules = (
        Rule(
            "!has(self.depths) || self.depths.all(d, self.depths.exists_one(e, e == d))",
            "each of depths may stand there once",
            lambda e: len(set(e.depths)) == len(e.depths),
        ),
    )


class ExitChoice(StatusModel):
    """Thresholds by one rule, and what they do to the calibration text."""

    depths: Annotated[list[int], Field(max_length=64)]
    """Layers after which a text may exit; none means that every text runs through."""
    thresholds: Annotated[list[Decimal], Field(max_length=64)]
    """Least confidence at each, before the relaxation by length; above 1 only a long text reaches it."""
    exit_rate: Fraction
    """Share of the texts that exit early."""
    mean_layers: Decimal
    """Layers that a text runs through, on average."""
    disagreement: Fraction
    """Share of labels that differ from the full model's."""
    disagreement_bound: Fraction
    """At most this share differs, at 95% confidence."""

    @property
    def lets_texts_exit(self) -> bool:
        return bool(self.depths) and float(self.exit_rate) > 0


class ExitReport(StatusModel):
    """What exits save and cost. The report beside the weights has every depth, and a plot."""

    layers: Annotated[int, Field(ge=1)]
    """Of the model."""
    calibrated: ExitChoice
    """By the rule Calibrated."""
    quantile: ExitChoice
    """By the rule Quantile: the 90th percentile of the confidences at one depth, however often it is wrong."""
    samples: Annotated[int, Field(ge=1)]
    """Held-out texts that were measured with the calibrated thresholds."""
    mean_layers: Decimal
    """Layers that a held-out text runs through, on average."""
    disagreement: Fraction
    """Share of the held-out texts whose label differs from the full model's."""
    accuracy: Fraction
    """On the held-out texts, with exits."""
    full_accuracy: Fraction
    """On the held-out texts, without."""
    calibration_error: Fraction
    """Expected calibration error of the confidences at exits, 15 bins, held-out texts."""
