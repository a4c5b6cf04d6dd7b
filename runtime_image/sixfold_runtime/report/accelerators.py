"""Kinds of devices, ranked by what was measured on each. Pure."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass

from sixfold_runtime.report.model import ReportError


@dataclass(frozen=True)
class Accelerator:
    """What one kind of device was measured to do: a row of the user's file, never a guess."""

    name: str
    cost_per_hour: float
    requests_per_second: float

    @property
    def cost_per_million(self) -> float:
        return self.cost_per_hour / 3600 / self.requests_per_second * 1e6


def accelerators(lines: Iterable[str]) -> tuple[Accelerator, ...]:
    """Rows of a CSV file with the columns name, costPerHour and requestsPerSecond, the cheapest for a million requests
    first. Raises ReportError."""
    found = []
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            entry = Accelerator(row["name"], float(row["costPerHour"]), float(row["requestsPerSecond"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ReportError(
                f"line {number} of the accelerators: it needs name, costPerHour and requestsPerSecond ({error})"
            ) from error
        if not (entry.cost_per_hour >= 0 and entry.requests_per_second > 0):
            raise ReportError(f"line {number} of the accelerators: a cost of at least 0 and a rate above 0 are needed")
        found.append(entry)
    return tuple(sorted(found, key=lambda entry: (entry.cost_per_million, entry.name)))
