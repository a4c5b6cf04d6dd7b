"""What the control loop looks at and what it remembers: plain data. The decisions are in the modules beside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from sixfold_api.control_status import (
    CanaryStatus,
    ControlStatus,
    HistoryEntry,
    LevelStatus,
    SignalStatus,
    Suspension,
    TunedValue,
    Verdict,
)
from sixfold_api.modes import Mode
from sixfold_api.ticket import Cause


class SignalKind(StrEnum):
    """Health signals roll back; waste signals open tickets and tune; figures are read for both and never judged."""

    HEALTH = "Health"
    WASTE = "Waste"
    FIGURE = "Figure"


class Action(StrEnum):
    """What a breach of a health signal leads to."""

    STEP_DOWN = "StepDown"
    LEVEL_0 = "Level0"
    SUSPEND = "Suspend"


@dataclass(frozen=True)
class Signal:
    """Something that is watched, for all policies with one query.

    Attributes:
        query: PromQL that gives one series a policy, or one a policy, level and arm, by labels of these names
            (`namespace`, `policy`, `level`, `arm`); `$window` stands for the window.
        samples: PromQL of how many observations stand behind the value, with the same labels.
        is_high_bad: whether values above the threshold breach; else those below.
        clear: where a breach ends, as a multiple of the threshold: 0.9 means 10 % below it (1.1 above, if low is bad).
        window_seconds: of the query; a waste signal's is longer.
        action, blames: of health signals; `blames` is the mode that SUSPEND turns off.
        is_primary: health is conclusive only while each primary signal is Ok.
        cause: of waste signals.
        unit: "s", "share" or "".
    """

    name: str
    kind: SignalKind
    description: str
    query: str
    samples: str
    threshold: float
    is_high_bad: bool = True
    clear: float = 0.9
    min_samples: float = 20.0
    window_seconds: float = 60.0
    action: Action = Action.STEP_DOWN
    blames: Mode | None = None
    is_primary: bool = False
    is_proportion: bool = False
    """The lower 95 % bound of the value, as a share of `samples`, is what must stay under the threshold."""
    cause: Cause | None = None
    unit: str = ""


@dataclass(frozen=True)
class Reading:
    """One series of a signal's answer. `level` and `arm` are None where the query doesn't tell them apart."""

    value: float
    samples: float
    unix_seconds: float
    level: int | None = None
    arm: str | None = None
    variant: str | None = None
    cause: Cause | None = None
    length_bucket: str | None = None


@dataclass(frozen=True)
class Snapshot:
    """What Prometheus said about one policy at one time.

    Attributes:
        problems: signal -> why it couldn't be read, in a sentence; its verdict is Unknown.
        reason: of the condition MetricsAvailable: Found, Missing, Stale or PrometheusError.
    """

    at: datetime
    readings: Mapping[str, tuple[Reading, ...]] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    reason: str = "Found"
    message: str = ""


@dataclass(frozen=True)
class Observed:
    """One signal, or one alert, judged for one policy."""

    name: str
    verdict: Verdict
    kind: SignalKind = SignalKind.HEALTH
    action: Action = Action.STEP_DOWN
    blames: Mode | None = None
    is_primary: bool = False
    value: float | None = None
    threshold: float | None = None
    why: str = ""
    """A sentence for people: the figures of a breach, or why it is Unknown."""


@dataclass(frozen=True)
class Timing:
    """spec.analysis in seconds."""

    interval: float = 30.0
    initial_delay: float = 120.0
    failure_limit: int = 3
    cooldown: float = 900.0
    recover_after: float = 1800.0
    reject_window: float = 21600.0


@dataclass(frozen=True)
class CanaryPlan:
    """spec.canary."""

    steps: tuple[int, ...]
    step_seconds: float
    min_samples: int


@dataclass(frozen=True)
class CanaryJudgement:
    """The canary's requests beside the others', since its step began. Breach of any signal rejects it."""

    verdict: Verdict
    samples: int
    why: str = ""
    signal: str = ""
    """The one that breached, such as ErrorRate."""


PROCESS_WIDE = frozenset({Mode.SAMPLER_PIPELINE, Mode.SUBGRAPHS, Mode.DYNAMIC_BATCHING})


@dataclass(frozen=True)
class View:
    """What a spec says, as far as the reducer cares.

    Attributes:
        ceiling: spec.rollbackLevel.
        levels: levels that differ for this policy, ascending, 0 and the ceiling among them where they differ.
        modes: modes that the spec asks for and that can run.
        spec_hash: of the level-relevant part of the spec.
        ready_since: since when the policy has been Ready; None while it isn't.
        unsplittable: modes that are a whole process's, so that no canary can try them on a share of its requests
            (Quantized too, where weights are swapped).
    """

    ceiling: int
    levels: tuple[int, ...]
    modes: frozenset[Mode]
    spec_hash: str
    enforce: bool = True
    retry_token: str = ""
    timing: Timing = Timing()
    canary: CanaryPlan | None = None
    ready_since: datetime | None = None
    unsplittable: frozenset[Mode] = PROCESS_WIDE


@dataclass(frozen=True)
class State:
    """What the loop remembers of a policy: parts of its status, none before the first decision.

    Attributes:
        active: modes that were on for all requests, as status.modes says; None where that isn't known. The reducer
            reads it to tell modes that a changed spec adds, and leaves it as it is.
    """

    level: LevelStatus | None = None
    suspended: tuple[Suspension, ...] = ()
    tuned: tuple[TunedValue, ...] = ()
    canary: CanaryStatus | None = None
    signals: tuple[SignalStatus, ...] = ()
    control: ControlStatus = field(default_factory=ControlStatus)
    active: frozenset[Mode] | None = None


@dataclass(frozen=True)
class Outcome:
    """What follows: the new state, and what was decided, oldest first."""

    state: State
    decisions: tuple[HistoryEntry, ...] = ()
