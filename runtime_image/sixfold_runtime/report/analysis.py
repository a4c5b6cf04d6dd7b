"""What was counted -> the figures of a report. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from sixfold_runtime.report.advice import advice
from sixfold_runtime.report.model import (
    SCHEMA_VERSION,
    Cell,
    Counted,
    Figures,
    LevelCost,
    ModeResult,
    Quadrant,
    ReportError,
)
from sixfold_runtime.waste import wasted_flops_ratio

QUANTILES = (("median", 0.5), ("P90", 0.9), ("P99", 0.99))


def figures(counted: Counted) -> Figures:
    """Raises ReportError where nothing was counted."""
    requests = sum(counted.requests.values())
    if requests <= 0:
        raise ReportError(f"no requests were found from {counted.start} to {counted.end} in {counted.source}")
    rate = _rate(counted)
    engine_seconds = sum(counted.engine_seconds.values())
    cost = None if rate is None or not engine_seconds else engine_seconds / 3600 * rate
    known = sum(counted.by_level.values())
    wasted = _wasted(counted)
    idle_hours = _idle_hours(counted)
    found = Figures(
        schema_version=SCHEMA_VERSION,
        source=counted.source,
        start=counted.start,
        end=counted.end,
        hours=counted.hours,
        requests=requests,
        failed_share=counted.failed / requests,
        engine_hours=engine_seconds / 3600 if engine_seconds else None,
        cost=cost,
        cost_per_request=cost / known if cost is not None and known else None,
        wasted_share=wasted,
        wasted_by_cause=_by_cause(counted),
        cells=_cells(counted, requests),
        quadrants=_quadrants(counted, requests),
        levels=tuple(_levels(counted, rate)),
        modes=tuple(modes(counted)),
        spread_ms=_spread(counted),
        utilisation=_share(counted.busy_hours, counted.pod_hours),
        idle_hours=idle_hours,
        idle_cost=idle_hours * rate if idle_hours is not None and rate is not None else None,
        loads=tuple(sorted(counted.loads.items())),
        missing=tuple(_missing(counted, rate)),
        advice=(),
    )
    return Figures(**{**vars(found), "advice": advice(found)})


def _rate(counted: Counted) -> float | None:
    """Cost of an engine hour: the engine's, or the only one that is known."""
    costs = counted.cost_per_hour
    return costs.get("engine", next(iter(costs.values()), None))


def _wasted(counted: Counted) -> float | None:
    useful = counted.flops.get("", 0.0)
    ratio = wasted_flops_ratio(useful, sum(counted.flops.values()) - useful)
    return None if math.isnan(ratio) else ratio


def _by_cause(counted: Counted) -> tuple[tuple[str, float], ...]:
    total = sum(counted.flops.values())
    shares = [(cause, flops / total) for cause, flops in counted.flops.items() if cause and total and flops > 0]
    return tuple(sorted(shares, key=lambda entry: -entry[1]))


def _cells(counted: Counted, requests: float) -> tuple[Cell, ...]:
    return tuple(
        Cell(hour, bucket, variant, number, number / requests)
        for (hour, bucket, variant), number in sorted(counted.requests.items())
        if number > 0
    )


def _quadrants(counted: Counted, requests: float) -> tuple[Quadrant, ...]:
    shares: dict[tuple[str, str], float] = {}
    for (_, bucket, variant), number in counted.requests.items():
        shares[bucket, variant] = shares.get((bucket, variant), 0.0) + number / requests
    total = sum(seconds for _, seconds in counted.by_length.values())
    found = []
    for (bucket, variant), share in shares.items():
        number, seconds = counted.by_length.get((bucket, variant), (0.0, 0.0))
        engine_ms = 1000 * seconds / number if number else None
        found.append(Quadrant(bucket, variant, share, engine_ms, seconds / total if total and number else None))
    return tuple(sorted(found, key=lambda entry: -entry.share))


def _levels(counted: Counted, rate: float | None) -> Iterator[LevelCost]:
    means = {key: counted.engine_seconds[key] / number for key, number in counted.by_level.items() if number > 0}
    for (variant, level), mean in sorted(means.items()):
        seconds = counted.engine_seconds[variant, level]
        plain = means.get((variant, "0")) or _plain_of_task(counted, variant)
        saved = 1 - mean / plain if plain and level != "0" else None
        cost = None if rate is None else seconds / 3600 * rate
        number = counted.by_level[variant, level]
        yield LevelCost(variant, level, number, 1000 * mean, seconds / 3600, cost, saved)


