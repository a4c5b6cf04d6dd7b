"""What tickets and tuning look at: wasted capacity, and what a recommendation needs beyond the spec. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from sixfold_api.control_status import SignalStatus, TunedValue, Verdict
from sixfold_api.modes import MAX_LEVEL, Mode
from sixfold_api.ticket import Cause, HeatMapCell
from sixfold_operator.control.model import Observed, Reading, Signal, SignalKind, Snapshot, Timing
from sixfold_operator.control.promql import query_of
from sixfold_operator.control.waste_signals import HEAT_MAP

WASTED_BY_CAUSE = "WastedByCause"
FLOP_CAUSES = frozenset(
    {Cause.PADDING, Cause.REJECTED_DRAFT, Cause.RECOMPUTED_PREFIX, Cause.UNNEEDED_LAYERS, Cause.CANCELLED}
)


@dataclass(frozen=True)
class Waste:
    """One waste signal, judged, and what it is about.

    Attributes:
        variant: the ModelVariant, or the task of a slice; None where the signal is about the whole policy.
        failures: breaches in a row, counted up to analysis.failureLimit.
        query: PromQL with the window filled in.
    """

    signal: str
    cause: Cause
    verdict: Verdict
    variant: str | None = None
    failures: int = 0
    value: float | None = None
    threshold: float | None = None
    query: str = ""
    window_seconds: float = 600.0
    cell: HeatMapCell | None = None


@dataclass(frozen=True)
class Facts:
    """A policy, as far as waste cares and its spec doesn't say.

    Attributes:
        exit_variants: classifiers among its variants whose exit heads let texts exit.
        target: the level that was decided on.
        suspended: modes that the operator turned off.
        tuned: values in place of the spec's.
        rejected: (path, value) that were tried and taken back.
        acceptance: share of drafted tokens that the target accepted; None if it isn't known.
        wasted: (cause, variant) -> share of the FLOPs; variant None is the whole policy's.
        busy_pods: engine seconds a second over all pods; None if it isn't known.
        pods: engine pods; None if it isn't known.
        cost_window_seconds: of what a request costs: so long it shows what was before a change.
    """

    namespace: str
    policy: str
    timing: Timing = field(default_factory=Timing)
    exit_variants: frozenset[str] = frozenset()
    target: int = MAX_LEVEL
    suspended: frozenset[Mode] = frozenset()
    tuned: tuple[TunedValue, ...] = ()
    rejected: frozenset[tuple[str, str]] = frozenset()
    acceptance: float | None = None
    wasted: Mapping[tuple[Cause, str | None], float] = field(default_factory=lambda: MappingProxyType({}))
    busy_pods: float | None = None
    pods: int | None = None
    cost_window_seconds: float = 0.0


def fingerprint(namespace: str, policy: str, cause: Cause, variant: str | None) -> str:
    """Of a ticket: one a policy, cause and variant, whichever signal found it."""
    text = "\0".join((namespace, policy, cause.value, variant or ""))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def seconds_text(seconds: float) -> str:
    """A Duration."""
    return f"{max(1, round(seconds))}s"


def wastes(
    signals: Iterable[Signal],
    observed: Sequence[Observed],
    remembered: Iterable[SignalStatus],
    snapshot: Snapshot | None,
    hour: int | None = None,
) -> tuple[Waste, ...]:
    """The waste signals of a policy with cause, variant and failures.

    Args:
        remembered: state.signals, of the same names, as the reducer left them this time.
        hour: of the day, UTC, for the cell of the heat map.
    """
    known = {signal.name: signal for signal in signals if signal.kind is SignalKind.WASTE}
    failures = {status.name: status.failures for status in remembered}
    found = []
    for entry in observed:
        signal = known.get(entry.name)
        if signal is None:
            continue
        cause, variant = _subject(signal, snapshot)
        if cause is not None:
            found.append(
                Waste(
                    signal=signal.name,
                    cause=cause,
                    verdict=entry.verdict,
                    variant=variant,
                    failures=failures.get(entry.name, 0),
                    value=entry.value,
                    threshold=entry.threshold if entry.threshold is not None else signal.threshold,
                    query=query_of(signal),
                    window_seconds=signal.window_seconds,
                    cell=_cell(snapshot, variant, hour),
                )
            )
    return tuple(found)


def _cell(snapshot: Snapshot | None, variant: str | None, hour: int | None) -> HeatMapCell | None:
    """Where most of a variant's requests are; None where that isn't known."""
    readings = () if snapshot is None or hour is None else snapshot.readings.get(HEAT_MAP, ())
    own = [reading for reading in readings if reading.variant and variant in (None, reading.variant)]
    busiest = max(own, key=lambda reading: reading.value, default=None)
    if busiest is None or hour is None or not busiest.variant or not busiest.length_bucket or not busiest.value > 0:
        return None
    return HeatMapCell(hour=hour, length_bucket=busiest.length_bucket, variant=busiest.variant)


def _subject(signal: Signal, snapshot: Snapshot | None) -> tuple[Cause | None, str | None]:
    """Cause and variant: the signal's own, else those of the largest part of the wasted FLOPs."""
    readings = snapshot.readings if snapshot is not None else {}
    if signal.cause is None:
        largest = max(_parts(readings), key=lambda reading: reading.value, default=None)
        return (None, None) if largest is None else (largest.cause, largest.variant)
    own = [reading for reading in readings.get(signal.name, ()) if reading.variant is not None]
    parts = own or [part for part in _parts(readings) if part.cause is signal.cause]
    worst = max(parts, key=lambda reading: reading.value * (1 if signal.is_high_bad else -1), default=None)
    return signal.cause, None if worst is None else worst.variant


def _parts(readings: Mapping[str, Sequence[Reading]]) -> list[Reading]:
    return [part for part in readings.get(WASTED_BY_CAUSE, ()) if part.cause is not None]


def wasted_shares(snapshot: Snapshot | None) -> dict[tuple[Cause, str | None], float]:
    """Facts.wasted of a snapshot."""
    readings = snapshot.readings if snapshot is not None else {}
    return {(part.cause, part.variant): part.value for part in _parts(readings) if part.cause is not None}


def rejected_values(rejections: Collection[tuple[str | None, str | None]]) -> frozenset[tuple[str, str]]:
    """Facts.rejected from path and value of each Rejection."""
    return frozenset((path, value) for path, value in rejections if path is not None and value is not None)


def is_seen(waste: Waste, failure_limit: int) -> bool:
    """Whether a breach has lasted long enough to act on it."""
    return waste.verdict is Verdict.BREACH and waste.failures >= failure_limit
