"""What was counted -> the figures of a report. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from sixfold_runtime.report import modes, money
from sixfold_runtime.report.advice import advice
from sixfold_runtime.report.model import SCHEMA_VERSION, UNKNOWN, Counted, Figures, Place, ReportError, Spent
from sixfold_runtime.report.parts import Capacity, Cell, Load, Quadrant
from sixfold_runtime.report.spread import spreads
from sixfold_runtime.report.summary import summary
from sixfold_runtime.waste import wasted_flops_ratio


def figures(counted: Counted) -> Figures:
    """Raises ReportError where nothing was counted."""
    requests = sum(counted.requests.values())
    if requests <= 0:
        raise ReportError(
            f"nobody made a request from {counted.start} to {counted.end}, as far as {counted.source} knows; look"
            " further back, such as with --since 24h"
        )
    seconds = sum(spent.seconds for spent in counted.spent.values())
    timed = sum(spent.requests for spent in counted.spent.values())  # more than requests where some have parts
    cost = money.total(money.work_cost(counted, work) for work in counted.spent)
    levels = tuple(money.levels(counted))
    saved, saved_share = money.saved(levels)
    capacity = money.capacity(counted)
    bill = money.total(part.cost for part in capacity)
    up, busy = (sum(part.pod_hours for part in capacity), sum(part.busy_hours for part in capacity))
    found = Figures(
        schema_version=SCHEMA_VERSION,
        source=counted.source,
        start=counted.start,
        end=counted.end,
        hours=counted.hours,
        requests=requests,
        failed_share=counted.failed / requests,
        engine_hours=seconds / 3600 if seconds else None,
        bill=bill,
        bill_per_request=None if bill is None else bill / requests,
        cost=cost,
        cost_per_request=cost / min(timed, requests) if cost is not None and timed else None,
        saved=saved,
        saved_share=saved_share,
        wasted_share=_wasted(counted),
        wasted_by_cause=_by_cause(counted),
        wasted_cost_by_cause=money.wasted_costs(counted),
        columns=tuple(counted.slots.label(column) for column in range(counted.slots.count)),
        column_seconds=counted.slots.width_seconds,
        is_daily=counted.slots.is_daily,
        cells=_cells(counted, requests),
        quadrants=_quadrants(counted, requests, capacity),
        levels=levels,
        modes=tuple(modes.modes(counted)),
        exits=tuple(modes.exits(counted)),
        mean_exit_depth=tuple(modes.mean_exit_depth(counted)),
        tokens_per_verification=modes.tokens_per_verification(counted),
        memory=tuple(modes.memory(counted)),
        spread=spreads(counted),
        utilisation=min(1.0, busy / up) if up else None,
        idle_hours=sum(part.idle_hours for part in capacity) if capacity else None,
        idle_cost=money.total(part.idle_cost for part in capacity),
        capacity=capacity,
        capacity_by_column=money.capacity_by_column(counted),
        loads=_loads(counted),
        missing=tuple(_missing(counted)),
    )
    found = replace(found, advice=advice(found))
    return replace(found, summary=summary(found))


def _wasted(counted: Counted) -> float | None:
    useful = sum(flops for (_, _, cause), flops in counted.flops.items() if not cause)
    ratio = wasted_flops_ratio(useful, sum(counted.flops.values()) - useful)
    return None if math.isnan(ratio) else ratio


def _by_cause(counted: Counted) -> tuple[tuple[str, float], ...]:
    total, causes = sum(counted.flops.values()), defaultdict[str, float](float)
    for (_, _, cause), flops in counted.flops.items():
        causes[cause] += flops
    shares = [(cause, flops / total) for cause, flops in causes.items() if cause and flops > 0]
    return tuple(sorted(shares, key=lambda entry: -entry[1]))


def _cells(counted: Counted, requests: float) -> tuple[Cell, ...]:
    return tuple(
        Cell(column, bucket, variant, number, number / requests)
        for (column, bucket, variant), number in sorted(counted.requests.items())
        if number > 0
    )


def _quadrants(counted: Counted, requests: float, capacity: Iterable[Capacity]) -> tuple[Quadrant, ...]:
    shares: dict[tuple[str, str], float] = defaultdict(float)
    for (_, bucket, variant), number in counted.requests.items():
        shares[bucket, variant] += number / requests
    spent: dict[tuple[str, str], Spent] = defaultdict(Spent)
    places: dict[str, set[Place]] = defaultdict(set)
    for work, one in counted.spent.items():
        spent[work.length_bucket, work.variant].requests += one.requests
        spent[work.length_bucket, work.variant].seconds += one.seconds
        places[work.variant].add(money.place_of(counted, work.policy, work.variant))
    costs = {
        key: money.total(
            money.work_cost(counted, work) for work in counted.spent if (work.length_bucket, work.variant) == key
        )
        for key in spent
    }
    whole = money.total(costs.values())
    held = {Place(part.policy, part.component): part for part in capacity}
    found = []
    for (bucket, variant), share in shares.items():
        one, amount = spent[bucket, variant], costs.get((bucket, variant))
        pods = [held[place] for place in places[variant] if place in held]
        up = sum(part.pod_hours for part in pods)
        found.append(
            Quadrant(
                length_bucket=bucket,
                variant=variant,
                share=share,
                engine_ms=1000 * one.seconds / one.requests if one.requests else None,
                cost_share=_cost_share(one, amount, whole, spent.values()),
                utilisation=min(1.0, sum(part.busy_hours for part in pods) / up) if up else None,
            )
        )
    return tuple(sorted(found, key=lambda entry: -entry.share))


def _cost_share(one: Spent, amount: float | None, whole: float | None, spent: Iterable[Spent]) -> float | None:
    """In money; where that isn't known, of the engine time."""
    if not one.requests:
        return None
    if amount is not None and whole:
        return amount / whole
    seconds = sum(other.seconds for other in spent)
    return one.seconds / seconds if seconds else None


def _loads(counted: Counted) -> tuple[Load, ...]:
    return tuple(
        Load(variant, load.starts, load.starts_seconds, load.longest_seconds)
        for variant, load in sorted(counted.loads.items())
    )


def _missing(counted: Counted) -> Iterable[str]:
    places = {money.place_of(counted, work.policy, work.variant) for work in counted.spent}
    places |= {place for place, _ in counted.pods or {}}
    unknown = sorted(place for place in places if money.price(counted, place) is None)
    if unknown or not places:
        names = ", ".join(f"{place.policy or 'these requests'} ({place.component})" for place in unknown)
        yield (
            f"What a pod costs isn't known{' of ' + names if names else ''}: set engine.costPerHour in the policy, or"
            " give --cost-per-hour. Sums that need it are left out."
        )
    if not counted.spent:
        yield "The engine time of requests is not known, so nothing is said about what one costs."
    if not counted.flops:
        yield "Operations were not counted here (a log doesn't tell them), so nothing is said about waste."
    if not counted.pods:
        yield "The hours of pods are not known here, so nothing is said about idle time or the whole bill."
    if counted.spent and not any(work.level == money.PLAIN for work in counted.spent):
        yield "Nothing ran at level 0 in this time, so savings against it are not shown."
    if any(bucket == UNKNOWN for _, bucket, _ in counted.requests):
        yield "The length of some prompts is unknown: they were refused or failed before they were read."
    if counted.skipped_lines:
        yield f"{counted.skipped_lines:,} lines of the log were no requests and were skipped."
    yield from counted.notes
