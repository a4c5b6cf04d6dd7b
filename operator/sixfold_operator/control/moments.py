"""Moments of the status as times. Clocks jump and statuses get mangled: a moment in the future, or one that can't be
read, counts as now."""

from __future__ import annotations

from datetime import datetime

from sixfold_api.conditions import timestamp


def seconds_since(moment: str | None, now: datetime) -> float:
    """Seconds from a moment to now, at least 0; infinite where there is none."""
    if moment is None:
        return float("inf")
    then = _read(moment)
    return 0.0 if then is None else max((now - then).total_seconds(), 0.0)


def no_later(moment: str, now: datetime) -> str:
    """The moment itself, or now if it lies in the future or can't be read."""
    then = _read(moment)
    return timestamp(now) if then is None or then > now else moment


def later(first: str | None, second: str | None, now: datetime) -> str | None:
    """The later one of two moments; None where there is none."""
    return first if seconds_since(first, now) <= seconds_since(second, now) else second


def _read(moment: str) -> datetime | None:
    try:
        then = datetime.fromisoformat(moment)
    except ValueError:
        return None
    return then if then.tzinfo is not None else None
