"""Columns of time: stretches of a short period, hours of the day of a long one. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime

DAY_SECONDS, HOUR_SECONDS = 86400, 3600
WIDTHS_SECONDS = (60, 120, 300, 600, 900, 1800, HOUR_SECONDS)
MOST = 25
"""Columns: as many as can be told apart on a phone."""


@dataclass(frozen=True)
class Slots:
    """Attributes:
    start_seconds: Unix time at which the first column begins.
    width_seconds: of a column.
    count: of columns.
    is_daily: they are hours of the day in UTC, and days are laid on top of each other.
    """

    start_seconds: int = 0
    width_seconds: int = HOUR_SECONDS
    count: int = 24
    is_daily: bool = True

    @classmethod
    def of(cls, start_seconds: float, end_seconds: float) -> Slots:
        """For a period: the narrowest ones that do.

        >>> Slots.of(0, 3600), Slots.of(0, 7 * 86400).is_daily
        (Slots(start_seconds=0, width_seconds=300, count=12, is_daily=False), True)
        """
        if end_seconds - start_seconds > DAY_SECONDS:
            return cls()
        for width in WIDTHS_SECONDS:
            first = int(start_seconds // width) * width
            count = max(1, math.ceil((end_seconds - first) / width))
            if count <= MOST:
                break
        return cls(first, width, count, is_daily=False)

    def column(self, unix_seconds: float) -> int:
        """Where a moment belongs; what is outside goes to the nearest column."""
        number = int((unix_seconds - self.start_seconds) // self.width_seconds)
        return number % 24 if self.is_daily else min(max(number, 0), self.count - 1)

    def label(self, column: int) -> str:
        """When a column begins, such as 09:05, in UTC."""
        return datetime.fromtimestamp(self.start_seconds + column * self.width_seconds, UTC).strftime("%H:%M")
