"""The waste quadrants as inline SVG: how much of the traffic, against how busy the pods are that serve it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from sixfold_runtime.report.parts import Quadrant

LEFT, TOP, SIDE = 52.0, 24.0, 280.0
WIDTH, HEIGHT = 344.0, 376.0
DOT, LABEL_HEIGHT, DIGIT_WIDTH = 5.0, 14.0, 8.0
MOST_DOTS = 12
MANY, BUSY = 0.25, 0.5
"""Share of the requests, and utilisation, at which quadrants meet."""
_TICKS = (0.01, 0.05, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Box:
    """Of a label or a dot, in the plot's units."""

    left: float
    top: float
    width: float
    height: float

    def overlaps(self, other: Box) -> bool:
        return (
            self.left < other.left + other.width
            and other.left < self.left + self.width
            and self.top < other.top + other.height
            and other.top < self.top + self.height
        )


def drawn(found: Sequence[Quadrant]) -> list[Quadrant]:
    """Those that are drawn, in the order of their numbers: most requests first."""
    return [entry for entry in found if entry.utilisation is not None][:MOST_DOTS]


def quadrant_plot(found: Sequence[Quadrant]) -> str:
    """Numbered dots; what a number means says the table beside. Shares of the requests are on a square-root scale, or
    all but the largest would lie on one spot."""
    entries = drawn(found)
    dots = [(_x(entry.share), _y(entry.utilisation or 0.0)) for entry in entries]
    parts = [
        f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" aria-label="Share of the requests against the'
        ' utilisation of the pods; the table that follows has the same figures">',
        *_frame(),
    ]
    for (x, y), box in zip(dots, labels(dots), strict=True):
        middle = box.left + box.width / 2, box.top + box.height / 2
        if math.dist((x, y), middle) > 2 * LABEL_HEIGHT:
            parts.append(f'<line class="leader" x1="{x:.1f}" y1="{y:.1f}" x2="{middle[0]:.1f}" y2="{middle[1]:.1f}"/>')
    for number, ((x, y), box, entry) in enumerate(zip(dots, labels(dots), entries, strict=True), 1):
        title = escape(f"{entry.variant}, {entry.length_bucket} tokens")
        parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="{DOT}"><title>{title}</title></circle>')
        parts.append(_text(box.left + box.width / 2, box.top + 11, str(number), "middle", "number"))
    return "".join([*parts, "</svg>"])


def labels(dots: Sequence[tuple[float, float]]) -> list[Box]:
    """Where the numbers 1, 2, … go: as near to their dots as they neither cover a dot, nor one another, nor leave the
    plot. Where there is no such place, right of the dot."""
    taken = [Box(x - DOT, y - DOT, 2 * DOT, 2 * DOT) for x, y in dots]
    placed = []
    for number, (x, y) in enumerate(dots, 1):
        width = DIGIT_WIDTH * len(str(number))
        box = next(
            (box for box in _around(x, y, width) if _is_inside(box) and not any(map(box.overlaps, taken))),
            Box(x + DOT, y - LABEL_HEIGHT / 2, width, LABEL_HEIGHT),
        )
        taken.append(box)
        placed.append(box)
    return placed


def _around(x: float, y: float, width: float) -> Iterator[Box]:
    for distance in range(12, 150, 6):
        for turn in range(16):
            angle = math.tau * turn / 16
            left, top = x + distance * math.cos(angle) - width / 2, y - distance * math.sin(angle) - LABEL_HEIGHT / 2
            yield Box(left, top, width, LABEL_HEIGHT)


def _is_inside(box: Box) -> bool:
    return LEFT <= box.left <= LEFT + SIDE - box.width and TOP <= box.top <= TOP + SIDE - box.height


def _x(share: float) -> float:
    return LEFT + SIDE * math.sqrt(min(1.0, max(0.0, share)))


def _y(utilisation: float) -> float:
    return TOP + SIDE * (1 - min(1.0, max(0.0, utilisation)))


def _frame() -> Iterator[str]:
    bottom, right, split = TOP + SIDE, LEFT + SIDE, _x(MANY)
    yield f'<rect class="area" x="{LEFT}" y="{TOP}" width="{SIDE}" height="{SIDE}"/>'
    yield f'<rect class="worst" x="{split}" y="{_y(BUSY)}" width="{right - split}" height="{bottom - _y(BUSY)}"/>'
    yield f'<line class="rule" x1="{split}" y1="{TOP}" x2="{split}" y2="{bottom}"/>'
    yield f'<line class="rule" x1="{LEFT}" y1="{_y(BUSY)}" x2="{right}" y2="{_y(BUSY)}"/>'
    for share in _TICKS:
        yield _text(_x(share), bottom + 16, f"{100 * share:.0f} %", "end" if share == 1 else "middle")
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        yield _text(LEFT - 5, _y(share) + 4, f"{100 * share:.0f} %", "end")
    for x, name in ((LEFT + (split - LEFT) / 2, "few"), (split + (right - split) / 2, "many")):
        yield _text(x, TOP - 8, f"{name} requests, busy", "middle", "quadrant")
        yield _text(x, bottom + 36, f"{name} requests, idle", "middle", "quadrant")
    yield _text(LEFT + SIDE / 2, bottom + 60, "share of the requests", "middle")
    middle = TOP + SIDE / 2
    yield (
        f'<text x="11" y="{middle}" text-anchor="middle" transform="rotate(-90 11 {middle})">'
        "utilisation of the pods</text>"
    )


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