def _plain_of_task(counted: Counted, variant: str) -> float | None:
    """Mean engine seconds at level 0 of the variants with the same task: quantised weights never run there, and
    stand in for those that do."""
    task = counted.tasks.get(variant)
    plain = [key for key in counted.by_level if key[1] == "0" and task and counted.tasks.get(key[0]) == task]
    number = sum(counted.by_level[key] for key in plain)
    return sum(counted.engine_seconds[key] for key in plain) / number if number > 0 else None


def _spread(counted: Counted) -> tuple[tuple[str, float], ...]:
    """Quantiles of a request's engine time: exact from a log, interpolated in a histogram."""
    if counted.exact_seconds:
        ordered = sorted(counted.exact_seconds)
        return tuple((name, 1000 * ordered[min(len(ordered) - 1, int(q * len(ordered)))]) for name, q in QUANTILES)
    return tuple((name, 1000 * value) for name, q in QUANTILES if (value := quantile(counted.spread, q)) is not None)


def quantile(spread: Sequence[tuple[float, float]], share: float) -> float | None:
    """Of a cumulative histogram, linear within a bucket as Prometheus does; None where it is empty."""
    if not spread or spread[-1][1] <= 0:
        return None
    wanted, low, before = share * spread[-1][1], 0.0, 0.0
    for bound, number in spread:
        if number >= wanted:
            if math.isinf(bound):
                return low
            return bound if number == before else low + (bound - low) * (wanted - before) / (number - before)
        low, before = bound, number
    return low


def _idle_hours(counted: Counted) -> float | None:
    if counted.pod_hours is None or counted.busy_hours is None:
        return None
    return max(0.0, counted.pod_hours - counted.busy_hours)


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def modes(counted: Counted) -> Iterator[ModeResult]:
    """Per mode, what its counters say; modes of which nothing was counted are left out."""
    get = counted.modes.get
    for name, rows in (
        ("Early exit", (("texts that left early", _percent(get("exited"), get("exit_texts"))),)),
        (
            "Speculative decoding",
            (
                ("drafted tokens that were accepted", _percent(get("accepted"), get("drafted"))),
                ("time of drafting over verifying", _ratio(get("draft_seconds"), get("verify_seconds"))),
            ),
        ),
        (
            "KV reuse",
            (
                ("blocks found of those looked up", _percent(get("kv_hits"), get("kv_lookups"))),
                ("tokens of prompts that weren't computed", _number(get("reused_tokens"))),
            ),
        ),
        ("Batches by length", (("padding of all token positions", _percent(get("padding"), get("padded"))),)),
        ("Task slices", (("loads of slices", _number(get("slice_loads"))),)),
        ("Compressed streaming", (("bytes sent of those there were", _percent(get("sent"), get("raw"))),)),
        ("Shadow", (("answers that differ from level 0", _percent(get("differ"), get("shadowed"))),)),
    ):
        told = tuple((label, text) for label, text in rows if text)
        if told:
            yield ModeResult(name, told)


def _percent(part: float | None, whole: float | None) -> str:
    share = _share(0.0 if part is None else part, whole)
    return "" if share is None else f"{100 * share:.1f} %"


def _ratio(part: float | None, whole: float | None) -> str:
    return f"{part / whole:.2f}" if part is not None and whole else ""


def _number(value: float | None) -> str:
    return f"{value:,.0f}" if value else ""


def _missing(counted: Counted, rate: float | None) -> Iterable[str]:
    if rate is None:
        yield "No cost is known: set engine.costPerHour in the policy, or give --cost-per-hour."
    if not counted.engine_seconds:
        yield "The engine time of requests is not known, so nothing is said about cost."
    if not counted.flops:
        yield "Operations were not counted here (a log doesn't tell them), so nothing is said about waste."
    if counted.pod_hours is None:
        yield "The hours of pods are not known here, so nothing is said about idle time."
    if counted.engine_seconds and not any(level == "0" for _, level in counted.by_level):
        yield "Nothing ran at level 0 in this time, so savings against it are not shown."
    if counted.skipped_lines:
        yield f"{counted.skipped_lines} lines of the log were no requests and were skipped."
