"""Statistics of labels: two answers for the same texts, calibration error, F1. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959964
ECE_BINS = 15


@dataclass(frozen=True)
class Difference:
    """What the second of two answers to the same texts changes.

    Attributes:
        accuracy: of the second, less that of the first, as a share.
        low, high: 95% interval of that difference for texts like these (normal approximation over the pairs).
        p: that a difference at least as large comes by chance: exact McNemar test, two-sided.
        disagreement: share of the texts whose answers differ.
    """

    accuracy: float
    low: float
    high: float
    p: float
    disagreement: float


def difference(truth: Sequence[str], first: Sequence[str], second: Sequence[str]) -> Difference:
    """Compare two answers for the same texts; at least one text."""
    changes = [(b == t) - (a == t) for t, a, b in zip(truth, first, second, strict=True)]
    texts, won, lost = len(changes), changes.count(1), changes.count(-1)
    mean = (won - lost) / texts
    half = Z95 * math.sqrt(max(0.0, (won + lost) / texts - mean**2) / texts)
    changed = sum(a != b for a, b in zip(first, second, strict=True))
    return Difference(mean, mean - half, mean + half, mcnemar(won, lost), changed / texts)


def mcnemar(won: int, lost: int) -> float:
    """Two-sided p of so many texts won and lost if both were as likely."""
    tail = sum(math.comb(won + lost, k) for k in range(min(won, lost) + 1)) / 2 ** (won + lost)
    return min(1.0, 2 * tail)


def calibration_error(confidences: Sequence[float], right: Sequence[bool]) -> float:
    """Expected calibration error over ECE_BINS bins of equal width (Naeini et al., AAAI 2015)."""
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(ECE_BINS)]
    for confidence, is_right in zip(confidences, right, strict=True):
        bins[min(ECE_BINS - 1, int(confidence * ECE_BINS))].append((confidence, is_right))
    return sum(abs(sum(c for c, _ in b) - sum(r for _, r in b)) for b in bins) / len(confidences)


def accuracy(truth: Sequence[str], found: Sequence[str]) -> float:
    """Share that is right."""
    return sum(t == f for t, f in zip(truth, found, strict=True)) / len(truth)


def macro_f1(truth: Sequence[str], found: Sequence[str]) -> float:
    """Unweighted mean of the labels' F1, over labels that occur in the truth."""
    scores = []
    for label in set(truth):
        hits = sum(t == f == label for t, f in zip(truth, found, strict=True))
        scores.append(2 * hits / (truth.count(label) + found.count(label)))
    return sum(scores) / len(scores)
