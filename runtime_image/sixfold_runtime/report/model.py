"""What a report is made of: what was counted, whoever counted it, and the figures that follow. Plain data."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from sixfold_runtime.report.parts import (
    Capacity,
    Cell,
    ColumnHours,
    CostSpread,
    ExitDepth,
    LevelCost,
    Load,
    Memory,
    ModeResult,
    Quadrant,
)
from sixfold_runtime.report.slots import Slots

SCHEMA_VERSION = 1
ENGINE, CLASSIFIER = "engine", "classifier"
UNKNOWN = "unknown"
"""Length of a prompt that wasn't told."""


class ReportError(Exception):
    """Why there is no report, for the person who asked."""


class Work(NamedTuple):
    """What tells requests apart that cost differently. A log doesn't say the policy: it is empty then."""

    policy: str
    """namespace/name."""
    variant: str
    level: str
    length_bucket: str


class Place(NamedTuple):
    """Pods of one Deployment."""

    policy: str
    component: str
    """engine or classifier."""


@dataclass
class Spent:
    """Of requests whose engine time is known; the parts of a request that another model computed count there."""

    requests: float = 0.0
    seconds: float = 0.0


@dataclass
class Held:
    """Time of pods that hold models."""

    up_seconds: float = 0.0
    busy_seconds: float = 0.0
    """In which they computed."""


@dataclass
class Loading:
    """Of one model's weights."""

    starts: int = 0
    """Pods that loaded them within the period."""
    starts_seconds: float = 0.0
    """Of these together."""
    longest_seconds: float = 0.0

    def add(self, seconds: float, has_started: bool) -> None:
        """A pod loaded them; `has_started`: within the period."""
        if has_started:
            self.starts_seconds += seconds
            self.starts += 1
        self.longest_seconds = max(self.longest_seconds, seconds)


@dataclass
class Room:
    """For keys and values of running requests, summed over pods; means over the period."""

    reserved_bytes: float = 0.0
    used_bytes: float = 0.0
    """The part that holds tokens."""


@dataclass
class Counted:
    """Sums over the period, by what tells them apart. A source leaves out what it doesn't know.

    Attributes:
        requests: (column of `slots`, length bucket, variant) -> requests.
        spent: engine time of requests.
        spread: (policy, variant) -> upper bound of engine seconds -> requests between it and the next lower one; the
            last bound may be infinite.
        spread_is_exact: the bounds are so close that quantiles are right to 1 %.
        failed: requests that ended in an error of ours.
        flops: (policy, variant, cause) -> operations; useful ones have the cause "".
        exits: (variant, depth) -> texts that left a classifier behind that layer.
        tallies: (counter, value of its label) -> growth; see modes.py for which.
        pods: (place, column of `slots`) -> time of pods; None where it isn't known.
        loads: weights -> loading.
        rooms: weights -> room.
        tasks: variant -> Generation, Classification or TokenClassification.
        prices: what a pod costs an hour, as policies say.
        price_elsewhere: what one costs where policies don't say.
        split_policies: those known to have classifier pods of their own.
        notes: what a reader must know of the data.
    """

    source: str = ""
    start: str = ""
    end: str = ""
    hours: float = 0.0
    slots: Slots = field(default_factory=Slots)
    requests: dict[tuple[int, str, str], float] = field(default_factory=lambda: defaultdict(float))
    spent: dict[Work, Spent] = field(default_factory=lambda: defaultdict(Spent))
    spread: dict[tuple[str, str], dict[float, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )
    spread_is_exact: bool = False
    failed: float = 0.0
    flops: dict[tuple[str, str, str], float] = field(default_factory=lambda: defaultdict(float))
    exits: dict[tuple[str, int], float] = field(default_factory=lambda: defaultdict(float))
    tallies: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    pods: dict[tuple[Place, int], Held] | None = None
    loads: dict[str, Loading] = field(default_factory=lambda: defaultdict(Loading))
    rooms: dict[str, Room] = field(default_factory=lambda: defaultdict(Room))
    tasks: dict[str, str] = field(default_factory=dict)
    prices: dict[Place, float] = field(default_factory=dict)
    price_elsewhere: float | None = None
    split_policies: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    skipped_lines: int = 0


@dataclass(frozen=True)
class Figures:
    """A report, as JSON has it too.

    Money is in the currency of costPerHour, and None where that isn't known. Shares are between 0 and 1.

    Attributes:
        bill: pods that held models, by the hour; a pod that waits costs as much as one that computes.
        cost: the engine time of requests.
        saved, saved_share: against level 0, requests of the same length compared; over the requests that could be.
        wasted_cost_by_cause: engine time of pods times the share of operations.
        columns: when each column of time begins, HH:MM in UTC.
        is_daily: columns are hours of the day.
    """

    schema_version: int
    source: str
    start: str
    end: str
    hours: float
    requests: float
    failed_share: float
    engine_hours: float | None
    bill: float | None
    bill_per_request: float | None
    cost: float | None
    cost_per_request: float | None
    saved: float | None
    saved_share: float | None
    wasted_share: float | None
    wasted_by_cause: tuple[tuple[str, float], ...]
    wasted_cost_by_cause: tuple[tuple[str, float], ...]
    columns: tuple[str, ...]
    column_seconds: int
    is_daily: bool
    cells: tuple[Cell, ...]
    quadrants: tuple[Quadrant, ...]
    levels: tuple[LevelCost, ...]
    modes: tuple[ModeResult, ...]
    exits: tuple[ExitDepth, ...]
    mean_exit_depth: tuple[tuple[str, float], ...]
    tokens_per_verification: float | None
    memory: tuple[Memory, ...]
    spread: tuple[CostSpread, ...]
    utilisation: float | None
    idle_hours: float | None
    idle_cost: float | None
    capacity: tuple[Capacity, ...]
    capacity_by_column: tuple[ColumnHours, ...]
    loads: tuple[Load, ...]
    missing: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    summary: tuple[str, ...] = ()
