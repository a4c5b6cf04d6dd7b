"""A signal's readings -> Ok, Breach or Unknown. Pure.

What isn't known for sure is Unknown, with the reason in words: no series, several where one was meant, too few
samples, no finite number, a sample that isn't from now, a window that reaches back before a change. Unknown moves
nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from sixfold_api.control_status import SettlingStatus, SignalStatus, Verdict
from sixfold_api.modes import LEVEL_FROM, Mode
from sixfold_api.runtime_config import STABLE
from sixfold_operator.control.answers import FOUND
from sixfold_operator.control.canary import wilson
from sixfold_operator.control.model import Observed, Reading, Signal, SignalKind, Snapshot
from sixfold_operator.control.settling import why_unsettled

SETTLED = SettlingStatus()
LONGEST_AGE_SECONDS = 120.0
"""An answer that differs that much, and by two windows, from our own clock is not from now: a cache in between, or
clocks that went apart. What Prometheus itself knows to be old is told by the snapshot."""


def observe(
    signals: Sequence[Signal],
    snapshot: Snapshot | None,
    thresholds: Mapping[str, float],
    remembered: Sequence[SignalStatus],
    target_level: int,
    now: datetime,
    off: Collection[Mode] = (),
    settling: SettlingStatus = SETTLED,
) -> tuple[Observed, ...]:
    """Every health and waste signal, judged for one policy.

    Args:
        snapshot: None before Prometheus was asked for the first time.
        thresholds: this policy's own, by signal; others are the signal's.
        remembered: status.signals: a breach goes on until it is clearly over, even through an Unknown.
        target_level: of the policy; older levels' series linger in a window.
        off: modes that are suspended or not asked for: a signal about one of them is Unknown.
        settling: status.control.settling: a health signal whose series may still show what was before is Unknown.
    """
    before = {status.name: _before(status) for status in remembered}
    observed = []
    for signal in signals:
        if signal.kind is SignalKind.FIGURE:
            continue
        threshold = thresholds.get(signal.name, signal.threshold)
        problem = _problem(signal, snapshot, target_level, off)
        if problem or snapshot is None:
            observed.append(_observed(signal, Verdict.UNKNOWN, None, threshold, problem))
        else:
            readings = snapshot.readings.get(signal.name, ())
            last = before.get(signal.name, Verdict.UNKNOWN)
            unsettled = partial(why_unsettled, signal, settling, min(now, snapshot.at))
            observed.append(judge(signal, threshold, readings, last, target_level, now, unsettled))
    return tuple(observed)


def judge(
    signal: Signal,
    threshold: float,
    readings: Sequence[Reading],
    before: Verdict,
    target_level: int,
    now: datetime,
    unsettled: Callable[[Reading], str] = lambda _: "",
) -> Observed:
    """One signal's readings of one policy against a threshold.

    A breach begins beyond the threshold and ends within threshold x clear (x (2 - clear) where low is bad). Of a
    proportion the lower one-sided 95 % bound is compared (Wilson 1927). Where a signal tells variants apart, its worst
    one counts.

    Args:
        before: the verdict until now.
        unsettled: why a reading may still show what was before; "" if it doesn't.
    """
    relevant = [reading for reading in readings if _concerns(signal, reading, target_level)]
    if not relevant:
        why = f"no series at level {target_level}" if readings else "no series"
        return _observed(signal, Verdict.UNKNOWN, None, threshold, why)
    counts = Counter((reading.level, reading.arm, reading.variant, reading.cause) for reading in relevant)
    if max(counts.values()) > 1:
        return _observed(signal, Verdict.UNKNOWN, None, threshold, "several series where one was meant")
    doubts = {index: unsettled(each) or _doubt(signal, each, now) for index, each in enumerate(relevant)}
    sure = [reading for index, reading in enumerate(relevant) if not doubts[index]]
    if not sure:
        return _observed(signal, Verdict.UNKNOWN, None, threshold, doubts[0])
    limit = _Limit(signal, threshold, is_breached=before is Verdict.BREACH)
    worst = max(sure, key=limit.excess)
    verdict = Verdict.BREACH if limit.excess(worst) > 0 else Verdict.OK
    return _observed(signal, verdict, worst.value, threshold, limit.sentence(worst, verdict))


@dataclass(frozen=True)
class _Limit:
    """Where a breach begins, or ends once it has begun."""

    signal: Signal
    threshold: float
    is_breached: bool

    @property
    def bound(self) -> float:
        if not self.is_breached:
            return self.threshold
        clear = self.signal.clear
        return self.threshold * (clear if self.signal.is_high_bad else 2 - clear)

    def excess(self, reading: Reading) -> float:
        """How far a reading is beyond the bound; at most 0 within it."""
        value = _compared(self.signal, reading)
        return value - self.bound if self.signal.is_high_bad else self.bound - value

    def sentence(self, reading: Reading, verdict: Verdict) -> str:
        signal, side = self.signal, "over" if self.signal.is_high_bad else "under"
        about = f" of {reading.variant}" if reading.variant else ""
        value = f"{signal.description or signal.name}{about}: {_text(reading.value, signal)}"
        if signal.is_proportion:
            value += f" (at least {_text(_compared(signal, reading), signal)} at 95 % confidence)"
        found = f"{value}, {reading.samples:.0f} samples in {signal.window_seconds:g} s"
        if verdict is Verdict.OK:
            return found
        if self.is_breached and self.excess(reading) <= abs(self.threshold - self.bound):
            return f"{found}; not yet clear of the threshold {_text(self.threshold, signal)}"
        return f"{found}; {side} {_text(self.threshold, signal)}"


def _problem(signal: Signal, snapshot: Snapshot | None, target_level: int, off: Collection[Mode]) -> str:
    """Why nothing can be said, before any reading is looked at."""
    if snapshot is None:
        return "Prometheus hasn't been asked yet"
    if snapshot.reason != FOUND:
        return snapshot.message or snapshot.reason
    if signal.name in snapshot.problems:
        return snapshot.problems[signal.name]
    mode = signal.blames
    if mode is not None and LEVEL_FROM[mode] > target_level:
        return f"{mode} is off below level {LEVEL_FROM[mode]}"
    return f"{mode} is off" if mode in off else ""


def _before(status: SignalStatus) -> Verdict:
    """Failures that were counted and not taken back mean that the breach hadn't ended when nothing was known."""
    return Verdict.BREACH if status.verdict is Verdict.UNKNOWN and status.failures else status.verdict


