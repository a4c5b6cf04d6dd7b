"""A picture of what exits cost and save, as SVG: one exit at a time on the left, all exits together on the right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import Any

_WIDTH, _HEIGHT = 1000, 460
_TOP, _BOTTOM = 76, 386
_INK, _SOFT, _GRID = "#1f2933", "#616e7c", "#e4e7eb"
_CHOSEN, _OTHER, _MEASURED = "#d64545", "#7b8794", "#0b69a3"
_LINES = ("#440154", "#443983", "#31688e", "#21918c", "#35b779", "#90d743", "#d8c414")
"""From the shallowest depth to the deepest (viridis)."""
_MAX_LINES = len(_LINES)
_MAX_BUDGET = 0.1

Point = tuple[float, float]


@dataclass
class _Panel:
    """Axes, and marks in their coordinates."""

    left: float
    right: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    marks: list[str] = field(default_factory=list)

    def at(self, point: Point) -> Point:
        """Pixels."""
        (x_low, x_high), (y_low, y_high) = self.x_range, self.y_range
        return (
            self.left + (point[0] - x_low) / (x_high - x_low) * (self.right - self.left),
            _BOTTOM - (point[1] - y_low) / (y_high - y_low) * (_BOTTOM - _TOP),
        )

    def line(self, points: Sequence[Point], colour: str, *, dashed: bool = False, width: float = 2) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self.at, points))
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.marks.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" '
            f'stroke-linejoin="round"{dash}/>'
        )

    def dot(self, point: Point, colour: str, radius: float = 5) -> None:
        x, y = self.at(point)
        self.marks.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}" stroke="#ffffff" stroke-width="1.5"/>'
        )

    def label(self, point: Point, height: float, text: str, colour: str) -> None:
        """To the right of a point, centred at a height in pixels."""
        x, _ = self.at(point)
        self.marks.append(_text(x + 9, height + 4, text, colour))

    def legend(self, place: int, text: str, colour: str) -> None:
        """An entry in the upper right corner, counted from 0."""
        y = _TOP + 14 + 20 * place
        self.marks.append(f'<circle cx="{self.right - 4:.1f}" cy="{y - 4:.1f}" r="5" fill="{colour}"/>')
        self.marks.append(_text(self.right - 15, y, text, _INK, anchor="end"))

    def axes(self, title: str, subtitle: str, x_name: str, ticks: Sequence[Sequence[tuple[float, str]]]) -> None:
        """Titles, grid lines and tick labels: `ticks` of x and of y."""
        frame = [_text(self.left, 32, title, _INK, size=15, bold=True), _text(self.left, 52, subtitle, _SOFT)]
        for value, name in ticks[1]:
            _, y = self.at((self.x_range[0], value))
            frame.append(f'<line x1="{self.left}" x2="{self.right}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_GRID}"/>')
            frame.append(_text(self.left - 8, y + 4, name, _SOFT, anchor="end"))
        for value, name in ticks[0]:
            x, _ = self.at((value, self.y_range[0]))
            frame.append(_text(x, _BOTTOM + 18, name, _SOFT, anchor="middle"))
        frame.append(_text((self.left + self.right) / 2, _BOTTOM + 38, x_name, _SOFT, anchor="middle"))
        self.marks[:0] = frame


def draw(content: Mapping[str, Any]) -> str:
    """The SVG of a report's `exits` (see exit_report.make)."""
    panels = [_surface(content), _trade_off(content)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
            f'height="{_HEIGHT}" font-family="system-ui, Helvetica, Arial, sans-serif" font-size="12">',
            "<title>Early exits: accuracy by depth and exit rate, and layers by allowed disagreement</title>",
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
            *(mark for panel in panels for mark in panel.marks),
            "</svg>\n",
        ]
    )


