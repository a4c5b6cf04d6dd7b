"""How much single requests cost: histograms and quantiles. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

from sixfold_runtime.report.model import Counted
from sixfold_runtime.report.money import HOUR_SECONDS, place_of, price
from sixfold_runtime.report.parts import Bin, CostSpread

QUANTILES = (("median", 0.5), ("P90", 0.9), ("P99", 0.99))
FINE = 1.02
"""Bounds of a log's bins are this factor apart: a quantile is right to 1 %, and memory is bounded."""
_STEPS = (1.0, 2.5, 5.0)


def fine_bound(seconds: float) -> float:
    """The upper bound of the bin that a log's value goes to.

    >>> 1.0 <= fine_bound(1.0) < 1.02
    True
    """
    return float(FINE ** math.ceil(math.log(seconds) / math.log(FINE)))


def spreads(counted: Counted) -> tuple[CostSpread, ...]:
    """One for each price of a pod, the most requests first: costs on pods of different prices aren't comparable by
    engine time."""
    by_price: dict[float | None, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    variants: dict[float | None, set[str]] = defaultdict(set)
    for (policy, variant), counts in counted.spread.items():
        at = price(counted, place_of(counted, policy, variant))
        for bound, number in counts.items():
            by_price[at][bound] += number
            if number > 0:
                variants[at].add(variant)
    drawn = coarse if counted.spread_is_exact else dict
    return tuple(
        CostSpread(tuple(sorted(variants[at])), at, tuple(_bins(drawn(counts), at)), tuple(_quantiles(counts)))
        for at, counts in sorted(by_price.items(), key=lambda entry: -sum(entry[1].values()))
        if variants[at]
    )


def _quantiles(counts: Mapping[float, float]) -> Iterator[tuple[str, float]]:
    for name, share in QUANTILES:
        value = quantile(counts, share)
        if value is not None:
            yield name, 1000 * value


def quantile(counts: Mapping[float, float], share: float) -> float | None:
    """Of a histogram, linear within a bin as Prometheus does; None where it is empty. What is in the last, infinite
    bin is told as its lower bound."""
    total = sum(counts.values())
    if total <= 0:
        return None
    wanted, low, below = share * total, 0.0, 0.0
    for bound in sorted(counts):
        number = counts[bound]
        if number > 0 and below + number >= wanted:
            return low if math.isinf(bound) else low + (bound - low) * max(0.0, wanted - below) / number
        low, below = bound, below + number
    return low


def _bins(counts: Mapping[float, float], per_hour: float | None) -> Iterator[Bin]:
    """From the first bin that has requests to the last."""
    bounds = sorted(counts)
    filled = [number for number, bound in enumerate(bounds) if counts[bound] > 0]
    for number in range(filled[0], filled[-1] + 1):
        low = bounds[number - 1] if number else 0.0
        high = None if math.isinf(bounds[number]) else bounds[number]
        yield Bin(
            low_ms=1000 * low,
            high_ms=None if high is None else 1000 * high,
            low_cost=_money(low, per_hour),
            high_cost=None if high is None else _money(high, per_hour),
            requests=counts[bounds[number]],
        )


def _money(seconds: float, per_hour: float | None) -> float | None:
    return None if per_hour is None else seconds / HOUR_SECONDS * per_hour


def coarse(counts: Mapping[float, float]) -> dict[float, float]:
    """A log's many bins as few, between 1, 2.5 and 5 times powers of ten, without gaps."""
    found: dict[int, float] = defaultdict(float)
    for bound, number in counts.items():
        found[_step(bound / math.sqrt(FINE))] += number  # of the bin's middle
    return {_bound(step): found.get(step, 0.0) for step in range(min(found) - 1, max(found) + 1)}


def _step(seconds: float) -> int:
    """Of the smallest bound that is at least this."""
    step = 3 * math.floor(math.log10(seconds))
    while _bound(step) < seconds:
        step += 1
    return step


def _bound(step: int) -> float:
    decade, number = divmod(step, 3)
    return _STEPS[number] * 10.0**decade
