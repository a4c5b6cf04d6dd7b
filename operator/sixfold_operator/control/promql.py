"""PromQL, put together. `$window` stands for a signal's window. Pure."""

from __future__ import annotations

from sixfold_operator.control.model import Signal

BY_POLICY = "namespace, policy"
BY_LEVEL = f"{BY_POLICY}, level"
BY_ARM = f"{BY_LEVEL}, arm"
BY_VARIANT = f"{BY_POLICY}, variant"
REAL = 'outcome!~"refused|cancelled|limited"'
"""Requests that say something of us."""
PART, VALUE, SAMPLES = "sixfold_part", "value", "samples"
"""The label by which the two halves of an answer are told apart, and its values."""


def per_second(metric: str, by: str, where: str = "") -> str:
    """Of a counter, summed up."""
    return f"sum by ({by}) (rate({metric}{{{where}}}[$window]))"


def arrived(metric: str, by: str, where: str = "") -> str:
    """How much a counter grew in the window, summed up."""
    return f"sum by ({by}) (increase({metric}{{{where}}}[$window]))"


def share(metric: str, by: str, where: str = "", *, of: str = "", whole: str = "") -> str:
    """A part of a counter over more of it, or over another counter; 0 where the part hasn't been counted yet."""
    total = per_second(whole or metric, by, of)
    return f"(({per_second(metric, by, where)} or 0 * {total}) / {total})"


def mean(histogram: str, by: str) -> str:
    return f"{per_second(f'{histogram}_sum', by)} / {per_second(f'{histogram}_count', by)}"


def p95(histogram: str, by: str) -> str:
    """95th percentile of a histogram's observations in the window."""
    return f"histogram_quantile(0.95, {per_second(f'{histogram}_bucket', f'{by}, le')})"


def at_most(histogram: str, bound: int, by: str) -> str:
    """Share of observations up to the bound of a bucket."""
    return share(f"{histogram}_bucket", by, f'le=~"{bound}([.]0)?"', whole=f"{histogram}_count")


def query_of(signal: Signal) -> str:
    """A signal's query as a person may try it, with its window."""
    return _windowed(signal.query, signal)


def expression_of(signal: Signal) -> str:
    """One query that gives the values and the number of samples behind each, told apart by the label PART."""
    value, samples = _windowed(signal.query, signal), _windowed(signal.samples, signal)
    # The line feeds end a comment in a query of the chart's values.
    return (
        f'label_replace((\n{value}\n), "{PART}", "{VALUE}", "", "") or '
        f'label_replace((\n{samples}\n), "{PART}", "{SAMPLES}", "", "")'
    )


def _windowed(query: str, signal: Signal) -> str:
    milliseconds = round(signal.window_seconds * 1000)
    window = f"{milliseconds}ms" if milliseconds % 1000 else f"{milliseconds // 1000}s"
    return query.replace("$window", window)
