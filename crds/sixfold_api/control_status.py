"""What the control loop remembers in the policy's status, so that a restart loses nothing.

Values of signals are metrics, not status: the status rests while nothing changes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from sixfold_api.base import StatusModel
from sixfold_api.modes import MAX_LEVEL, Mode
from sixfold_api.scalars import Unquoted

Level = Annotated[int, Field(ge=0, le=MAX_LEVEL), Unquoted]
Moment = Annotated[str, StringConstraints(max_length=32)]
"""RFC 3339 in UTC."""
Word = Annotated[str, StringConstraints(max_length=64)]
Value = Annotated[str, StringConstraints(max_length=64)]
Path = Annotated[str, StringConstraints(max_length=128)]
SpecHash = Annotated[str, StringConstraints(max_length=16)]


class Verdict(StrEnum):
    OK = "Ok"
    BREACH = "Breach"
    UNKNOWN = "Unknown"


class SignalStatus(StatusModel):
    """One signal as it was judged last."""

    name: Annotated[str, StringConstraints(max_length=160)]
    """Of the signal; Alert/<alertname> for an alert."""
    verdict: Verdict = Verdict.UNKNOWN
    """Unknown moves nothing."""
    failures: Annotated[int, Field(ge=0), Unquoted] = 0
    """Breaches in a row, counted up to analysis.failureLimit."""


class Rejection(StatusModel):
    """What isn't tried again until the level-relevant part of the spec, or retryToken, changes. Exactly one of level,
    mode and path is set."""

    level: Level | None = None
    """The level."""
    mode: Mode | None = None
    """The mode."""
    path: Path | None = None
    """JSON pointer into the spec."""
    value: Value | None = None
    """Of a tuned value."""
    spec_hash: SpecHash
    """Of the level-relevant part of the spec."""
    reason: Word = ""
    """The signal that breached."""


class LevelStatus(StatusModel):
    """The level that the operator decided on; never above spec.rollbackLevel."""

    target: Level
    """The level that pods are told to run."""
    reason: Word
    """Why this level: Spec means that it is the user's ceiling, else the signal that breached, or Recovered."""
    since: Moment
    """When the target last changed."""
    rejected: Annotated[list[Rejection], Field(max_length=32)] = []
    """Levels, modes and tuned values that failed twice."""


class Suspension(StatusModel):
    """A mode that the operator turned off."""

    mode: Mode
    """The mode."""
    reason: Word
    """The signal that breached."""
    since: Moment
    """When it was turned off."""


class BreachRecord(StatusModel):
    """A level or mode that was left because of a breach: the second one within rejectWindow rejects it."""

    subject: Word
    """Level/3 or Mode/Speculative."""
    at: Moment
    """When it was left."""


class TunedValue(StatusModel):
    """A value of the spec that the operator, or an approved ticket, replaced."""

    path: Path
    """JSON pointer into the spec, such as /generation/speculative/numTokens."""
    value: Value
    """The value that holds instead."""
    base: Value
    """The spec's own value then: once the spec has another one, the tuned value falls away."""
    ticket: Word = ""
    """The ticket that was approved; empty for AutoApply."""
    since: Moment
    """When it was set."""


class CanaryStatus(StatusModel):
    """What is being tried on a share of the requests: either mode or tuned is set. A level is tried mode by mode."""

    mode: Mode | None = None
    """The mode that is tried."""
    tuned: TunedValue | None = None
    """The value that is tried."""
    percent: Annotated[int, Field(ge=1, le=99), Unquoted]
    """Share of the requests."""
    since: Moment
    """Of this step."""


class TrialStatus(StatusModel):
    """A tuned value that has yet to prove itself."""

    path: Path
    """JSON pointer into the spec."""
    previous: Value | None = None
    """The value before: absent where it was the spec's own."""
    objective: Value
    """Cost of a request before, in the currency of costPerHour."""
    since: Moment
    """When the trial began."""


class HistoryEntry(StatusModel):
    """One decision."""

    at: Moment
    """When it was decided."""
    decision: Word
    """LevelChanged, ModeSuspended, ModeRestored, Rejected, CanaryStarted, CanaryStep, CanaryPromoted, CanaryRejected,
    CanaryEnded, Tuned, TuningKept, TuningReverted, or Observed: what would have been done under automation: Enforce."""
    reason: Word
    """The signal, the alert, Spec, Recovered, RetryToken, Samples."""
    message: Annotated[str, StringConstraints(max_length=512)]
    """A sentence for people, with the figures."""


class SettlingStatus(StatusModel):
    """When something last changed that series with some labels don't tell from what was before: they speak of the
    present once a signal's window has passed since."""

    by_policy: Moment | None = None
    """Series of a whole policy: any change."""
    by_level: Moment | None = None
    """Series of a level: what changed at that level, for whichever requests."""
    by_arm: Moment | None = None
    """Series of a level and arm: what changed at that level for all but the canary's requests."""
    canary: Moment | None = None
    """Series of the canary: when another one ended."""


class ControlStatus(StatusModel):
    """What the reducer needs to go on where it was."""

    spec_hash: SpecHash = ""
    """Of the level-relevant part of the spec that all of this is about."""
    ceiling: Level | None = None
    """spec.rollbackLevel then: a human's change is one of it."""
    retry_token: Annotated[str, StringConstraints(max_length=64)] = ""
    """spec.retryToken then."""
    changed_at: Moment | None = None
    """When the operator last changed something by itself: cooldown counts from here."""
    healthy_since: Moment | None = None
    """Since when health has been conclusive, while there is something to recover."""
    healthy_seconds: Annotated[int, Field(ge=0), Unquoted] = 0
    """Conclusive health before an interruption."""
    breaches: Annotated[list[BreachRecord], Field(max_length=16)] = []
    """What was left lately because of a breach."""
    trial: TrialStatus | None = None
    """The tuned value that has yet to prove itself."""
    settling: SettlingStatus = SettlingStatus()
    """Since when signals speak of what runs now."""
