"""Plots as inline SVG: they scale with the page, print, and take its colours."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from sixfold_runtime.length_bucket import LENGTH_BUCKETS
from sixfold_runtime.report.model import Cell, Quadrant

CELL, GAP, LABEL = 26, 2, 170
"""Pixels."""


def heat_map(cells: Sequence[Cell]) -> str:
    """Hour of the day across, variant and length down; the darker, the larger the share of requests."""
    rows = sorted({(cell.variant, cell.length_bucket) for cell in cells}, key=_row_order)
    most = max((cell.share for cell in cells), default=0.0) or 1.0
    width, height = LABEL + 24 * (CELL + GAP), 30 + len(rows) * (CELL + GAP)
    parts = [_svg(width, height, "Share of requests by hour of the day, length of the prompt and variant")]
    for hour in range(0, 24, 3):
        parts.append(_text(LABEL + hour * (CELL + GAP) + CELL / 2, 16, f"{hour:02}", "middle"))
    for number, row in enumerate(rows):
        top = 24 + number * (CELL + GAP)
        parts.append(_text(LABEL - 8, top + CELL * 0.66, f"{row[0]} · {row[1]}", "end"))
        found = {cell.hour: cell for cell in cells if (cell.variant, cell.length_bucket) == row}
        for hour in range(24):
            parts.append(_cell(found.get(hour), hour, top, most))
    return "".join([*parts, "</svg>"])


def _cell(cell: Cell | None, hour: int, top: float, most: float) -> str:
    left, strength = LABEL + hour * (CELL + GAP), 0.0 if cell is None else cell.share / most
    title = f"{hour:02}:00 UTC: nothing"
    if cell is not None:
        title = f"{hour:02}:00 UTC: {cell.requests:,.0f} requests, {100 * cell.share:.1f} %"
    fill = 'class="empty"' if cell is None else f'class="heat" fill-opacity="{0.15 + 0.85 * strength:.2f}"'
    return (
        f'<rect x="{left}" y="{top}" width="{CELL}" height="{CELL}" rx="4" {fill}><title>{escape(title)}</title></rect>'
    )


def bars(rows: Sequence[tuple[str, float, str]]) -> str:
    """(label, share of the longest bar, text) a row."""
    height = 34
    parts = [_svg(640, height * len(rows), "Bars")]
    longest = max((value for _, value, _ in rows), default=0.0) or 1.0
    for number, (label, value, text) in enumerate(rows):
        top = number * height
        parts.append(_text(0, top + 21, label, "start"))
        width = max(2.0, 300 * value / longest)
        parts.append(f'<rect class="bar" x="200" y="{top + 6}" width="{width:.1f}" height="22" rx="4"/>')
        parts.append(_text(208 + width, top + 21, text, "start"))
    return "".join([*parts, "</svg>"])


def quadrants(found: Sequence[Quadrant]) -> str:
    """Share of the requests across, of the engine time up: above the diagonal is what costs more than its share."""
    known = [entry for entry in found if entry.cost_share is not None]
    side, left, top = 360, 46, 12
    parts = [_svg(side + left + 150, side + top + 44, "Share of requests against share of engine time")]
    parts.append(f'<rect class="empty" x="{left}" y="{top}" width="{side}" height="{side}" rx="6"/>')
    parts.append(f'<line class="rule" x1="{left}" y1="{top + side}" x2="{left + side}" y2="{top}"/>')
    for share in (0.0, 0.5, 1.0):
        parts.append(_text(left + side * share, top + side + 18, f"{100 * share:.0f} %", "middle"))
        parts.append(_text(left - 6, top + side * (1 - share) + 5, f"{100 * share:.0f} %", "end"))
    parts.append(_text(left + side / 2, top + side + 38, "of the requests", "middle"))
    for entry in known:
        x, y = left + side * entry.share, top + side * (1 - (entry.cost_share or 0.0))
        name = f"{entry.variant} · {entry.length_bucket}"
        parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="7"><title>{escape(name)}</title></circle>')
        parts.append(_text(x + 11, y + 5, name, "start"))
    return "".join([*parts, "</svg>"])


def _row_order(row: tuple[str, str]) -> tuple[str, int]:
    variant, bucket = row
    return variant, LENGTH_BUCKETS.index(bucket) if bucket in LENGTH_BUCKETS else len(LENGTH_BUCKETS)


def _svg(width: float, height: float, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" aria-label="{escape(label)}"'
        ' xmlns="http://www.w3.org/2000/svg">'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
