"""A candidate's figures beside a baseline's, and which of them are over the limit. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sixfold_runtime.gate.record import Figure, Metric, Record

_OTHER_PACE = 1.2
"""That is worth a word."""


class Verdict(StrEnum):
    OK = "ok"
    WORSE = "worse"
    """By more than limit and spread together."""
    BETTER = "better"
    """By more than the spread."""
    NOT_COMPARED = "not compared"
    """A time that was taken on another machine."""
    NEW = "new"
    """The baseline has no such kind."""
    GONE = "gone"
    """The candidate doesn't serve this any more."""


@dataclass(frozen=True)
class Row:
    """One figure of both.

    Attributes:
        baseline, candidate: medians over the repeats; None where one has no such figure.
        change: how much worse, as a share: 0.1 is 10 % worse, -0.5 is half the cost.
        spread: how much of a change the repeats alone explain.
    """

    kind: str
    metric: Metric
    baseline: float | None
    candidate: float | None
    change: float | None
    spread: float | None
    verdict: Verdict


@dataclass(frozen=True)
class Agreement:
    kind: str
    same: int
    total: int


@dataclass(frozen=True)
class Comparison:
    rows: tuple[Row, ...]
    agreement: tuple[Agreement, ...]
    warnings: tuple[str, ...]
    limit: float
    baseline: Record

    @property
    def failures(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.verdict in (Verdict.WORSE, Verdict.GONE))


def compare(baseline: Record, candidate: Record, limit: float) -> Comparison:
    """Both of the same workload.

    Args:
        limit: how much worse a figure may be, as a share.
    """
    same_machine = baseline.machine == candidate.machine
    old = {(figure.kind, figure.metric): figure for figure in baseline.figures}
    new = {(figure.kind, figure.metric): figure for figure in candidate.figures}
    rows = tuple(
        _row(kind, metric, old.get((kind, metric)), new.get((kind, metric)), limit, same_machine)
        for kind, metric in {**old, **new}
    )
    agreement = tuple(
        Agreement(kind, sum(map(_agree, answers, candidate.answers[kind])), len(answers))
        for kind, answers in baseline.answers.items()
        if kind in candidate.answers
    )
    return Comparison(rows, agreement, tuple(_warnings(baseline, candidate, agreement)), limit, baseline)


def _row(kind: str, metric: Metric, old: Figure | None, new: Figure | None, limit: float, same_machine: bool) -> Row:
    baseline, candidate = (None if one is None else statistics.median(one.values) for one in (old, new))
    if old is None or new is None:
        return Row(kind, metric, baseline, candidate, None, None, Verdict.NEW if old is None else Verdict.GONE)
    change, spread = _change(_costs(old), _costs(new))
    if metric.is_time and not same_machine:
        verdict = Verdict.NOT_COMPARED
    elif change > limit + spread:
        verdict = Verdict.WORSE
    else:
        verdict = Verdict.BETTER if change < -spread else Verdict.OK
    return Row(kind, metric, baseline, candidate, change, spread, verdict)


def _agree(there: Sequence[str], here: Sequence[str]) -> bool:
    """Whether some repeats of both gave the same answer."""
    return not set(there).isdisjoint(here)


def _change(old: Sequence[float], new: Sequence[float]) -> tuple[float, float]:
    """How much higher the new costs are, and how much the repeats differ among themselves, as shares of the medians.

    The spread is each side's interquartile range, which one bad repeat doesn't widen; the two sides are independent, so
    their squares add up.
    """
    before, after = statistics.median(old), statistics.median(new)
    if not before or not math.isfinite(after):
        return (0.0 if after == before else math.inf), 0.0
    return after / before - 1, math.hypot(_interquartile_range(old), _interquartile_range(new)) / before


def _costs(figure: Figure) -> list[float]:
    """Of each repeat. A time is divided by what a fixed calculation took just then: a machine that others use too is
    often slower for minutes, and so is a hot one."""
    costs = [_cost(figure.metric, value) for value in figure.values]
    return [cost / pace for cost, pace in zip(costs, figure.paces, strict=True)] if figure.paces else costs


def _cost(metric: Metric, value: float) -> float:
    """The figure as something of which less is better, in proportion to money."""
    if metric is Metric.TOKENS_PER_SECOND:
        return 1 / value if value else math.inf
    if metric is Metric.WASTED_FLOPS_RATIO:  # operations computed for each useful one
        return 1 / (1 - value) if value < 1 else math.inf
    return value


def _pace(record: Record) -> float:
    paces = [pace for figure in record.figures for pace in figure.paces]
    return statistics.median(paces) if paces else 1.0


def _interquartile_range(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return third - first


def _warnings(baseline: Record, candidate: Record, agreement: Sequence[Agreement]) -> list[str]:
    warnings = []
    if baseline.machine != candidate.machine:
        there, here = (f"{m.cpu}, {m.cpus} CPUs, {m.device}" for m in (baseline.machine, candidate.machine))
        threads = f"{baseline.machine.threads} and {candidate.machine.threads} threads"
        warnings.append(
            f"the baseline is from another machine ({there}; here {here}; {threads}): times can't be compared and"
            " don't decide, only memory and operations do"
        )
    warnings += [
        f"the baseline is from {name} {there}, this is {here}"
        for name, there in baseline.versions.items()
        if (here := candidate.versions.get(name, "none")) != there
    ]
    pace = _pace(candidate) / _pace(baseline)
    if baseline.machine == candidate.machine and not 1 / _OTHER_PACE < pace < _OTHER_PACE:
        warnings.append(
            f"the machine takes {pace:.2g} times as long for a fixed calculation as it did for the baseline: times are"
            " compared after dividing by that"
        )
    if gone := [mode for mode in baseline.modes if mode not in candidate.modes]:
        warnings.append(f"on in the baseline and off in the candidate: {', '.join(gone)}")
    if come := [mode for mode in candidate.modes if mode not in baseline.modes]:
        warnings.append(f"off in the baseline and on in the candidate: {', '.join(come)}")
    warnings += [
        f"{one.kind}: {one.total - one.same} of {one.total} greedy answers changed"
        for one in agreement
        if one.same < one.total
    ]
    return warnings