def _surface(content: Mapping[str, Any]) -> _Panel:
    depths = [row["depth"] for row in content["depths"]]
    shown = depths if len(depths) <= _MAX_LINES else [depths[i * len(depths) // _MAX_LINES] for i in range(_MAX_LINES)]
    curves = {
        depth: [(point["exitRate"], point["accuracy"]) for point in content["surface"] if point["depth"] == depth]
        for depth in shown
    }
    full = content["fullAccuracy"]
    values = [full, *(y for curve in curves.values() for _, y in curve)]
    y_ticks = _even(min(values), max(values))
    panel = _Panel(70, 430, (0, 1), (y_ticks[0], y_ticks[-1]))
    ends = []
    for place, (depth, curve) in enumerate(curves.items()):
        colour = _LINES[place * (_MAX_LINES - 1) // max(1, len(curves) - 1)]
        panel.line(curve, colour)
        ends.append((curve[-1], f"layer {depth}", colour))
    panel.line([(0, full), (1, full)], _INK, dashed=True, width=1.5)
    ends.append(((1, full), "full model", _INK))
    for (point, name, colour), y in zip(ends, _apart([panel.at(point)[1] for point, _, _ in ends]), strict=True):
        panel.label(point, y, name, colour)
    percent = [(value / 5, f"{value * 20}%") for value in range(6)]
    panel.axes(
        "One exit: accuracy by depth and exit rate",
        "The surest leave behind that layer, the others run through (calibration text)",
        "texts that exit",
        (percent, [(value, f"{value:.1%}") for value in y_ticks]),
    )
    return panel


def _trade_off(content: Mapping[str, Any]) -> _Panel:
    layers = content["layers"]
    panel = _Panel(580, 960, (0, _MAX_BUDGET), (0, layers))
    steps: list[Point] = [(0, layers)]
    for row in content["budgets"]:
        steps += [(row["maxDisagreement"], steps[-1][1]), (row["maxDisagreement"], float(row["meanLayers"]))]
    panel.line(steps, _INK)
    budget, held_out = content["maxDisagreement"], content["heldOut"]
    chosen, quantile = content["calibrated"], content["quantile"]
    panel.line([(min(budget, _MAX_BUDGET), 0), (min(budget, _MAX_BUDGET), layers)], _CHOSEN, dashed=True, width=1.5)
    marks = [
        (budget, chosen["meanLayers"], f"chosen: {float(chosen['meanLayers']):.2f} layers", _CHOSEN),
        (held_out["disagreement"], held_out["meanLayers"], "the same on held-out text, as measured", _MEASURED),
        (quantile["disagreementBound"], quantile["meanLayers"], "rule Quantile, at its bound", _OTHER),
    ]
    for place, (share, mean_layers, name, colour) in enumerate(marks):
        panel.dot((min(float(share), _MAX_BUDGET), float(mean_layers)), colour)
        panel.legend(place, name, colour)
    every = max(1, round(layers / 6))
    panel.axes(
        f"All exits: layers run, of {layers}",
        "Mean over calibration text, by the disagreement that is allowed",
        "labels that may differ from the full model's (at 95% confidence)",
        (
            [(value / 100, f"{value}%") for value in range(0, 11, 2)],
            [(value, str(value)) for value in range(0, layers + 1, every)],
        ),
    )
    return panel


def _even(low: float, high: float) -> list[float]:
    """Round ticks around a range of shares."""
    step = next((s for s in (0.005, 0.01, 0.02, 0.05, 0.1) if (high - low) / s <= 6), 0.2)
    first, last = int(low / step), int(high / step) + 1
    return [round(index * step, 4) for index in range(first, last + 1)]


def _apart(heights: Sequence[float], least: float = 15) -> list[float]:
    """Heights of labels, moved so that none covers another."""
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    placed = list(heights)
    for before, after in pairwise(order):
        placed[after] = max(placed[after], placed[before] + least)
    shift = max(0.0, placed[order[-1]] - _BOTTOM) if order else 0.0
    return [height - shift for height in placed]


def _text(
    x: float, y: float, content: str, colour: str, *, size: int = 12, anchor: str = "start", bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}" text-anchor="{anchor}"{weight}>'
        f"{escape(content)}</text>"
    )
