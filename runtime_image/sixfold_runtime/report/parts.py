"""The rows that the figures of a report consist of. Plain data; money is None where a price isn't known."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """One field of the heat map."""

    column: int
    length_bucket: str
    variant: str
    requests: float
    share: float


@dataclass(frozen=True)
class Quadrant:
    """Requests of one length on one variant, what they take, and how busy the pods are that serve them."""

    length_bucket: str
    variant: str
    share: float
    engine_ms: float | None
    cost_share: float | None
    utilisation: float | None


@dataclass(frozen=True)
class LevelCost:
    """Requests of a variant at a rollback level.

    Attributes:
        saved_share: of the engine time that requests of the same lengths take at level 0; None where too few ran there.
        saved: in money, over the requests that could be compared.
        compared_share: of the requests, those for whose length there is a comparison.
    """

    policy: str
    variant: str
    level: str
    requests: float
    engine_ms: float
    engine_hours: float
    cost: float | None
    saved_share: float | None
    saved: float | None
    compared_share: float


@dataclass(frozen=True)
class Capacity:
    """Pods of one kind over the period."""

    policy: str
    component: str
    price: float | None
    pod_hours: float
    busy_hours: float
    idle_hours: float
    cost: float | None
    idle_cost: float | None


@dataclass(frozen=True)
class ColumnHours:
    """Pods over one column of time."""

    column: int
    pod_hours: float
    busy_hours: float
    idle_hours: float


@dataclass(frozen=True)
class Bin:
    """Requests that cost more than `low` and at most `high`; both in engine milliseconds and, where known, money."""

    low_ms: float
    high_ms: float | None
    low_cost: float | None
    high_cost: float | None
    requests: float


@dataclass(frozen=True)
class CostSpread:
    """Single requests on pods of one price."""

    variants: tuple[str, ...]
    price: float | None
    bins: tuple[Bin, ...]
    quantiles_ms: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class ExitDepth:
    """Texts that left a classifier behind a layer."""

    variant: str
    depth: int
    texts: float
    share: float


@dataclass(frozen=True)
class Load:
    """Of a model's weights: pods that started in the period, what loading took them, and the longest that is known."""

    variant: str
    starts: int
    starts_seconds: float
    longest_seconds: float


@dataclass(frozen=True)
class Memory:
    """Room for keys and values, a mean over the period."""

    variant: str
    reserved_bytes: float
    used_bytes: float
    unused_share: float


@dataclass(frozen=True)
class ModeResult:
    """What one mode did."""

    name: str
    figures: tuple[tuple[str, str], ...]
