"""What a report is made of: what was counted, whoever counted it, and the figures that follow. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

SCHEMA_VERSION = 1


class ReportError(Exception):
    """Why there is no report, for the person who asked."""


@dataclass
class Counted:
    """Sums over the period, by what tells them apart. A source leaves out what it doesn't know.

    Attributes:
        requests: (hour of the day in UTC, length bucket, variant) -> requests.
        by_level: (variant, level) -> requests whose engine time is known.
        engine_seconds: (variant, level) -> their engine time.
        by_length: (length bucket, variant) -> (requests, engine seconds).
        failed: requests that ended in an error of ours.
        flops: cause ("" is useful) -> operations.
        spread: (upper bound of engine seconds, requests up to it), ascending; the last bound may be infinite.
        exact_seconds: engine time of each request, where a log tells it.
        modes: names of counters -> values, see analysis.modes.
        pod_hours: component -> hours of pods that held a model.
        busy_hours: hours in which they computed.
        loads: variant -> seconds that loading took.
        tasks: variant -> Generation, Classification or TokenClassification.
        cost_per_hour: component -> cost of a pod; empty where nobody said.
    """

    source: str = ""
    start: str = ""
    end: str = ""
    hours: float = 0.0
    requests: dict[tuple[int, str, str], float] = field(default_factory=dict)
    by_level: dict[tuple[str, str], float] = field(default_factory=dict)
    engine_seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    by_length: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    failed: float = 0.0
    flops: dict[str, float] = field(default_factory=dict)
    spread: list[tuple[float, float]] = field(default_factory=list)
    exact_seconds: list[float] = field(default_factory=list)
    modes: dict[str, float] = field(default_factory=dict)
    pod_hours: float | None = None
    busy_hours: float | None = None
    loads: dict[str, float] = field(default_factory=dict)
    tasks: dict[str, str] = field(default_factory=dict)
    cost_per_hour: dict[str, float] = field(default_factory=dict)
    skipped_lines: int = 0


@dataclass(frozen=True)
class Cell:
    """One field of the heat map."""

    hour: int
    length_bucket: str
    variant: str
    requests: float
    share: float


@dataclass(frozen=True)
class Quadrant:
    """Requests of one length on one variant, and what they take."""

    length_bucket: str
    variant: str
    share: float
    engine_ms: float | None
    cost_share: float | None


@dataclass(frozen=True)
class LevelCost:
    """Requests of a variant at a rollback level."""

    variant: str
    level: str
    requests: float
    engine_ms: float
    engine_hours: float
    cost: float | None
    saved_against_level_0: float | None


@dataclass(frozen=True)
class ModeResult:
    """What one mode did."""

    name: str
    figures: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Figures:
    """A report, as JSON has it too.

    Money is in the currency of costPerHour, and None where that isn't known. Shares are between 0 and 1.
    """

    schema_version: int
    source: str
    start: str
    end: str
    hours: float
    requests: float
    failed_share: float | None
    engine_hours: float | None
    cost: float | None
    cost_per_request: float | None
    wasted_share: float | None
    wasted_by_cause: tuple[tuple[str, float], ...]
    cells: tuple[Cell, ...]
    quadrants: tuple[Quadrant, ...]
    levels: tuple[LevelCost, ...]
    modes: tuple[ModeResult, ...]
    spread_ms: tuple[tuple[str, float], ...]
    utilisation: float | None
    idle_hours: float | None
    idle_cost: float | None
    loads: tuple[tuple[str, float], ...]
    missing: tuple[str, ...]
    advice: tuple[str, ...]
