"""Replays requests against a way of making batches, with one engine that computes a batch at a time.

The clock is virtual: it goes on by what a batch took the executor, by what deciding took where the engine waited for
it, and from event to event. So waiting costs no time here, and other processes do not count as latency.
"""

from __future__ import annotations

import heapq
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from batch_executors import Seconds
from batch_trace import Request

Group = tuple[Request, ...]


class Policy(Protocol):
    """Makes batches."""

    def arrive(self, request: Request) -> None: ...

    def decide(self, now_seconds: float, outstanding: int) -> tuple[list[Group], float | None]:
        """What to send now, and when to be asked again if nothing happens before.

        Args:
            outstanding: batches that the engine computes or has behind it.
        """

    def computed(self, group: Group, now_seconds: float) -> None:
        """The engine is done with a batch."""


@dataclass
class Outcome:
    """What came of a trace."""

    latencies: list[float] = field(default_factory=list)
    """Seconds from arrival to the end of the request's batch."""
    lengths: list[int] = field(default_factory=list)
    """Of the requests, in the same order."""
    batches: int = 0
    actual_tokens: int = 0
    padded_tokens: int = 0
    busy_seconds: float = 0.0
    deciding_seconds: float = 0.0
    end_seconds: float = 0.0

    def percentile(self, share: float) -> float:
        return percentile(self.latencies, share)

    @property
    def padding_waste(self) -> float:
        return 1 - self.actual_tokens / self.padded_tokens


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def replay(trace: Sequence[Request], policy: Policy, seconds: Seconds, outcome: Outcome) -> Iterator[float]:
    """Fills `outcome`; yields the time before each batch is computed."""
    sent: deque[Group] = deque()
    coming = deque(trace)
    now, ends, wake = 0.0, None, None
    running: Group = ()
    while coming or running or len(outcome.latencies) < len(trace):
        events = (coming[0].arrived_seconds if coming else None, ends, wake)
        now = min(moment for moment in events if moment is not None)
        if running and ends is not None and ends <= now:
            _count(outcome, running, now)
            policy.computed(running, now)
            running, ends = (), None
        while coming and coming[0].arrived_seconds <= now:
            policy.arrive(coming.popleft())
        # A batch behind the one that ended begins at once; one that is decided now, after deciding.
        next_group, waited = (sent.popleft(), 0.0) if sent and not running else ((), 0.0)
        began = time.thread_time()
        groups, wake = policy.decide(now, len(sent) + bool(running or next_group))
        deciding = time.thread_time() - began
        outcome.deciding_seconds += deciding
        sent.extend(groups)
        if not running and not next_group and sent:
            next_group, waited = sent.popleft(), deciding
        if next_group:
            yield now
            taken = seconds([request.tokens for request in next_group])
            outcome.busy_seconds += taken
            running, ends = next_group, now + waited + taken
    outcome.end_seconds = now


def _count(outcome: Outcome, group: Group, now: float) -> None:
    outcome.latencies += [now - request.arrived_seconds for request in group]
    outcome.lengths += [request.tokens for request in group]
    outcome.batches += 1
    outcome.actual_tokens += sum(request.tokens for request in group)
    outcome.padded_tokens += len(group) * max(request.tokens for request in group)


def replay_together(
    trace: Sequence[Request], policies: Mapping[str, Callable[[], Policy]], seconds: Seconds
) -> dict[str, Outcome]:
    """The same trace for each, in turns by their clocks: a moment in which the machine is slow meets all of them."""
    outcomes = {name: Outcome() for name in policies}
    runs = {name: replay(trace, make(), seconds, outcomes[name]) for name, make in policies.items()}
    clocks = [(0.0, name) for name in policies]
    while clocks:
        _, name = heapq.heappop(clocks)
        if (now := next(runs[name], None)) is not None:
            heapq.heappush(clocks, (now, name))
    return outcomes


def pooled(outcomes: Sequence[Outcome]) -> Outcome:
    """One over all of them."""
    total = Outcome()
    for name in vars(total):
        parts = [getattr(outcome, name) for outcome in outcomes]
        setattr(total, name, [item for part in parts for item in part] if isinstance(parts[0], list) else sum(parts))
    return total


def saturation(batch: int, lengths: Sequence[int], seconds: Seconds) -> float:
    """Requests a second where there are always enough for a full batch, as they come."""
    groups = [lengths[start : start + batch] for start in range(0, len(lengths) - batch + 1, batch)]
    return batch / statistics.mean(seconds(group) for group in groups)
