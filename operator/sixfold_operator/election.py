"""Who leads, by a Lease that is renewed: decisions as client-go's leader election makes them. Pure.

No two clocks are compared: whether a Lease has run out is judged by how long ago, on one's own monotonic clock, it was
last seen to change. A holder stops `DEADLINE` of the duration after it *sent* its last successful renewal; another one
waits for the whole duration after it *saw* that renewal, which is later. So clocks may run at rates that differ by
up to 1 / DEADLINE (1.43) before two could act.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

RENEW, LOOK, DEADLINE = 0.3, 0.2, 0.7
"""When a holder renews, how often another one looks, and when a holder gives up; shares of the duration."""


class Decision(Enum):
    ACQUIRE = "Acquire"
    RENEW = "Renew"
    WAIT = "Wait"
    STEP_DOWN = "StepDown"


@dataclass(frozen=True)
class Record:
    """A Lease as it was read.

    Attributes:
        holder: who holds it; empty after a release, and before anyone ever took it.
        duration_seconds: how long after its last change others must wait.
        transitions: how often the holder changed.
        acquired: when the holder took or released it, as the Lease writes it; empty before anyone ever took it.
        version: the object's resource version: no two versions of a Lease have the same.
    """

    holder: str
    duration_seconds: float
    transitions: int
    acquired: str
    version: str

    @property
    def is_released(self) -> bool:
        return not self.holder and bool(self.acquired)


@dataclass(frozen=True)
class View:
    """What one process knows. Times are seconds of its own monotonic clock.

    Attributes:
        since: when `record` was last seen to change, or when the process began to look.
        record: the Lease as it was seen last; None while there is none.
        held_until: until when this process may act; None while it stands by.
    """

    since: float
    record: Record | None = None
    held_until: float | None = None

    def seen(self, record: Record | None, now: float) -> View:
        """After a read that ended now."""
        return self if record == self.record else replace(self, record=record, since=now)

    def wrote(self, record: Record, sent: float, duration_seconds: float) -> View:
        """After a write that made this process the holder, and that it began to send at `sent`."""
        return View(since=sent, record=record, held_until=sent + DEADLINE * duration_seconds)

    def may_act(self, now: float) -> bool:
        return self.held_until is not None and now < self.held_until


def decide(view: View, identity: str, duration_seconds: float, now: float) -> Decision:
    """What to do now.

    A Lease that isn't there, or that nobody ever took, is waited for as for one that somebody holds: it was deleted
    under its holder, or an operator of a version without leases is just being replaced. One with the own name was left
    by an earlier process of the same pod, which is dead.
    """
    if view.held_until is not None:
        is_taken = view.record is not None and view.record.holder != identity
        if is_taken or not view.may_act(now):
            return Decision.STEP_DOWN
        return Decision.RENEW if now >= _due(view, duration_seconds) else Decision.WAIT
    if view.record is not None and (view.record.holder == identity or view.record.is_released):
        return Decision.ACQUIRE
    return Decision.ACQUIRE if now >= _due(view, duration_seconds) else Decision.WAIT


def pause_seconds(view: View, duration_seconds: float, now: float) -> float:
    """For how long to sleep after WAIT: a holder until it renews, another one until it looks again."""
    remaining = max(0.0, _due(view, duration_seconds) - now)
    return remaining if view.held_until is not None else min(LOOK * duration_seconds, remaining)


def _due(view: View, duration_seconds: float) -> float:
    """When time alone changes the decision: a renewal is due, or the Lease has run out."""
    if view.held_until is not None:
        return view.held_until - (DEADLINE - RENEW) * duration_seconds
    return view.since + (duration_seconds if view.record is None else view.record.duration_seconds)
