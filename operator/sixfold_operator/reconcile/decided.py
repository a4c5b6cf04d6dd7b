"""What is known of the world outside of Kubernetes, and what was decided from it. Plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sixfold_api.control_status import HistoryEntry
from sixfold_operator.alerts import Firing
from sixfold_operator.control.model import Observed, Signal, Snapshot, State, View
from sixfold_operator.control.tickets import TicketPlan


@dataclass(frozen=True)
class Watched:
    """What is known of the world outside of Kubernetes.

    Attributes:
        signals: all that are watched; none where no Prometheus is configured.
        snapshot: what Prometheus said last about a policy; None before the first round.
        firing: alerts of a policy that fire now.
        hears: whether Alertmanager can tell of them.
    """

    signals: Callable[[], Sequence[Signal]]
    snapshot: Callable[[str, str], Snapshot | None]
    firing: Callable[[str, str], Firing]
    hears: bool = False


NOTHING_WATCHED = Watched(signals=tuple, snapshot=lambda *_: None, firing=lambda *_: {})
"""Where neither Prometheus nor a receiver of alerts is configured."""


@dataclass(frozen=True)
class Decided:
    """What was decided.

    Attributes:
        observed: signals and alerts as they were judged now; none between two intervals.
        snapshot: what they were judged from.
        unknown: signals of spec.analysis.thresholds that nobody watches.
    """

    state: State
    view: View
    thresholds: Mapping[str, float]
    decisions: tuple[HistoryEntry, ...] = ()
    recorded: tuple[HistoryEntry, ...] = ()
    """Decisions that stand in the status already."""
    observed: tuple[Observed, ...] = ()
    snapshot: Snapshot | None = None
    unknown: tuple[str, ...] = ()
    watches: bool = True
    """Whether a Prometheus is configured."""
    hears: bool = False
    """Whether Alertmanager can tell of alerts."""
    tickets: TicketPlan = field(default_factory=TicketPlan)
    """What becomes of the policy's tickets."""
