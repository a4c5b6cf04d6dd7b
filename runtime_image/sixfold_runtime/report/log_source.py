"""What the gateways' request logs tell: JSON lines, among lines of others. Memory doesn't grow with the log."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any

from sixfold_runtime.length_bucket import length_bucket
from sixfold_runtime.report.model import UNKNOWN, Counted, ReportError, Work
from sixfold_runtime.report.served import ANSWERS, LABEL_ANSWERS, LABEL_TOKENS, SLICE_REQUESTS
from sixfold_runtime.report.slots import DAY_SECONDS, Slots
from sixfold_runtime.report.spread import fine_bound
from sixfold_runtime.report.words import moment as in_words

STDIN = "-"
LONGEST_LINE = 1_000_000
"""Characters; a line of the gateway's has under a thousand."""
_SERVER_ERROR = 500


def read(files: Iterable[Path], since: timedelta | None, now: datetime) -> Counted:
    """Sums over the lines of request logs; lines that are none are counted and skipped. Raises ReportError.

    The logs don't name the policy: where they are of several, give the log of one.

    Args:
        files: `-` is standard input.
        since: how far back from `now`; None takes all lines.
    """
    names = [str(file) for file in files]
    counted = Counted(source=", ".join("standard input" if name == STDIN else name for name in names))
    counted.spread_is_exact = True
    reading = _Reading(counted)
    after = None if since is None else (now - since).timestamp()
    older = 0
    for entry, begun in _entries(names, counted):
        if after is not None and begun < after:
            older += 1
        else:
            reading.take(entry, begun)
    if not reading.has_any:
        raise ReportError(_nothing(counted, older, since))
    reading.finish()
    return counted


def _nothing(counted: Counted, older: int, since: timedelta | None) -> str:
    if older:
        return f"all {older:,} requests of {counted.source} are from before the last {since}; look further back"
    lines = f"{counted.skipped_lines:,} lines, none of which is a request" if counted.skipped_lines else "no lines"
    return (
        f"{counted.source} has {lines} of a Sixfold gateway; give the output of one, such as `kubectl logs -l"
        " sixfold.dev/component=gateway --tail=-1`"
    )


class _Reading:
    """Sums of one reading: by minute while they span at most a day, then by the hour of the day."""

    def __init__(self, counted: Counted) -> None:
        self._counted = counted
        self._first, self._last = float("inf"), float("-inf")
        self._minutes: Counter[tuple[int, str, str]] = Counter()

    @property
    def has_any(self) -> bool:
        return self._last >= self._first

    def take(self, entry: dict[str, Any], begun: float) -> None:
        """One request, that began at this Unix time."""
        seconds = _seconds(entry.get("engine_seconds"))
        ended = max(begun, _moment(entry.get("end_time")) or begun, begun + seconds)
        self._first, self._last = min(self._first, begun), max(self._last, ended)
        counted = self._counted
        variant, bucket = str(entry["model_name"]), length_bucket(_whole(entry.get("input_length"))) or UNKNOWN
        if self._last - self._first > DAY_SECONDS:
            self._fold(Slots())
            counted.requests[Slots().column(begun), bucket, variant] += 1
        else:
            self._minutes[int(begun // 60), bucket, variant] += 1
        status = _whole(entry.get("status"))
        counted.failed += status >= _SERVER_ERROR or (status == 200 and bool(entry.get("error_code")))
        counted.tasks[variant] = "Classification" if entry.get("path") == "/v1/classify" else "Generation"
        if task := entry.get("task"):
            counted.tallies[SLICE_REQUESTS, str(task)] += 1
        if counted.tasks[variant] == "Generation" and (tokens := _whole(entry.get("output_length"))):
            counted.tallies[ANSWERS, variant] += 1
            counted.tallies[LABEL_ANSWERS, variant] += tokens <= LABEL_TOKENS
        if seconds:
            spent = counted.spent[Work("", variant, str(entry.get("level", "")), bucket)]
            spent.requests += 1
            spent.seconds += seconds
            counted.spread["", variant][fine_bound(seconds)] += 1

    def finish(self) -> None:
        """All lines were taken."""
        counted = self._counted
        counted.slots = Slots.of(self._first, self._last)
        self._fold(counted.slots)
        counted.start, counted.end = in_words(self._first), in_words(self._last)
        counted.hours = max(1.0, self._last - self._first) / 3600

    def _fold(self, slots: Slots) -> None:
        for (minute, bucket, variant), number in self._minutes.items():
            self._counted.requests[slots.column(60 * minute + 30), bucket, variant] += number
        self._minutes.clear()


def _entries(names: Iterable[str], counted: Counted) -> Iterator[tuple[dict[str, Any], float]]:
    """Requests, and the Unix times at which they began."""
    for name in names:
        try:
            with _opened(name) as lines:
                while line := lines.readline(LONGEST_LINE):
                    entry = request(line)
                    if entry is None:
                        counted.skipped_lines += bool(line.strip())
                    else:
                        yield entry
        except OSError as error:
            raise ReportError(f"{name} can't be read: {error.strerror}") from error


@contextmanager
def _opened(name: str) -> Iterator[IO[str]]:
    if name == STDIN:
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
        yield sys.stdin
    else:
        with Path(name).open(encoding="utf-8", errors="replace") as lines:
            yield lines


def request(line: str) -> tuple[dict[str, Any], float] | None:
    """A line of the request log and the Unix time at which the request came; None for any other line."""
    start = line.find("{")  # behind what kubectl logs --prefix or --timestamps writes
    if start < 0:
        return None
    try:
        entry = json.loads(line[start:])
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or "X-Request-ID" not in entry or not entry.get("model_name"):
        return None
    begun = _moment(entry.get("start_time"))
    return None if begun is None else (entry, begun)


def _moment(text: Any) -> float | None:
    """RFC 3339 -> Unix time; None where it is none."""
    try:
        moment = datetime.fromisoformat(str(text).replace("Z", "+00:00"))
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def _seconds(value: Any) -> float:
    """Engine time, 0 where it isn't told."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < DAY_SECONDS else 0.0


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
