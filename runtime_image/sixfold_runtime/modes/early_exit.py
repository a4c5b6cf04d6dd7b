"""How sure an exit head must be before a text may stop there: pure arithmetic on what the preparation measured.

A text leaves at the first depth whose confidence reaches ``threshold - relaxation * ln(tokens)``. Three rules choose
the thresholds:

Calibrated (the default) asks the same of every depth: that its label is the full model's with probability p, which the
training text taught to read from the confidence (``sharpness``). It lowers p as far as the calibration text allows, in
a fixed-sequence test (Learn-then-Test: Angelopoulos et al., arXiv 2110.01052; for exits: Jazbec et al., arXiv
2405.20915): the grid of p was laid before any calibration text was seen and is walked from thresholds that nothing
reaches downwards; each step is a hypothesis "more than `max_disagreement` of the texts would get another label than
from the full model", rejected where the exact binomial (Clopper-Pearson) bound at 95% keeps the budget; the first that
isn't rejected ends the walk. As the order is fixed, no correction for the number of steps is due: with probability 95%
over the draw of the calibration text the chosen thresholds keep the budget. The one assumption: served texts are
exchangeable with the calibration's (of the same kind, independent of each other, none of them trained on). The
relaxation by length is part of what is tested.

One family of thresholds, all depths, is deliberate. Choosing among families (which depths) costs a Bonferroni
correction or a part of the calibration text; on the example model, with 528 texts and budgets of 2 to 5%, these cost
0.1 to 0.7 layers, and the best of all families gains 0.04 at most. Equal probability of agreement needs 5 to 10% fewer
layers than equal confidence.

Quantile is the source's rule: the 90th percentile of the confidences at the depth nearest to half of the layers.
Fixed takes a given threshold at every depth. Both promise nothing about how often they are wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sixfold_api.classification import ExitRule
from sixfold_api.exit_heads import CONFIDENCE

QUANTILE = 0.9
_BISECTIONS = 60
_STEP = 0.01
"""Of the grid of thresholds, which are even in the logit of the probability of agreement."""
_LARGEST_LOGIT = 40.0
"""Stands for thresholds of 1; what lies above are thresholds over 1, which only the relaxation lets a text reach."""
_LOGITS_OVER_ONE = 1000.0
"""How many of them a threshold of 2 would be."""

Floats = NDArray[np.floating]
Flags = NDArray[np.bool_]
Counts = NDArray[np.integer]


@dataclass(frozen=True)
class Calibration:
    """What the heads said about calibration text.

    Attributes:
        depths: layers, counted from 1 and ascending, behind which a head stands.
        layers: of the model.
        confidences: [texts, depths], largest temperature-scaled probability.
        agrees: [texts, depths], whether its label is the full model's.
        lengths: [texts], tokens that the model reads, special ones included.
        max_disagreement: share of labels that may differ from the full model's, unless a policy says otherwise.
        length_relaxation: taken from a threshold, times ln(tokens), unless a policy says otherwise.
    """

    depths: tuple[int, ...]
    layers: int
    confidences: Floats
    agrees: Flags
    lengths: Counts
    max_disagreement: float
    length_relaxation: float
    sharpness: tuple[float, ...] = ()
    """[depths], positive: logit(probability that the label is the full model's) / logit(confidence); () is 1 each."""


@dataclass(frozen=True)
class Exits:
    """Where texts may leave: least confidence by depth, before the relaxation. Empty: nowhere."""

    thresholds: Mapping[int, float]
    length_relaxation: float

    def least_confidence(self, depth: int, tokens: int) -> float:
        """What a text of so many tokens (>= 1) must reach at `depth`. Raises KeyError where there is no exit."""
        return self.thresholds[depth] - self.length_relaxation * math.log(tokens)


@dataclass(frozen=True)
class Choice:
    """Exits by a rule, and what they do to the calibration text.

    Attributes:
        exit_rate: share of the texts that exit.
        mean_layers: that a text runs through.
        disagreement: share of the texts whose label differs from the full model's.
        disagreement_bound: the true share is at most this, at 95% confidence.
    """

    exits: Exits
    exit_rate: float
    mean_layers: float
    disagreement: float
    disagreement_bound: float


def choose(
    calibration: Calibration,
    rule: ExitRule,
    *,
    threshold: float | None = None,
    max_disagreement: float | None = None,
    length_relaxation: float | None = None,
) -> Choice:
    """The exits of a rule; where Calibrated finds no threshold that keeps the budget, there are none.

    Args:
        threshold: of rule Fixed, and only there.
        max_disagreement: of rule Calibrated; None is the calibration's.
        length_relaxation: None is the calibration's.
    """
    relaxation = calibration.length_relaxation if length_relaxation is None else length_relaxation
    match rule:
        case ExitRule.CALIBRATED:
            budget = calibration.max_disagreement if max_disagreement is None else max_disagreement
            thresholds = _calibrated(calibration, budget, relaxation)
        case ExitRule.QUANTILE:
            thresholds = _quantile(calibration)
        case ExitRule.FIXED:
            if threshold is None:
                raise ValueError("rule Fixed needs a threshold")
            thresholds = dict.fromkeys(calibration.depths, threshold)
    return measure(calibration, Exits(thresholds, relaxation))


def measure(calibration: Calibration, exits: Exits) -> Choice:
    """What given exits do to the calibration text."""
    leaves = exit_depths(calibration, exits)
    texts = len(leaves)
    wrong = sum(int((~calibration.agrees[leaves == d, i]).sum()) for i, d in enumerate(calibration.depths))
    return Choice(
        exits=exits,
        exit_rate=float((leaves < calibration.layers).mean()),
        mean_layers=float(leaves.mean()),
        disagreement=wrong / texts,
        disagreement_bound=disagreement_bound(wrong, texts),
    )


def exit_depths(calibration: Calibration, exits: Exits) -> NDArray[np.int64]:
    """[texts]: the depth at which each leaves; the number of layers where it doesn't."""
    leaves = np.full(len(calibration.lengths), calibration.layers)
    relaxed = exits.length_relaxation * np.log(calibration.lengths)
    for index, depth in reversed(list(enumerate(calibration.depths))):
        if depth in exits.thresholds:
            leaves[calibration.confidences[:, index] >= exits.thresholds[depth] - relaxed] = depth
    return leaves


def disagreement_bound(wrong: int, texts: int) -> float:
    """Clopper-Pearson: with 95% confidence, the share of which `wrong` of `texts` are a sample is at most this."""
    if wrong >= texts:
        return 1.0
    ways = _log_ways(wrong, texts)
    low, high = wrong / texts, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(ways, texts, middle)[-1] > 1 - CONFIDENCE else (low, middle)
    return high


def most_wrong(texts: int, budget: float) -> int:
    """Disagreements among so many texts up to which the bound keeps the budget; -1 if even none would be too many."""
    if not 0 < budget < 1:
        return texts if budget >= 1 else -1
    likely = _at_most(_log_ways(math.ceil(texts * budget), texts), texts, budget)
    return int(np.searchsorted(likely, 1 - CONFIDENCE, side="right")) - 1


def _log_ways(most: int, texts: int) -> Floats:
    """[most + 1]: logarithm of the ways to choose 0, 1, ... of so many texts."""
    chosen = np.arange(1, most + 1)
    return np.concatenate([[0.0], np.cumsum(np.log((texts - chosen + 1) / chosen))])


def _at_most(ways: Floats, texts: int, share: float) -> Floats:
    """Like `ways`: probability that at most 0, 1, ... are wrong, where `share` (between 0 and 1) of all are."""
    wrong = np.arange(len(ways))
    cumulated: Floats = np.cumsum(np.exp(ways + wrong * math.log(share) + (texts - wrong) * math.log1p(-share)))
    return cumulated


def _calibrated(calibration: Calibration, budget: float, relaxation: float) -> dict[int, float]:
    """The fixed-sequence test: the last step of the grid before the bound breaks the budget.

    At a step u a text leaves at depth d if its best place on the grid is below u before d, and is not up to d: sorted
    ends of these intervals count the disagreements for the whole grid at once.
    """
    allowed = most_wrong(len(calibration.lengths), budget)
    if allowed < 0 or not calibration.depths:
        return {}
    sharpness = np.array(calibration.sharpness or (1.0,) * len(calibration.depths))
    scores = calibration.confidences + relaxation * np.log(calibration.lengths)[:, None]
    up_to = np.maximum.accumulate(_places(scores, sharpness), axis=1)
    before = np.concatenate([np.full((len(up_to), 1), -np.inf), up_to[:, :-1]], axis=1)
    grid = np.arange(math.floor(up_to.max() / _STEP) + 1, -_LARGEST_LOGIT / _STEP, -1) * _STEP
    differs = ~calibration.agrees.astype(bool)
    wrong = _reaching(up_to[differs], grid) - _reaching(before[differs], grid)
    broken = np.flatnonzero(wrong > allowed)
    last = int(broken[0]) - 1 if len(broken) else len(grid) - 1
    if last < 0:
        return {}
    return dict(zip(calibration.depths, _thresholds(float(grid[last]), sharpness), strict=True))


def _places(scores: Floats, sharpness: Floats) -> Floats:
    """Relaxed confidences [texts, depths] -> the grid's largest steps at which they suffice."""
    inside = np.clip(scores, 1e-300, 1 - 1e-16)
    logits = np.minimum(sharpness * (np.log(inside) - np.log1p(-inside)), _LARGEST_LOGIT)
    return np.where(scores >= 1, _LARGEST_LOGIT + _LOGITS_OVER_ONE * (scores - 1), logits)


def _thresholds(step: float, sharpness: Floats) -> list[float]:
    """[depths]: the inverse of `_places`."""
    if step > _LARGEST_LOGIT:
        return [1 + (step - _LARGEST_LOGIT) / _LOGITS_OVER_ONE] * len(sharpness)
    return [1 / (1 + math.exp(-step / value)) for value in sharpness.tolist()]


def _reaching(scores: Floats, grid: Floats) -> NDArray[np.int64]:
    """[grid]: how many scores are at least as high as each threshold."""
    return len(scores) - np.searchsorted(np.sort(scores), grid, side="left")


def _quantile(calibration: Calibration) -> dict[int, float]:
    """The source's rule; of two depths that are as near to the middle, the shallower."""
    if not calibration.depths:
        return {}
    depth = min(calibration.depths, key=lambda d: (abs(2 * d - calibration.layers), d))
    confidences = calibration.confidences[:, calibration.depths.index(depth)]
    return {depth: round(float(np.quantile(confidences, QUANTILE)), 6)}
