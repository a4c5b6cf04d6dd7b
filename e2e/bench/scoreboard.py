"""Results of several benchmarks as one Markdown table and one plot. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from comparisons import Result, Row, rows

LEFT, WIDTH, BAR, TOP = 480, 420, 18, 44
"""Pixels."""
LEAST, MOST = 0.25, 128.0
"""Ends of the logarithmic axis."""
GOOD, MISSED, PLAIN = "#2f855a", "#c05621", "#4a5568"


def markdown(results: Sequence[Result], failures: Mapping[str, str], about: str) -> str:
    """The page. `failures` are benchmarks that did not run, with the reason."""
    lines = [
        "# Benchmarks",
        "",
        f"{about} `make bench` writes this page; `make bench B=NAME` runs one, and the head of",
        "`e2e/bench/bench_NAME.py` says how it measures. Ratios are ours over the peer's: more is better.",
        "",
        "![How often better than each peer, on a logarithmic axis, with the goals](results.svg)",
        "",
        "| benchmark | product | peer | measured | goal | holds |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        for row in rows(result):
            holds = {None: "", True: "yes", False: "**no**"}[row.holds]
            lines.append(f"| `{result['name']}` | {row.product} | {row.peer} | {row.shown} | {row.goal} | {holds} |")
    if failures:
        lines += ["", "Did not run:", "", *(f"- `{name}`: {why}" for name, why in failures.items())]
    return "\n".join(lines) + "\n"


def plot(results: Sequence[Result]) -> str:
    """Bars of how often better than the peer; a tick where the goal is."""
    shown = [(result["name"], row) for result in results for row in rows(result) if row.ratio is not None]
    height = TOP + (BAR + 6) * len(shown) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 90} {height}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="100%" height="{height}" fill="#ffffff"/>',
    ]
    for value in (0.5, 1, 2, 4, 8, 16, 32, 64):
        x = place(value)
        colour = "#718096" if value == 1 else "#e2e8f0"
        parts.append(f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{height - 8}" stroke="{colour}"/>')
        parts.append(_text(x, TOP - 14, f"{value:g} x", "middle"))
    for number, (_, row) in enumerate(shown):
        parts += _bar(row, TOP + number * (BAR + 6))
    return "\n".join([*parts, "</svg>", ""])


def place(ratio: float) -> float:
    """Where a ratio stands on the axis, in pixels."""
    within = min(max(ratio, LEAST), MOST)
    return LEFT + WIDTH * math.log(within / LEAST) / math.log(MOST / LEAST)


def _bar(row: Row, top: float) -> list[str]:
    assert row.ratio is not None
    begin, end = sorted((place(1), place(row.ratio)))
    colour = {None: PLAIN, True: GOOD, False: MISSED}[row.holds]
    parts = [
        _text(LEFT - 8, top + 13, f"{row.product} / {row.peer}", "end"),
        f'<rect x="{begin:.1f}" y="{top}" width="{max(end - begin, 1):.1f}" height="{BAR}" rx="3" fill="{colour}"/>',
    ]
    if row.goal_ratio is not None:
        x = place(row.goal_ratio)
        end = max(end, x)
        line = f'x1="{x:.1f}" y1="{top - 2}" x2="{x:.1f}" y2="{top + BAR + 2}"'
        parts.append(f'<line {line} stroke="#1a202c" stroke-width="2"/>')
    parts.append(_text(end + 8, top + 13, f"{row.ratio:.3g}", "start"))
    return parts


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#1a202c">{escape(text)}</text>'


def said(result: Mapping[str, Any]) -> str:
    """One line about a result, for the terminal."""
    missed = [row for row in rows(result) if row.holds is False]
    if not missed:
        return "every goal holds"
    return "; ".join(f"{row.product} over {row.peer}: {row.shown}, goal {row.goal}" for row in missed)
