"""How much counters grew, out of samples. Pure.

Prometheus' increase() misses what a series begins with and extrapolates at its ends: a level that came up for a few
requests would be nearly invisible, and totals wouldn't add up. A report isn't in a hurry, so it takes the samples.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

Samples = Sequence[tuple[float, float]]
"""(Unix time, value), in order."""


def growth(samples: Samples, start_seconds: float, before: float | None = None) -> list[tuple[float, float]]:
    """(Unix time, growth until then since the sample before); a fall means that the counter began again at 0.

    A series whose first sample is later than `start_seconds` began at 0 in the period; one that is there at the start
    only grows from there.

    Args:
        before: the last value of an earlier piece of the same series; None where there is none.

    >>> growth([(0, 5), (10, 7), (20, 1)], start_seconds=0)
    [(10, 2), (20, 1)]
    >>> growth([(10, 7)], start_seconds=0)
    [(10, 7)]
    >>> growth([(10, 7)], start_seconds=0, before=5)
    [(10, 2)]
    """
    if not samples:
        return []
    if before is None:
        before = samples[0][1] if samples[0][0] <= start_seconds else 0
    grown = []
    for at, value in samples:
        step = value - before if value >= before else value
        before = value
        if at > start_seconds and step > 0:
            grown.append((at, step))
    return grown


class Counters:
    """Series that come in pieces, each from where the one before ended."""

    def __init__(self) -> None:
        self._last: dict[Hashable, float] = {}

    def grown(self, series: Hashable, samples: Samples, start_seconds: float) -> list[tuple[float, float]]:
        """As `growth`, of the next piece of a series."""
        found = growth(samples, start_seconds, self._last.get(series))
        if samples:
            self._last[series] = samples[-1][1]
        return found