def _concerns(signal: Signal, reading: Reading, target_level: int) -> bool:
    """Health is that of what most requests get: the target level, without the canary."""
    if signal.kind is not SignalKind.HEALTH:
        return True
    return reading.level in (None, target_level) and reading.arm in (None, "", STABLE)


def _doubt(signal: Signal, reading: Reading, now: datetime) -> str:
    """Why a reading says nothing."""
    age_seconds = now.timestamp() - reading.unix_seconds
    if abs(age_seconds) > max(LONGEST_AGE_SECONDS, 2 * signal.window_seconds):
        return f"its sample and our clock are {abs(age_seconds):.0f} s apart"
    if not reading.samples >= signal.min_samples:
        return f"too few samples: {reading.samples:.0f} of {signal.min_samples:g}"
    return "" if math.isfinite(reading.value) else f"its value is {reading.value}"


def _compared(signal: Signal, reading: Reading) -> float:
    """What is held against the bound."""
    if not signal.is_proportion:
        return reading.value
    return wilson(reading.value * reading.samples, reading.samples)[0]


def _text(value: float, signal: Signal) -> str:
    return f"{value:.1%}" if signal.unit == "share" else f"{value:.3g}{' ' if signal.unit else ''}{signal.unit}"


def _observed(signal: Signal, verdict: Verdict, value: float | None, threshold: float, why: str) -> Observed:
    return Observed(
        name=signal.name,
        verdict=verdict,
        kind=signal.kind,
        action=signal.action,
        blames=signal.blames,
        is_primary=signal.is_primary,
        value=value,
        threshold=threshold,
        why=why,
    )
