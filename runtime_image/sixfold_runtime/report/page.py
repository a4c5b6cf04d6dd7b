"""Figures -> one HTML page that needs nothing else: no script, no font, no picture from anywhere."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from sixfold_runtime.report import words
from sixfold_runtime.report.model import Figures
from sixfold_runtime.report.parts import Bin, CostSpread, Quadrant
from sixfold_runtime.report.quadrant_plot import drawn, quadrant_plot
from sixfold_runtime.report.summary import CAUSES

MOST_ROWS, MOST_NAMES = 12, 4
"""That a plot, or a heading, has at most."""


class Bar(NamedTuple):
    """One row of a bar plot."""

    label: str
    share: float
    """Of the plot's width."""
    text: str


class Row(NamedTuple):
    """One row of the heat map: for each column its share of the largest, and what it says."""

    label: str
    cells: tuple[tuple[float, str], ...]


def page(figures: Figures, title: str) -> str:
    """The whole page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.globals.update(
        money=words.money, ms=words.milliseconds, percent=words.percent, hours=words.hours, size=words.size
    )
    return environment.get_template("page.html.j2").render(
        f=figures,
        title=title,
        period=words.duration(3600 * figures.hours),
        bill=bill_parts(figures),
        waste=waste_bars(figures),
        heat=heat_rows(figures)[:MOST_ROWS],
        heat_left_out=max(0, len(heat_rows(figures)) - MOST_ROWS),
        most_rows=MOST_ROWS,
        ticks=tick_columns(len(figures.columns)),
        column_words=words.duration(figures.column_seconds),
        pairs=pairs(figures),
        capacity=capacity_columns(figures),
        most_pod_hours=max((entry.pod_hours for entry in figures.capacity_by_column), default=0.0),
        spreads=[(spread_title(spread), spread_words(spread), spread_bars(spread)) for spread in figures.spread],
        exits=[
            Bar(f"{one.variant}, after layer {one.depth}", one.share, words.percent(one.share)) for one in figures.exits
        ],
        # Our own markup: every word in it is escaped where it is put in.
        quadrant_plot=Markup(quadrant_plot(figures.quadrants)),
        quadrants=drawn(figures.quadrants),
    )


def bill_parts(figures: Figures) -> list[tuple[str, str, float, float]]:
    """(kind, words, amount, share): where the money goes; nothing where the whole isn't known."""
    if not figures.bill or figures.idle_cost is None:
        return []
    computing = figures.bill - figures.idle_cost
    wasted = min(computing, sum(amount for _, amount in figures.wasted_cost_by_cause))
    parts = [
        ("useful", "computing that answers needed", computing - wasted),
        ("wasted", "computing that bought nothing", wasted),
        ("idle", "pods that waited", figures.idle_cost),
    ]
    return [(kind, text, amount, amount / figures.bill) for kind, text, amount in parts if amount > 0]


def waste_bars(figures: Figures) -> list[Bar]:
    costs = dict(figures.wasted_cost_by_cause)
    longest = max((share for _, share in figures.wasted_by_cause), default=1.0)
    return [
        Bar(
            CAUSES.get(cause, cause),
            share / longest,
            words.percent(share) + (f", about {words.money(costs[cause])}" if cause in costs else ""),
        )
        for cause, share in figures.wasted_by_cause
    ]


def heat_rows(figures: Figures) -> list[Row]:
    """A model and a length each, those with most requests first."""
    most = max(cell.share for cell in figures.cells)
    found: dict[tuple[str, str], dict[int, tuple[float, str]]] = {}
    totals: dict[tuple[str, str], float] = {}
    for cell in figures.cells:
        key = cell.variant, cell.length_bucket
        text = f"{figures.columns[cell.column]} UTC: {cell.requests:,.0f} requests, {words.percent(cell.share)}"
        found.setdefault(key, {})[cell.column] = (cell.share / most, text)
        totals[key] = totals.get(key, 0.0) + cell.requests
    return [
        Row(
            f"{variant}, {bucket} tokens",
            tuple(
                found[variant, bucket].get(column, (0.0, f"{name} UTC: none"))
                for column, name in enumerate(figures.columns)
            ),
        )
        for variant, bucket in sorted(found, key=lambda key: -totals[key])
    ]


def tick_columns(count: int) -> list[int]:
    """Columns whose beginning is named: at most six, or their names would touch on a phone."""
    return list(range(0, count, math.ceil(count / 6)))


def pairs(figures: Figures) -> list[Quadrant]:
    """Requests whose cost is known, the dearest first, for the comparison of shares."""
    known = [entry for entry in figures.quadrants if entry.cost_share is not None]
    return sorted(known, key=lambda entry: -(entry.cost_share or 0.0))


def capacity_columns(figures: Figures) -> list[tuple[float, float, str]]:
    """(busy, idle, words) a column of time, as shares of the highest one."""
    found = {entry.column: entry for entry in figures.capacity_by_column}
    highest = max((entry.busy_hours + entry.idle_hours for entry in found.values()), default=0.0)
    columns = []
    for column, name in enumerate(figures.columns):
        entry = found.get(column)
        if entry is None or not highest:
            columns.append((0.0, 0.0, f"{name} UTC: no pods"))
        else:
            text = f"{name} UTC: {words.hours(entry.busy_hours)} busy, {words.hours(entry.idle_hours)} idle"
            columns.append((entry.busy_hours / highest, entry.idle_hours / highest, text))
    return columns


def spread_words(spread: CostSpread) -> str:
    """The quantiles, for people who don't say P90."""
    names = {"median": "Half", "P90": "90 %", "P99": "99 %"}
    told = [f"{names[name]} at most {words.milliseconds(value)}" for name, value in spread.quantiles_ms]
    return f"{', '.join(told)} of an engine."


def spread_title(spread: CostSpread) -> str:
    at = "" if spread.price is None else f", at {words.money(spread.price)} an hour"
    many = len(spread.variants) > MOST_NAMES
    return (f"{len(spread.variants)} models" if many else ", ".join(spread.variants)) + at


def spread_bars(spread: CostSpread) -> list[Bar]:
    most = max(one.requests for one in spread.bins)
    return [Bar(_range(one), one.requests / most, f"{one.requests:,.0f}") for one in spread.bins]


def _range(one: Bin) -> str:
    """Of a thousand requests where their cost is known, else of one's engine time."""
    if one.low_cost is not None:
        low, high = 1000 * one.low_cost, None if one.high_cost is None else 1000 * one.high_cost
        return f"over {words.money(low)}" if high is None else f"{words.money(low)} to {words.money(high)}"
    if one.high_ms is None:
        return f"over {words.milliseconds(one.low_ms)}"
    return f"{words.milliseconds(one.low_ms)} to {words.milliseconds(one.high_ms)}"
