"""Figures as people read them. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

HOUR_SECONDS, DAY_SECONDS = 3600, 86400


def money(amount: float) -> str:
    """With digits that say something; who reads it knows the currency.

    >>> [money(amount) for amount in (0, 1234.5, 3.456, 0.0412, 0.0000071)]
    ['0', '1,234', '3.46', '0.041', '0.0000071']
    """
    if amount == 0 or abs(amount) >= 1000:
        return f"{amount:,.0f}"
    places = 2
    while abs(amount) * 10**places < 10 and places < 12:
        places += 1
    return f"{amount:.{places}f}"


def milliseconds(value: float) -> str:
    """
    >>> [milliseconds(value) for value in (0.8, 45.3, 1234)]
    ['0.8 ms', '45.3 ms', '1.23 s']
    """
    return f"{value / 1000:.2f} s" if value >= 1000 else f"{value:.3g} ms"


def percent(share: float) -> str:
    """Without digits where they say nothing, and never 0 or 100 where it isn't.

    >>> [percent(share) for share in (0, 0.0004, 0.004, 0.056, 0.56, 0.9999, 1)]
    ['0 %', 'under 0.1 %', '0.4 %', '5.6 %', '56 %', 'over 99 %', '100 %']
    """
    if 0 < share < 0.001:
        return "under 0.1 %"
    if 0.99 < share < 1:
        return "over 99 %"
    return f"{100 * share:.1f} %" if 0 < share < 0.1 else f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """
    >>> [duration(seconds) for seconds in (0.2, 42, 60, 900, 3600, 9000, 7 * 86400)]
    ['0.2 seconds', '42 seconds', '1 minute', '15 minutes', '1 hour', '2.5 hours', '7 days']
    """
    for size, name in ((DAY_SECONDS, "day"), (HOUR_SECONDS, "hour"), (60, "minute"), (1, "second")):
        least = 2 * size if name == "day" else size
        if seconds >= least or name == "second":
            text = f"{seconds / size:.1f}".removesuffix(".0")
            return f"{text} {name}" if text == "1" else f"{text} {name}s"
    raise AssertionError("seconds are always told")


def hours(value: float) -> str:
    """
    >>> hours(12345.6), hours(2.5), hours(0.25), hours(0.001), hours(0)
    ('12,346 h', '2.5 h', '15 min', '3.6 s', '0 h')
    """
    if value >= 100:
        return f"{value:,.0f} h"
    if value >= 1 or value == 0:
        return f"{value:,.1f}".removesuffix(".0") + " h"
    return f"{60 * value:.1f}".removesuffix(".0") + " min" if value >= 1 / 60 else f"{3600 * value:.1f} s"


def size(number_bytes: float) -> str:
    """
    >>> size(3 * 2**30), size(1500)
    ('3.0 GiB', '1.5 KiB')
    """
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number_bytes >= 1024**power:
            return f"{number_bytes / 1024**power:.1f} {name}"
    return f"{number_bytes:.0f} bytes"


def moment(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
