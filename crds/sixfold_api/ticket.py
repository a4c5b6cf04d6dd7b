"""OptimizationTicket: waste that was seen, what it costs, and what would end it. Written by the operator; the
decision is a human's."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from sixfold_api.analysis import SignalName
from sixfold_api.base import ApiModel, Rule, SpecModel, StatusModel
from sixfold_api.conditions import Conditions
from sixfold_api.control_status import Moment, Path, Value
from sixfold_api.scalars import Decimal, Duration, OurName, Unquoted

Sentence = Annotated[str, StringConstraints(max_length=1024)]


class Cause(StrEnum):
    """Why capacity is wasted."""

    PADDING = "Padding"
    REJECTED_DRAFT = "RejectedDraft"
    RECOMPUTED_PREFIX = "RecomputedPrefix"
    UNNEEDED_LAYERS = "UnneededLayers"
    CANCELLED = "Cancelled"
    LOW_HIT_RATE = "LowHitRate"
    MIS_HOT_TASK = "MisHotTask"
    IDLE_ACCELERATOR = "IdleAccelerator"
    GENERATED_LABELS = "GeneratedLabels"
    """Classification by text generation."""


class Decision(StrEnum):
    PENDING = "Pending"
    APPROVED = "Approved"
    DISMISSED = "Dismissed"


class Phase(StrEnum):
    OPEN = "Open"
    APPLIED = "Applied"
    RESOLVED = "Resolved"
    DISMISSED = "Dismissed"


class HeatMapCell(ApiModel):
    """Where most of it happened."""

    hour: Annotated[int, Field(ge=0, le=23), Unquoted]
    """Of the day, UTC."""
    length_bucket: Annotated[str, StringConstraints(max_length=16)]
    """Tokens of the prompts, such as 100-500."""
    variant: OurName
    """The ModelVariant."""


class Evidence(ApiModel):
    """What was measured when the ticket was opened."""

    signal: SignalName
    """Name of the signal."""
    query: Annotated[str, StringConstraints(max_length=4096)]
    """PromQL."""
    value: Decimal
    """What was measured."""
    threshold: Decimal
    """What it should not pass."""
    window: Duration
    """Of the query."""
    cell: HeatMapCell | None = None
    """Where most of it happened."""


class Recommendation(ApiModel):
    """What would end the waste."""

    summary: Sentence
    """For people."""
    patch: Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})] | None = (
        None
    )
    """Merge patch of the policy, which was tried against its schema: kubectl patch ipol NAME --type=merge -p …"""
    path: Path | None = None
    """Set where the patch is of one tunable: approving the ticket applies it. Other patches are yours to apply."""
    value: Value | None = None
    """Of the tunable."""

    rules = (
        Rule(
            "has(self.path) == has(self.value)",
            "path and value belong together",
            lambda r: (r.path is None) == (r.value is None),
        ),
    )


class PolicyRef(ApiModel):
    """A policy in the same namespace."""

    name: OurName
    """Name of the InferencePolicy."""


class OptimizationTicketSpec(SpecModel):
    """All but `decision` is written by the operator, once."""

    policy_ref: PolicyRef
    """The policy that wastes."""
    fingerprint: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{10}$", max_length=16)]
    """Of policy, cause and variant: there is one ticket of each."""
    cause: Cause
    """Why."""
    variant: OurName | None = None
    """The ModelVariant, where the waste is one's."""
    evidence: Evidence
    """What was measured."""
    recommendation: Recommendation
    """What would end it."""
    saving_per_month: Decimal | None = None
    """Estimate, in the currency of engine.costPerHour; absent where that isn't set."""
    decision: Decision = Decision.PENDING
    """Yours: Approved applies a tunable, Dismissed closes the ticket for as long as the signal breaches."""

    rules = (
        Rule(
            "self.policyRef == oldSelf.policyRef && self.fingerprint == oldSelf.fingerprint"
            " && self.cause == oldSelf.cause && self.evidence == oldSelf.evidence"
            " && self.recommendation == oldSelf.recommendation",
            "a ticket is what was found when it was opened: only decision may change",
        ),
    )


class SinkState(StrEnum):
    PENDING = "Pending"
    DELIVERED = "Delivered"
    FAILED = "Failed"
    """It will be tried again."""


class SinkStatus(StatusModel):
    """One place outside of the cluster."""

    name: Annotated[str, StringConstraints(max_length=40)]
    """Of the chart's values."""
    state: SinkState
    """Pending, Delivered, or Failed, which is tried again."""
    phase: Phase | None = None
    """The phase that it was told last."""
    reference: Annotated[str, StringConstraints(max_length=512)] = ""
    """Its own name of the ticket, such as the address of an issue."""
    message: Annotated[str, StringConstraints(max_length=512)] = ""
    """Why it failed."""


class OptimizationTicketStatus(StatusModel):
    """What became of it. Written by the operator alone."""

    phase: Phase = Phase.OPEN
    """Open, Applied, Resolved or Dismissed."""
    first_seen: Moment | None = None
    """When the waste was first seen."""
    last_seen: Moment | None = None
    """Of the last occurrence: a breach after the signal had been healthy."""
    occurrences: Annotated[int, Field(ge=0), Unquoted] = 0
    """How many times it came back, the first one included."""
    healthy_since: Moment | None = None
    """Since when its signal has been healthy; it is resolved when that has been long enough."""
    sinks: Annotated[
        list[SinkStatus],
        Field(
            max_length=8,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ] = []
    """What each sink was told."""
    conditions: Conditions = []
    """Applied: whether an approved recommendation could be applied, and why not."""
