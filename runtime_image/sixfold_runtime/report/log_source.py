"""What the gateways' request logs tell: JSON lines, among lines of others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sixfold_runtime.length_bucket import length_bucket
from sixfold_runtime.report.model import Counted, ReportError


def read(files: Iterable[Path], since: timedelta | None, now: datetime, policy: str | None = None) -> Counted:
    """Sums over the lines of request logs; lines that are none are counted and skipped. Raises ReportError.

    Args:
        since: how far back from `now`; None takes all lines.
        policy: the logs don't name the policy: where they are of several, give the log of one.
    """
    names = [str(file) for file in files]
    counted = Counted(source=", ".join(names))
    first = last = None
    for entry, moment in _entries(names, counted):
        if since is not None and moment < now - since:
            continue
        first = moment if first is None else min(first, moment)
        last = moment if last is None else max(last, moment)
        _count(counted, entry, moment)
    if first is None or last is None:
        raise ReportError(f"no line of {counted.source} is a request of a Sixfold gateway")
    counted.start, counted.end = (moment.strftime("%Y-%m-%d %H:%M UTC") for moment in (first, last))
    counted.hours = (last - first).total_seconds() / 3600
    return counted


def _entries(names: Iterable[str], counted: Counted) -> Iterator[tuple[dict[str, Any], datetime]]:
    for name in names:
        try:
            with Path(name).open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    entry = _request(line)
                    if entry is None:
                        counted.skipped_lines += bool(line.strip())
                    else:
                        yield entry
        except OSError as error:
            raise ReportError(f"{name} can't be read: {error.strerror}") from error


def _request(line: str) -> tuple[dict[str, Any], datetime] | None:
    """A line of the request log and when the request came; None for any other line."""
    start = line.find("{")
    if start < 0:
        return None
    try:
        entry = json.loads(line[start:])
        moment = datetime.fromisoformat(str(entry["start_time"]).replace("Z", "+00:00"))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(entry, dict) or "X-Request-ID" not in entry or not entry.get("model_name"):
        return None
    return entry, (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)


def _count(counted: Counted, entry: dict[str, Any], moment: datetime) -> None:
    variant, level = str(entry["model_name"]), str(entry.get("level", ""))
    bucket = length_bucket(_whole(entry.get("input_length"))) or "unknown"
    key = moment.hour, bucket, variant
    counted.requests[key] = counted.requests.get(key, 0.0) + 1
    counted.failed += _whole(entry.get("status")) >= 500 or bool(entry.get("error_code") and entry.get("status") == 200)
    counted.tasks[variant] = "Classification" if entry.get("path") == "/v1/classify" else "Generation"
    seconds = entry.get("engine_seconds")
    if isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < seconds < 86400:
        counted.exact_seconds.append(float(seconds))
        counted.by_level[variant, level] = counted.by_level.get((variant, level), 0.0) + 1
        counted.engine_seconds[variant, level] = counted.engine_seconds.get((variant, level), 0.0) + seconds
        number, total = counted.by_length.get((bucket, variant), (0.0, 0.0))
        counted.by_length[bucket, variant] = number + 1, total + seconds


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
