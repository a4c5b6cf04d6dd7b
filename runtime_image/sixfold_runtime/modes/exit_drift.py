"""How far the texts that come are from those that exits were calibrated on. Pure: no clock, no I/O.

Thresholds keep their promise on texts like the calibration's. Two figures tell when these come no longer, without a
label: the population stability index of the text lengths, and how often texts exit.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LENGTH_BOUNDS_TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Upper ends of the bins, the last of which has none."""
WINDOW_TEXTS = 500
LEAST_TEXTS = 250
"""Fewer give an index well above 0 by chance alone."""


@dataclass(frozen=True)
class Drift:
    """Of the last texts against the calibration's."""

    length_index: float
    """Population stability index of the lengths: 0 is no difference, 0.1 a small one, above 0.25 a large one."""
    exit_rate_difference: float
    """Share that exited early, less the calibration's."""


class ExitDrift:
    """A window over the last texts. Texts are added by one thread, `current` may be asked from any."""

    def __init__(self, calibration_lengths: Iterable[int], calibrated_exit_rate: float) -> None:
        """Lengths are in tokens."""
        self._expected = _histogram(bisect_left(LENGTH_BOUNDS_TOKENS, int(tokens)) for tokens in calibration_lengths)
        self._exit_rate = calibrated_exit_rate
        self._texts: deque[tuple[int, bool]] = deque(maxlen=WINDOW_TEXTS)

    def add(self, tokens: int, exited: bool) -> None:
        """A text of that length was labelled while exits were on."""
        self._texts.append((bisect_left(LENGTH_BOUNDS_TOKENS, tokens), exited))

    def current(self) -> Drift | None:
        """None before there are enough texts."""
        texts = tuple(self._texts)
        if len(texts) < LEAST_TEXTS:
            return None
        return Drift(
            length_index=stability_index(self._expected, _histogram(length_bin for length_bin, _ in texts)),
            exit_rate_difference=sum(exited for _, exited in texts) / len(texts) - self._exit_rate,
        )


def stability_index(expected: Sequence[int], actual: Sequence[int]) -> float:
    """The population stability index of two histograms over the same bins: the sum over bins of
    (a - e) * ln(a / e), with a and e the shares. An empty bin counts as half a sample."""

    def shares(counts: Sequence[int]) -> list[float]:
        filled = [count or 0.5 for count in counts]
        return [count / sum(filled) for count in filled]

    # Bins that both leave empty tell nothing, and half samples in them would.
    used = [(e, a) for e, a in zip(expected, actual, strict=True) if e or a]
    pairs = zip(shares([e for e, _ in used]), shares([a for _, a in used]), strict=True)
    return sum((a - e) * math.log(a / e) for e, a in pairs)


def _histogram(bins: Iterable[int]) -> list[int]:
    counts = [0] * (len(LENGTH_BOUNDS_TOKENS) + 1)
    for length_bin in bins:
        counts[length_bin] += 1
    return counts
